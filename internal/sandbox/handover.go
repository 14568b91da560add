package sandbox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// handover is how far the secrets of a sandbox without a job have come. (Of a
// job's it is the job service that knows, by what its runner does with them.)
type handover struct {
	traded time.Time // when its token was first seen to be traded, or to have expired
	again  int       // how often it was given another one
	done   bool      // its guest has them, or will not be asked any more
}

// maxAgain is how often a guest is given another one-time token.
const maxAgain = 3

// handOver sees to it that the runner of a sandbox without a job has its
// secrets: when its token was traded and the guest does not have the answer,
// that was lost, and the guest gets another token, a few times. It returns
// when to look again, 0 for not at all.
func (s *Service) handOver(ctx context.Context, sb agentlab.Sandbox) (time.Duration, error) {
	var h handover
	s.with(sb.VMID, func(m *memory) { h = m.handover })
	if h.done || sb.JobID != "" || sb.State != agentlab.SandboxReady || s.cfg.ServeGuest == nil || !s.hasSecrets(sb) {
		return 0, nil
	}
	open, err := s.cfg.Store.BootstrapOpen(ctx, sb.VMID)
	if err != nil {
		return 0, err
	}
	if open {
		return s.lim.Unused, nil
	}
	now := s.clock()
	if h.traded.IsZero() {
		h.traded = now
	}
	health, err := s.control(sb).Health(ctx)
	h.done = err == nil && health.Bootstrapped
	left := h.traded.Add(s.lim.Unused << (2 * h.again)).Sub(now)
	if !h.done && err == nil && left <= 0 {
		if err = s.identify(ctx, sb, s.control(sb)); err == nil {
			s.log.Info("a sandbox does not have what its bootstrap token was traded for; it can fetch it again", "vmid", sb.VMID)
			h.again++
			h.traded, h.done = time.Time{}, h.again == maxAgain
			s.with(sb.VMID, func(m *memory) { m.token = "" })
		}
	}
	if err != nil {
		s.log.Debug("a guest cannot be asked for its secrets", "vmid", sb.VMID, "err", err)
	}
	s.with(sb.VMID, func(m *memory) { m.handover = h })
	if h.done {
		return 0, nil
	}
	return max(left, s.lim.Unused), nil
}
