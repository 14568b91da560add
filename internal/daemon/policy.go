package daemon

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/profile"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// policyView adapts network policies to the control API.
type policyView struct {
	lib       *profile.Library
	sandboxes *sandbox.Service
	proxied   bool // sandboxes use an upstream proxy
}

// network returns the policy of a profile, even if this backend does not
// support the profile.
func (v policyView) network(name string) (agentlab.Network, error) {
	e, err := v.lib.Find(name)
	if err == nil && agentlab.CodeOf(e.Err) != agentlab.CodeUnsupported {
		err = e.Err
	}
	return e.Profile.Network, err
}

func (v policyView) OfProfile(_ context.Context, name string) (api.Policy, error) {
	n, err := v.network(name)
	if err != nil {
		return api.Policy{}, err
	}
	out := v.toPolicy(n)
	out.Profile = name
	return out, nil
}

func (v policyView) OfSandbox(ctx context.Context, nameOrVMID string) (api.Policy, error) {
	sb, err := v.sandboxes.Get(ctx, nameOrVMID)
	if err != nil {
		return api.Policy{}, err
	}
	out := v.toPolicy(sb.Network)
	out.Profile, out.VMID, out.Name, out.Pending = sb.Profile, sb.VMID, sb.Name, sb.NetworkPending
	return out, nil
}

func (v policyView) CheckProfile(_ context.Context, name, target string) (api.PolicyCheck, error) {
	n, err := v.network(name)
	if err != nil {
		return api.PolicyCheck{}, err
	}
	return v.check(n, target)
}

func (v policyView) CheckSandbox(ctx context.Context, nameOrVMID, target string) (api.PolicyCheck, error) {
	sb, err := v.sandboxes.Get(ctx, nameOrVMID)
	if err != nil {
		return api.PolicyCheck{}, err
	}
	return v.check(sb.Network, target)
}

func (v policyView) Presets(context.Context) ([]api.PolicyPreset, error) {
	list, err := egress.Presets()
	out := make([]api.PolicyPreset, len(list))
	for i, p := range list {
		out[i] = api.PolicyPreset(p)
	}
	return out, err
}

func (v policyView) Reload(ctx context.Context, nameOrVMID string) ([]api.PolicyReload, error) {
	var vmids []int
	if nameOrVMID != "" {
		sb, err := v.sandboxes.Get(ctx, nameOrVMID)
		if err != nil {
			return nil, err
		}
		vmids = []int{sb.VMID}
	}
	list, err := v.sandboxes.ReloadNetworks(ctx, vmids)
	out := make([]api.PolicyReload, len(list))
	for i, r := range list {
		sb := r.Sandbox
		out[i] = api.PolicyReload{VMID: sb.VMID, Name: sb.Name, Profile: sb.Profile, Changed: r.Changed, Pending: sb.NetworkPending}
		if r.Err != nil {
			out[i].Problem = agentlab.Reason(r.Err.Error())
		}
	}
	return out, err
}

func (v policyView) toPolicy(n agentlab.Network) api.Policy {
	out := api.Policy{
		UpstreamProxy: v.proxied,
		Mode:          n.Mode, Allow: toRules(n.Allow), Deny: toRules(n.Deny), Ports: append([]string{}, n.Ports...),
		Limits: api.PolicyLimits(n.Limits), Layers: []api.PolicyLayer{},
	}
	for _, p := range n.Private {
		out.Private = append(out.Private, api.PolicyPrivate(p))
	}
	for _, l := range n.Layers {
		out.Layers = append(out.Layers, api.PolicyLayer{Mode: l.Mode, Allow: toRules(l.Allow), Deny: toRules(l.Deny), Ports: append([]string{}, l.Ports...)})
	}
	return out
}

func toRules(list []agentlab.NetworkRule) []api.PolicyRule {
	out := make([]api.PolicyRule, len(list))
	for i, r := range list {
		out[i] = api.PolicyRule(r)
	}
	return out
}

func (v policyView) check(n agentlab.Network, target string) (api.PolicyCheck, error) {
	t, err := egress.ParseTarget(target)
	if err != nil {
		return api.PolicyCheck{}, err
	}
	p, err := egress.New(n)
	if err != nil {
		return api.PolicyCheck{}, err
	}
	e := p.Explain(t)
	if v.proxied {
		e = e.ThroughProxy()
	}
	out := api.PolicyCheck{Target: t.String(), Allow: e.Allow, Rule: e.Rule, Notes: append([]string{}, e.Notes...)}
	for _, s := range e.Steps {
		out.Steps = append(out.Steps, api.PolicyStep(s))
		out.Source, out.Means = s.Source, s.Means
	}
	return out, nil
}
