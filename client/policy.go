package client

import (
	"context"
	"net/url"

	"github.com/agentlab-vm/agentlab/api"
)

// SandboxPolicy returns the network policy of a sandbox, by VMID or name.
func (c *Client) SandboxPolicy(ctx context.Context, sandbox string) (api.Policy, error) {
	return policyCall[api.Policy](ctx, c, nil, "sandboxes", sandbox, "policy")
}

// ProfilePolicy returns the network policy of a profile.
func (c *Client) ProfilePolicy(ctx context.Context, profile string) (api.Policy, error) {
	return policyCall[api.Policy](ctx, c, nil, "profiles", profile, "policy")
}

// CheckSandboxPolicy tells what the policy of a sandbox would do with a
// target, such as "github.com:443".
func (c *Client) CheckSandboxPolicy(ctx context.Context, sandbox, target string) (api.PolicyCheck, error) {
	return policyCall[api.PolicyCheck](ctx, c, url.Values{"target": {target}}, "sandboxes", sandbox, "policy", "check")
}

// CheckProfilePolicy tells what the policy of a profile would do with a
// target.
func (c *Client) CheckProfilePolicy(ctx context.Context, profile, target string) (api.PolicyCheck, error) {
	return policyCall[api.PolicyCheck](ctx, c, url.Values{"target": {target}}, "profiles", profile, "policy", "check")
}

func policyCall[T any](ctx context.Context, c *Client, q url.Values, path ...string) (T, error) {
	p, err := join(path...)
	if err != nil {
		var none T
		return none, err
	}
	return get[T](ctx, c, p, q)
}

// PolicyPresets lists the shipped lists of rules.
func (c *Client) PolicyPresets(ctx context.Context) (api.List[api.PolicyPreset], error) {
	return get[api.List[api.PolicyPreset]](ctx, c, "/v1/policy/presets", nil)
}

// ReloadPolicies gives every sandbox the network policy that its profile has
// now, where that has changed, and cuts what it forbids.
func (c *Client) ReloadPolicies(ctx context.Context) (api.List[api.PolicyReload], error) {
	return post[api.List[api.PolicyReload]](ctx, c, "/v1/policy/reload", nil)
}

// ReloadSandboxPolicy is ReloadPolicies for one sandbox, whether its profile
// has changed or not.
func (c *Client) ReloadSandboxPolicy(ctx context.Context, sandbox string) (api.PolicyReload, error) {
	p, err := join("sandboxes", sandbox, "policy", "reload")
	if err != nil {
		return api.PolicyReload{}, err
	}
	return post[api.PolicyReload](ctx, c, p, nil)
}
