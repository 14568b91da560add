package server

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
)

// maxProfileBytes is the maximum size of the text of a profile.
const maxProfileBytes = 256 << 10

func (s *Server) listProfiles(ctx context.Context, _ *struct{}) (api.List[api.Profile], error) {
	list, err := s.cfg.Services.Profiles.List(ctx)
	return api.List[api.Profile]{Items: append([]api.Profile{}, list...)}, err
}

func (s *Server) getProfile(ctx context.Context, in *profileInput) (api.Profile, error) {
	return s.cfg.Services.Profiles.Get(ctx, in.Profile)
}

type putProfileInput struct {
	Profile string `path:"profile" doc:"Name of a profile"`
	Payload payload
}

func (s *Server) putProfile(ctx context.Context, in *putProfileInput) (api.Profile, error) {
	yaml, err := in.Payload.text(maxProfileBytes)
	if err != nil {
		return api.Profile{}, err
	}
	return s.cfg.Services.Profiles.Put(ctx, in.Profile, yaml)
}

type validateProfileInput struct{ Payload payload }

func (s *Server) validateProfile(ctx context.Context, in *validateProfileInput) (api.Profile, error) {
	yaml, err := in.Payload.text(maxProfileBytes)
	if err != nil {
		return api.Profile{}, err
	}
	return s.cfg.Services.Profiles.Validate(ctx, yaml)
}
