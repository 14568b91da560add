package server

import (
	"bytes"
	"context"
	"io"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

func (s *Server) health(context.Context, *struct{}) (api.Health, error) {
	return s.cfg.Services.System.Health(), nil
}

func (s *Server) status(ctx context.Context, _ *struct{}) (api.Status, error) {
	return s.cfg.Services.System.Status(ctx)
}

// metricsHeader is the header of metrics; the version is that of their format.
var metricsHeader = map[string]string{"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "X-Content-Type-Options": "nosniff"}

func (s *Server) metrics(ctx context.Context, _ *struct{}) (*huma.StreamResponse, error) {
	return s.stream(ctx, func(ctx context.Context) (io.ReadCloser, map[string]string, error) {
		text, err := s.cfg.Services.Metrics.Text(ctx)
		return io.NopCloser(bytes.NewReader(text)), metricsHeader, err
	})
}

func (s *Server) hostChecks(ctx context.Context, _ *struct{}) (api.HostChecks, error) {
	return s.cfg.Services.Doctor.Checks(ctx)
}

func (s *Server) backends(context.Context, *struct{}) ([]api.Backend, error) {
	return s.cfg.Services.Doctor.Backends(), nil
}

func (s *Server) drainBackend(ctx context.Context, in *backendInput) (api.Backend, error) {
	return s.cfg.Services.Doctor.Drain(ctx, in.Backend, true)
}

func (s *Server) undrainBackend(ctx context.Context, in *backendInput) (api.Backend, error) {
	return s.cfg.Services.Doctor.Drain(ctx, in.Backend, false)
}

func (s *Server) checkBackend(ctx context.Context, in *backendInput) (api.HostChecks, error) {
	return s.cfg.Services.Doctor.CheckBackend(ctx, in.Backend)
}

func (s *Server) backupDatabase(ctx context.Context, _ *struct{}) (api.Backup, error) {
	return s.cfg.Services.Backups.Make(ctx)
}

func (s *Server) confirmClock(ctx context.Context, _ *struct{}) (api.Clock, error) {
	return s.cfg.Services.Clock.Confirm(ctx)
}

type stopDaemonInput struct {
	Force bool `query:"force" doc:"Stop it also while it builds images; a later build continues from the layers that are complete"`
}

func (s *Server) stopDaemon(_ context.Context, in *stopDaemonInput) (none, error) {
	for name, since := range s.cfg.Services.Images.Building() {
		if !in.Force {
			return none{}, agentlab.Errorf(agentlab.CodeBusy, "the daemon has been building the image %s for %s, and would interrupt that", name, time.Since(since).Round(time.Second)).
				WithHint("wait for it: agentlab image build %s; or interrupt it, a later build continues from what is complete: agentlab daemon stop --force", name)
		}
	}
	s.cfg.Services.System.Stop()
	return none{}, nil
}
