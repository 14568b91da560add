package server

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// networkOf returns the policy of a profile, even if this backend does not
// support the profile.
func (s *Server) networkOf(profile string) (agentlab.Network, error) {
	e, err := s.cfg.Services.Profiles.Find(profile)
	if err == nil && agentlab.CodeOf(e.Err) != agentlab.CodeUnsupported {
		err = e.Err
	}
	return e.Profile.Network, err
}

func (s *Server) sandboxPolicy(ctx context.Context, in *sandboxInput) (api.Policy, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Sandbox)
	out := s.toPolicy(sb.Network)
	out.Profile, out.VMID, out.Name, out.Pending = sb.Profile, sb.VMID, sb.Name, sb.NetworkPending
	return out, err
}

func (s *Server) profilePolicy(_ context.Context, in *profileInput) (api.Policy, error) {
	n, err := s.networkOf(in.Profile)
	out := s.toPolicy(n)
	out.Profile = in.Profile
	return out, err
}

type checkSandboxInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Target  string `query:"target" required:"true" doc:"HOST:PORT, HOST:PORT/udp, [IPv6]:PORT, HOST/icmp, or a HOST (port 443)"`
}

func (s *Server) checkSandboxPolicy(ctx context.Context, in *checkSandboxInput) (api.PolicyCheck, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Sandbox)
	if err != nil {
		return api.PolicyCheck{}, err
	}
	return s.checkPolicy(sb.Network, in.Target)
}

type checkProfileInput struct {
	Profile string `path:"profile" doc:"Name of a profile"`
	Target  string `query:"target" required:"true" doc:"HOST:PORT, HOST:PORT/udp, [IPv6]:PORT, HOST/icmp, or a HOST (port 443)"`
}

func (s *Server) checkProfilePolicy(_ context.Context, in *checkProfileInput) (api.PolicyCheck, error) {
	n, err := s.networkOf(in.Profile)
	if err != nil {
		return api.PolicyCheck{}, err
	}
	return s.checkPolicy(n, in.Target)
}

func (s *Server) policyPresets(context.Context, *struct{}) ([]api.PolicyPreset, error) {
	list, err := egress.Presets()
	return mapSlice(list, func(p egress.Preset) api.PolicyPreset { return api.PolicyPreset(p) }), err
}

func (s *Server) reloadSandboxPolicy(ctx context.Context, in *sandboxInput) (api.PolicyReload, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Sandbox)
	if err != nil {
		return api.PolicyReload{}, err
	}
	list, err := s.cfg.Services.Sandboxes.ReloadNetworks(ctx, []int{sb.VMID})
	if err != nil {
		return api.PolicyReload{}, err
	}
	return toReload(list[0]), nil // one sandbox has one result
}

func (s *Server) reloadPolicies(ctx context.Context, _ *struct{}) ([]api.PolicyReload, error) {
	list, err := s.cfg.Services.Sandboxes.ReloadNetworks(ctx, nil)
	return mapSlice(list, toReload), err
}

func toReload(r sandbox.Reloaded) api.PolicyReload {
	sb := r.Sandbox
	out := api.PolicyReload{VMID: sb.VMID, Name: sb.Name, Profile: sb.Profile, Changed: r.Changed, Pending: sb.NetworkPending}
	if r.Err != nil {
		out.Problem = agentlab.Reason(r.Err.Error())
	}
	return out
}

func (s *Server) toPolicy(n agentlab.Network) api.Policy {
	out := api.Policy{
		UpstreamProxy: s.cfg.Proxied,
		Mode:          n.Mode, Allow: toRules(n.Allow), Deny: toRules(n.Deny), Ports: nonNil(n.Ports),
		Limits: api.PolicyLimits(n.Limits), Layers: []api.PolicyLayer{},
	}
	for _, p := range n.Private {
		out.Private = append(out.Private, api.PolicyPrivate(p))
	}
	for _, l := range n.Layers {
		out.Layers = append(out.Layers, api.PolicyLayer{Mode: l.Mode, Allow: toRules(l.Allow), Deny: toRules(l.Deny), Ports: nonNil(l.Ports)})
	}
	return out
}

func toRules(list []agentlab.NetworkRule) []api.PolicyRule {
	return mapSlice(list, func(r agentlab.NetworkRule) api.PolicyRule { return api.PolicyRule(r) })
}

func (s *Server) checkPolicy(n agentlab.Network, target string) (api.PolicyCheck, error) {
	t, err := egress.ParseTarget(target)
	if err != nil {
		return api.PolicyCheck{}, err
	}
	p, err := egress.New(n)
	if err != nil {
		return api.PolicyCheck{}, err
	}
	e := p.Explain(t)
	if s.cfg.Proxied {
		e = e.ThroughProxy()
	}
	out := api.PolicyCheck{Target: t.String(), Allow: e.Allow, Rule: e.Rule, Notes: nonNil(e.Notes)}
	for _, step := range e.Steps {
		out.Steps = append(out.Steps, api.PolicyStep(step))
		out.Source, out.Means = step.Source, step.Means
	}
	return out, nil
}
