package server

import (
	"context"
	"strings"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/secret"
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

func (s *Server) initSecrets(_ context.Context, _ *struct{}) (api.SecretVault, error) {
	if err := s.cfg.Services.Secrets.Init(); err != nil {
		return api.SecretVault{}, err
	}
	public, others, err := s.cfg.Services.Secrets.Public()
	return api.SecretVault{PublicKey: public, Recipients: others}, err
}

func (s *Server) rotateSecrets(ctx context.Context, in *struct{ Body api.SecretRotate }) (api.SecretVault, error) {
	r, err := s.cfg.Services.Secrets.Rotate(ctx, in.Body.Add, in.Body.Remove)
	return api.SecretVault(r), err
}

func (s *Server) validateSecrets(ctx context.Context, in *struct{ Body api.SecretValidate }) (api.SecretCheck, error) {
	checked, found, err := s.cfg.Services.Secrets.Validate(ctx, in.Body.Bundle, in.Body.Resolve)
	return api.SecretCheck{Checked: nonNil(checked), Findings: mapSlice(found, func(f secret.Finding) api.SecretFinding { return api.SecretFinding(f) })}, err
}

func (s *Server) listBundles(ctx context.Context, _ *struct{}) ([]api.SecretBundle, error) {
	list, err := s.cfg.Services.Secrets.Bundles(ctx)
	return mapSlice(list, func(b secret.Info) api.SecretBundle {
		b.Keys = nonNil(b.Keys)
		return api.SecretBundle(b)
	}), err
}

func (s *Server) createBundle(ctx context.Context, in *struct{ Body api.SecretCreate }) (none, error) {
	return none{}, s.cfg.Services.Secrets.Create(ctx, in.Body.Name)
}

func (s *Server) listSecrets(ctx context.Context, in *bundleInput) ([]string, error) {
	return s.cfg.Services.Secrets.Keys(ctx, in.Bundle)
}

func (s *Server) showSecrets(ctx context.Context, in *showSecretsInput) ([]api.SecretEntry, error) {
	list, err := s.cfg.Services.Secrets.Entries(ctx, in.Bundle, in.Body.Reveal)
	if in.Body.Reveal && err == nil {
		s.log.Info("the values of a secrets bundle were shown", "bundle", in.Bundle)
	}
	return mapSlice(list, func(e secret.Entry) api.SecretEntry { return api.SecretEntry(e) }), err
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
