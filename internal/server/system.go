package server

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
)

func (s *Server) health(context.Context, *struct{}) (api.Health, error) {
	return s.cfg.Services.System.Health(), nil
}

func (s *Server) status(ctx context.Context, _ *struct{}) (api.Status, error) {
	return s.cfg.Services.System.Status(ctx)
}

func (s *Server) hostChecks(ctx context.Context, _ *struct{}) (api.HostChecks, error) {
	return s.cfg.Services.Doctor.Checks(ctx)
}

func (s *Server) backupDatabase(ctx context.Context, _ *struct{}) (api.Backup, error) {
	return s.cfg.Services.Backups.Make(ctx)
}

func (s *Server) confirmClock(ctx context.Context, _ *struct{}) (api.Clock, error) {
	return s.cfg.Services.Clock.Confirm(ctx)
}

func (s *Server) stopDaemon(context.Context, *struct{}) (none, error) {
	s.cfg.Services.System.Stop()
	return none{}, nil
}
