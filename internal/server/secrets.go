package server

import (
	"context"
	"strings"

	"github.com/agentlab-vm/agentlab/api"
)

// The maximum size of a value of a secret, and of a bundle.
const (
	maxSecretBytes = 256 << 10
	maxBundleText  = 1 << 20
)

type bundleInput struct {
	Bundle string `path:"bundle" doc:"Name of a secrets bundle"`
}

type secretInput struct {
	Bundle string `path:"bundle" doc:"Name of a secrets bundle"`
	Key    string `path:"key" doc:"Key, e.g. env.NAME or git.token"`
}

type setSecretInput struct {
	Bundle    string `path:"bundle" doc:"Name of a secrets bundle"`
	Key       string `path:"key" doc:"Key, e.g. env.NAME or git.token"`
	Reference bool   `query:"reference" doc:"The value is a reference: op://…, env:…, file:… or cmd:…"`
	Payload   payload
}

type replaceSecretsInput struct {
	Bundle  string `path:"bundle" doc:"Name of a secrets bundle"`
	Version string `query:"version" doc:"Version of the edited text; empty for a new bundle"`
	Payload payload
}

type showSecretsInput struct {
	Bundle string `path:"bundle" doc:"Name of a secrets bundle"`
	Body   api.SecretShow
}

func (s *Server) initSecrets(ctx context.Context, _ *struct{}) (api.SecretVault, error) {
	return s.cfg.Services.Secrets.Init(ctx)
}

func (s *Server) rotateSecrets(ctx context.Context, in *struct{ Body api.SecretRotate }) (api.SecretVault, error) {
	return s.cfg.Services.Secrets.Rotate(ctx, in.Body.Add, in.Body.Remove)
}

func (s *Server) validateSecrets(ctx context.Context, in *struct{ Body api.SecretValidate }) (api.SecretCheck, error) {
	return s.cfg.Services.Secrets.Validate(ctx, in.Body.Bundle, in.Body.Resolve)
}

func (s *Server) listBundles(ctx context.Context, _ *struct{}) (api.List[api.SecretBundle], error) {
	all, err := s.cfg.Services.Secrets.Bundles(ctx)
	return api.List[api.SecretBundle]{Items: append([]api.SecretBundle{}, all...)}, err
}

func (s *Server) createBundle(ctx context.Context, in *struct{ Body api.SecretCreate }) (none, error) {
	return none{}, s.cfg.Services.Secrets.Create(ctx, in.Body.Name)
}

func (s *Server) listSecrets(ctx context.Context, in *bundleInput) (api.List[string], error) {
	keys, err := s.cfg.Services.Secrets.Keys(ctx, in.Bundle)
	return api.List[string]{Items: append([]string{}, keys...)}, err
}

func (s *Server) showSecrets(ctx context.Context, in *showSecretsInput) (api.List[api.SecretEntry], error) {
	all, err := s.cfg.Services.Secrets.Entries(ctx, in.Bundle, in.Body.Reveal)
	if in.Body.Reveal && err == nil {
		s.log.Info("the values of a secrets bundle were shown", "bundle", in.Bundle)
	}
	return api.List[api.SecretEntry]{Items: append([]api.SecretEntry{}, all...)}, err
}

func (s *Server) secretsText(ctx context.Context, in *bundleInput) (api.SecretText, error) {
	text, version, err := s.cfg.Services.Secrets.Text(ctx, in.Bundle)
	if err == nil {
		s.log.Info("the text of a secrets bundle was read", "bundle", in.Bundle)
	}
	return api.SecretText{Text: text, Version: version}, err
}

func (s *Server) replaceSecrets(ctx context.Context, in *replaceSecretsInput) (none, error) {
	text, err := in.Payload.text(maxBundleText)
	if err != nil {
		return none{}, err
	}
	return none{}, s.cfg.Services.Secrets.Replace(ctx, in.Bundle, text, in.Version)
}

func (s *Server) setSecret(ctx context.Context, in *setSecretInput) (none, error) {
	value, err := in.Payload.text(maxSecretBytes)
	if err != nil {
		return none{}, err
	}
	return none{}, s.cfg.Services.Secrets.Set(ctx, in.Bundle, in.Key, strings.NewReader(value), in.Reference)
}

func (s *Server) unsetSecret(ctx context.Context, in *secretInput) (none, error) {
	return none{}, s.cfg.Services.Secrets.Unset(ctx, in.Bundle, in.Key)
}
