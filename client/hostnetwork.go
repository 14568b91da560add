package client

import (
	"context"
	"net/http"

	"github.com/agentlab-vm/agentlab/api"
)

const hostNetwork = "/v1/host/network"

// HostNetwork tells whether the rules for sandboxes on a bridge are in force.
func (c *Client) HostNetwork(ctx context.Context) (api.HostNetwork, error) {
	return get[api.HostNetwork](ctx, c, hostNetwork, nil)
}

// HostChecks has the daemon look at its host now, and tells all that it found.
func (c *Client) HostChecks(ctx context.Context) (api.HostChecks, error) {
	return get[api.HostChecks](ctx, c, "/v1/host/checks", nil)
}

// HostNetworkRules returns the rules as 'nft -f' reads them, and changes
// nothing.
func (c *Client) HostNetworkRules(ctx context.Context) (Body, error) {
	return c.stream(ctx, hostNetwork+"/rules", nil)
}

// ApplyHostNetwork puts the rules in force, in one step.
func (c *Client) ApplyHostNetwork(ctx context.Context) (api.HostNetwork, error) {
	return post[api.HostNetwork](ctx, c, hostNetwork, nil)
}

// RemoveHostNetwork takes them away: sandboxes on the bridge have no network
// then.
func (c *Client) RemoveHostNetwork(ctx context.Context) (api.HostNetwork, error) {
	var out api.HostNetwork
	err := c.call(ctx, http.MethodDelete, hostNetwork, nil, nil, &out)
	return out, err
}
