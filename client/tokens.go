package client

import (
	"context"
	"net/http"

	"github.com/agentlab-vm/agentlab/api"
)

// CreateToken makes a token of the control API. Its secret is in this answer
// and never shown again. Only possible over the unix socket.
func (c *Client) CreateToken(ctx context.Context, t api.TokenCreate) (api.TokenCreated, error) {
	return post[api.TokenCreated](ctx, c, "/v1/tokens", t)
}

// Tokens lists the tokens by name, without their secrets. Only possible over
// the unix socket.
func (c *Client) Tokens(ctx context.Context) (api.List[api.Token], error) {
	return get[api.List[api.Token]](ctx, c, "/v1/tokens", nil)
}

// RevokeToken ends a token, by id or name, and all calls that are made with
// it. Only possible over the unix socket.
func (c *Client) RevokeToken(ctx context.Context, idOrName string) (api.Token, error) {
	p, err := join("tokens", idOrName)
	if err != nil {
		return api.Token{}, err
	}
	var out api.Token
	err = c.call(ctx, http.MethodDelete, p, nil, nil, &out)
	return out, err
}
