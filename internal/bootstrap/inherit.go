package bootstrap

import (
	"context"

	"github.com/agentlab-vm/agentlab"
)

// ReceivedSecrets reports whether the guest of a sandbox may have received
// secrets: they are stored before they are sent.
func (s *Service) ReceivedSecrets(sb agentlab.Sandbox) (bool, error) {
	_, ok, err := s.cfg.Secrets.Delivered(secretsKey(sb))
	return ok, err
}

// Inherit stores the secrets that the guest of one sandbox has received as those
// of another one, whose guest continues its memory. It reports whether there are
// any.
func (s *Service) Inherit(ctx context.Context, from, to agentlab.Sandbox) (bool, error) {
	values, ok, err := s.cfg.Secrets.Delivered(secretsKey(from))
	if err != nil || !ok {
		return ok, err
	}
	if err := s.cfg.Secrets.SaveDelivered(ctx, secretsKey(to), values); err != nil {
		return true, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.redactors, secretsKey(to))
	return true, nil
}
