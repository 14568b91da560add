package server

import (
	"context"
	"strings"

	"github.com/agentlab-vm/agentlab/api"
)

// maxSecretBytes is the largest value of a secret.
const maxSecretBytes = 256 << 10

type bundleInput struct {
	Bundle string `path:"bundle" doc:"Name of a secrets bundle"`
}

type secretInput struct {
	Bundle string `path:"bundle" doc:"Name of a secrets bundle"`
	Key    string `path:"key" doc:"Key, e.g. env.NAME or git.token"`
}

type setSecretInput struct {
	Bundle  string `path:"bundle" doc:"Name of a secrets bundle"`
	Key     string `path:"key" doc:"Key, e.g. env.NAME or git.token"`
	Payload payload
}

// listSecrets answers with keys; there is no route that gives a value back.
func (s *Server) listSecrets(_ context.Context, in *bundleInput) (api.List[string], error) {
	keys, err := s.cfg.Services.Secrets.Keys(in.Bundle)
	return api.List[string]{Items: append([]string{}, keys...)}, err
}

func (s *Server) setSecret(ctx context.Context, in *setSecretInput) (none, error) {
	value, err := in.Payload.text(maxSecretBytes)
	if err != nil {
		return none{}, err
	}
	return none{}, s.cfg.Services.Secrets.Set(ctx, in.Bundle, in.Key, strings.NewReader(value))
}

func (s *Server) unsetSecret(ctx context.Context, in *secretInput) (none, error) {
	return none{}, s.cfg.Services.Secrets.Unset(ctx, in.Bundle, in.Key)
}
