package server

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/profile"
)

// maxProfileBytes is the maximum size of the text of a profile.
const maxProfileBytes = 256 << 10

func (s *Server) listProfiles(_ context.Context, _ *struct{}) ([]api.Profile, error) {
	list, err := s.cfg.Services.Profiles.List()
	return mapSlice(list, func(e profile.Entry) api.Profile {
		e.YAML = ""
		return s.installed(e)
	}), err
}

// installed is toProfile for a profile that requests can name.
func (s *Server) installed(e profile.Entry) api.Profile {
	p := toProfile(e)
	p.Default = p.Name != "" && p.Name == s.cfg.DefaultProfile
	p.SessionDefault = p.Name != "" && p.Name == s.cfg.SessionProfile
	return p
}

func (s *Server) getProfile(_ context.Context, in *profileInput) (api.Profile, error) {
	e, err := s.cfg.Services.Profiles.Find(in.Profile)
	return s.installed(e), err
}

type putProfileInput struct {
	Profile string `path:"profile" doc:"Name of a profile"`
	Payload payload
}

func (s *Server) putProfile(_ context.Context, in *putProfileInput) (api.Profile, error) {
	yaml, err := in.Payload.text(maxProfileBytes)
	if err != nil {
		return api.Profile{}, err
	}
	e, err := s.cfg.Services.Profiles.Put(in.Profile, yaml)
	return s.installed(e), err
}

type removeProfileInput struct {
	Profile string `path:"profile" doc:"Name of a profile"`
	SHA256  string `query:"sha256" required:"true" doc:"SHA-256 of the text to remove, in hexadecimal; another text is not removed"`
}

func (s *Server) removeProfile(_ context.Context, in *removeProfileInput) (none, error) {
	return none{}, s.cfg.Services.Profiles.Remove(in.Profile, in.SHA256)
}

type validateProfileInput struct{ Payload payload }

// validateProfile returns an error for a text that does not parse and for
// settings that this backend does not support.
func (s *Server) validateProfile(_ context.Context, in *validateProfileInput) (api.Profile, error) {
	yaml, err := in.Payload.text(maxProfileBytes)
	if err != nil {
		return api.Profile{}, err
	}
	e := s.cfg.Services.Profiles.Check(yaml)
	return toProfile(e), e.Err
}

func toProfile(e profile.Entry) api.Profile {
	p := e.Profile
	out := api.Profile{
		Name: e.Name, Image: p.Image, Cores: p.Resources.Cores, MemoryMB: p.Resources.MemoryMB, RootSizeGB: p.Resources.RootSizeGB, Nested: nested(p.Resources.Nested),
		Network: p.Network.Mode, Backend: p.Backend, Workspace: p.Workspace, Keepalive: p.Keepalive, TTLMinutes: int(p.TTL.Minutes()), Terminal: p.Terminal, Devcontainer: p.Devcontainer, Secrets: p.SecretsBundle,
		Source: e.Source, YAML: e.YAML, Usable: e.Err == nil,
	}
	if e.Err != nil {
		out.Problem = e.Err.Error()
	}
	return out
}
