package client

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
)

// VerifySandbox has the network of a running sandbox tried, which takes a
// while. A check that fails is in the report, and no error.
func (c *Client) VerifySandbox(ctx context.Context, sandbox string, r api.VerifyRequest) (api.VerifyReport, error) {
	p, err := join("sandboxes", sandbox, "verify")
	if err != nil {
		return api.VerifyReport{}, err
	}
	return post[api.VerifyReport](ctx, c, p, r)
}
