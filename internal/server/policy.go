package server

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
)

// Policies returns the network policies of profiles and sandboxes, and applies
// changed ones.
type Policies interface {
	OfProfile(ctx context.Context, name string) (api.Policy, error)
	OfSandbox(ctx context.Context, nameOrVMID string) (api.Policy, error)
	CheckProfile(ctx context.Context, name, target string) (api.PolicyCheck, error)
	CheckSandbox(ctx context.Context, nameOrVMID, target string) (api.PolicyCheck, error)
	Presets(ctx context.Context) ([]api.PolicyPreset, error)

	// Reload applies the current policy of its profile to a sandbox, or with
	// "" to every sandbox whose profile's policy has changed.
	Reload(ctx context.Context, nameOrVMID string) ([]api.PolicyReload, error)
}

func (s *Server) sandboxPolicy(ctx context.Context, in *sandboxInput) (api.Policy, error) {
	return s.cfg.Services.Policies.OfSandbox(ctx, in.Sandbox)
}

func (s *Server) profilePolicy(ctx context.Context, in *profileInput) (api.Policy, error) {
	return s.cfg.Services.Policies.OfProfile(ctx, in.Profile)
}

type checkSandboxInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox"`
	Target  string `query:"target" required:"true" doc:"HOST:PORT, HOST:PORT/udp, [IPv6]:PORT, HOST/icmp, or a HOST (port 443)"`
}

func (s *Server) checkSandboxPolicy(ctx context.Context, in *checkSandboxInput) (api.PolicyCheck, error) {
	return s.cfg.Services.Policies.CheckSandbox(ctx, in.Sandbox, in.Target)
}

type checkProfileInput struct {
	Profile string `path:"profile" doc:"Name of a profile"`
	Target  string `query:"target" required:"true" doc:"HOST:PORT, HOST:PORT/udp, [IPv6]:PORT, HOST/icmp, or a HOST (port 443)"`
}

func (s *Server) checkProfilePolicy(ctx context.Context, in *checkProfileInput) (api.PolicyCheck, error) {
	return s.cfg.Services.Policies.CheckProfile(ctx, in.Profile, in.Target)
}

func (s *Server) policyPresets(ctx context.Context, _ *struct{}) (api.List[api.PolicyPreset], error) {
	list, err := s.cfg.Services.Policies.Presets(ctx)
	return api.List[api.PolicyPreset]{Items: append([]api.PolicyPreset{}, list...)}, err
}

func (s *Server) reloadSandboxPolicy(ctx context.Context, in *sandboxInput) (api.PolicyReload, error) {
	list, err := s.cfg.Services.Policies.Reload(ctx, in.Sandbox)
	if err != nil {
		return api.PolicyReload{}, err
	}
	return list[0], nil // one sandbox has one result
}

func (s *Server) reloadPolicies(ctx context.Context, _ *struct{}) (api.List[api.PolicyReload], error) {
	list, err := s.cfg.Services.Policies.Reload(ctx, "")
	return api.List[api.PolicyReload]{Items: append([]api.PolicyReload{}, list...)}, err
}
