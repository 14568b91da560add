package server

import (
	"context"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

type warmImageInput struct {
	Image string `path:"image" doc:"Name of an image, or name@digest"`
	Body  api.TemplateWarm
}

func (s *Server) warmImage(_ context.Context, in *warmImageInput) (*huma.StreamResponse, error) {
	return s.withProgress("warm image "+in.Image, func(ctx context.Context, progress func(string)) (any, error) {
		t, err := s.cfg.Services.Templates.Warm(ctx, agentlab.SandboxRequest{Image: in.Image, Profile: in.Body.Profile, Backend: in.Body.Backend}, progress)
		return toTemplate(t), err
	}), nil
}

func (s *Server) listTemplates(ctx context.Context, _ *struct{}) (api.List[api.Template], error) {
	list, missing, err := s.cfg.Services.Templates.Templates(ctx)
	return api.List[api.Template]{Items: nonNil(mapSlice(list, toTemplate)), Missing: texts(missing)}, err
}

func (s *Server) removeTemplate(ctx context.Context, in *templateInput) ([]api.Template, error) {
	list, err := s.cfg.Services.Templates.DeleteTemplate(ctx, in.Template)
	return mapSlice(list, toTemplate), err
}

func (s *Server) removeTemplates(ctx context.Context, _ *struct{}) ([]api.Template, error) {
	list, err := s.cfg.Services.Templates.DeleteTemplate(ctx, "")
	return mapSlice(list, toTemplate), err
}

func toTemplate(t fleet.Template) api.Template {
	return api.Template{
		Backend: t.Backend, Key: t.Key, Image: t.Image, Cores: t.Resources.Cores, MemoryMB: t.Resources.MemoryMB, DiskUsage: t.Bytes,
		CreatedAt: t.Made.UTC(), UsedAt: t.Used.UTC(), Stale: t.Stale,
	}
}
