package client

import (
	"context"
	"net/url"

	"github.com/agentlab-vm/agentlab/api"
)

// Ports lists the TCP ports on which processes of a sandbox listen, or of all sandboxes
// for "".
func (c *Client) Ports(ctx context.Context, sandbox string) (api.List[api.Port], error) {
	q := url.Values{}
	set(q, "sandbox", sandbox)
	return get[api.List[api.Port]](ctx, c, q, "ports")
}

// DNS returns the state of the responder for names below sandbox.local.
func (c *Client) DNS(ctx context.Context) (api.DNS, error) {
	return get[api.DNS](ctx, c, nil, "dns")
}

// SetDNS starts or stops the responder for names below sandbox.local.
func (c *Client) SetDNS(ctx context.Context, enabled bool) (api.DNS, error) {
	return post[api.DNS](ctx, c, api.DNSSet{Enabled: enabled}, "dns")
}
