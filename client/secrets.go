package client

import (
	"context"
	"net/http"
	"strings"

	"github.com/agentlab-vm/agentlab/api"
)

// SecretKeys lists the keys in a secrets bundle. There is no call that gives
// a value back.
func (c *Client) SecretKeys(ctx context.Context, bundle string) (api.List[string], error) {
	p, err := join("secrets", bundle)
	if err != nil {
		return api.List[string]{}, err
	}
	return get[api.List[string]](ctx, c, p, nil)
}

// SetSecret sets one value of a secrets bundle, making the bundle if needed.
func (c *Client) SetSecret(ctx context.Context, bundle, key, value string) error {
	p, err := join("secrets", bundle, key)
	if err != nil {
		return err
	}
	resp, err := c.request(ctx, http.MethodPut, p, nil, strings.NewReader(value), "application/octet-stream")
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// UnsetSecret removes one value of a secrets bundle.
func (c *Client) UnsetSecret(ctx context.Context, bundle, key string) error {
	p, err := join("secrets", bundle, key)
	if err != nil {
		return err
	}
	return c.call(ctx, http.MethodDelete, p, nil, nil, nil)
}
