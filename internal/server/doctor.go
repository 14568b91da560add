package server

import (
	"bytes"
	"context"
	"io"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab/api"
)

// doctorRoutes returns the routes for doctor bundles. They need admin access: a
// bundle has the configuration of the daemon and texts of its host.
func (s *Server) doctorRoutes() []route {
	const verb, gz = "doctor.make", "application/gzip"
	return []route{
		{post, "/v1/doctor", AccessAdmin, verb, noTarget, anyOrigin, 200, "doctor", "Make a doctor bundle (tar.gz) of the whole installation", raw(gz, s.doctor)},
		{post, "/v1/sandboxes/{sandbox}/doctor", AccessAdmin, verb, onSandbox, anyOrigin, 200, "sandbox-doctor", "Make a doctor bundle (tar.gz) of a sandbox", raw(gz, s.sandboxDoctor)},
		{post, "/v1/jobs/{job}/doctor", AccessAdmin, verb, onJob, anyOrigin, 200, "job-doctor", "Make a doctor bundle (tar.gz) of a job", raw(gz, s.jobDoctor)},
		{post, "/v1/workspaces/{workspace}/doctor", AccessAdmin, verb, noTarget, anyOrigin, 200, "workspace-doctor", "Make a doctor bundle (tar.gz) of a workspace", raw(gz, s.workspaceDoctor)},
		{post, "/v1/sessions/{session}/doctor", AccessAdmin, verb, noTarget, anyOrigin, 200, "session-doctor", "Make a doctor bundle (tar.gz) of a session", raw(gz, s.sessionDoctor)},
	}
}

func (s *Server) doctor(ctx context.Context, _ *struct{}) (*huma.StreamResponse, error) {
	return s.doctorBundle(ctx, api.DoctorInstallation, "")
}

func (s *Server) sandboxDoctor(ctx context.Context, in *sandboxInput) (*huma.StreamResponse, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Sandbox)
	if err != nil {
		return nil, err
	}
	return s.doctorBundle(ctx, api.DoctorSandbox, strconv.Itoa(sb.VMID))
}

func (s *Server) jobDoctor(ctx context.Context, in *JobInput) (*huma.StreamResponse, error) {
	j, err := s.cfg.Services.Jobs.Get(ctx, in.Job)
	if err != nil {
		return nil, err
	}
	return s.doctorBundle(ctx, api.DoctorJob, j.ID)
}

func (s *Server) workspaceDoctor(ctx context.Context, in *WorkspaceInput) (*huma.StreamResponse, error) {
	v, err := s.cfg.Services.Workspaces.Get(ctx, in.Workspace)
	if err != nil {
		return nil, err
	}
	return s.doctorBundle(ctx, api.DoctorWorkspace, v.ID)
}

func (s *Server) sessionDoctor(ctx context.Context, in *SessionInput) (*huma.StreamResponse, error) {
	v, err := s.cfg.Services.Sessions.Get(ctx, in.Session)
	if err != nil {
		return nil, err
	}
	return s.doctorBundle(ctx, api.DoctorSession, v.ID)
}

func (s *Server) doctorBundle(ctx context.Context, kind, id string) (*huma.StreamResponse, error) {
	return s.stream(ctx, func(ctx context.Context) (io.ReadCloser, map[string]string, error) {
		data, err := s.cfg.Services.Bundles.Make(ctx, kind, id)
		return io.NopCloser(bytes.NewReader(data)), map[string]string{"Content-Type": "application/gzip", "Content-Length": strconv.Itoa(len(data))}, err
	})
}
