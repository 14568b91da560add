package client

import (
	"context"
	"net/http"
	"net/url"
	"strings"

	"github.com/agentlab-vm/agentlab/api"
)

// InitSecrets makes the key to which secrets bundles are encrypted, if it is
// missing, and tells who can open them.
func (c *Client) InitSecrets(ctx context.Context) (api.SecretVault, error) {
	return post[api.SecretVault](ctx, c, "/v1/secrets/init", nil)
}

// RotateSecrets makes a new key and encrypts every bundle again.
func (c *Client) RotateSecrets(ctx context.Context, r api.SecretRotate) (api.SecretVault, error) {
	return post[api.SecretVault](ctx, c, "/v1/secrets/rotate", r)
}

// ValidateSecrets checks secrets bundles. What is wrong with them is no error
// of the call.
func (c *Client) ValidateSecrets(ctx context.Context, v api.SecretValidate) (api.SecretCheck, error) {
	return post[api.SecretCheck](ctx, c, "/v1/secrets/validate", v)
}

// Secrets lists the secrets bundles and their keys.
func (c *Client) Secrets(ctx context.Context) (api.List[api.SecretBundle], error) {
	return get[api.List[api.SecretBundle]](ctx, c, "/v1/secrets", nil)
}

// CreateSecrets makes an empty secrets bundle.
func (c *Client) CreateSecrets(ctx context.Context, bundle string) error {
	return c.call(ctx, http.MethodPost, "/v1/secrets", nil, api.SecretCreate{Name: bundle}, nil)
}

// SecretKeys lists the keys in a secrets bundle.
func (c *Client) SecretKeys(ctx context.Context, bundle string) (api.List[string], error) {
	p, err := join("secrets", bundle)
	if err != nil {
		return api.List[string]{}, err
	}
	return get[api.List[string]](ctx, c, p, nil)
}

// ShowSecrets lists what a secrets bundle holds: where values come from, and
// with reveal the values of literals.
func (c *Client) ShowSecrets(ctx context.Context, bundle string, reveal bool) (api.List[api.SecretEntry], error) {
	p, err := join("secrets", bundle, "show")
	if err != nil {
		return api.List[api.SecretEntry]{}, err
	}
	return post[api.List[api.SecretEntry]](ctx, c, p, api.SecretShow{Reveal: reveal})
}

// SecretsText reads the plain text of a secrets bundle, to edit it.
func (c *Client) SecretsText(ctx context.Context, bundle string) (api.SecretText, error) {
	p, err := join("secrets", bundle, "text")
	if err != nil {
		return api.SecretText{}, err
	}
	return post[api.SecretText](ctx, c, p, nil)
}

// ReplaceSecrets makes text the content of a secrets bundle. version is that
// of the text that was edited, "" when there was no bundle; code conflict when
// the bundle has changed since.
func (c *Client) ReplaceSecrets(ctx context.Context, bundle, text, version string) error {
	p, err := join("secrets", bundle)
	if err != nil {
		return err
	}
	v := url.Values{}
	set(v, "version", version)
	resp, err := c.request(ctx, http.MethodPut, p, v, strings.NewReader(text), "application/yaml")
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// SetSecret sets one value of a secrets bundle, making the bundle if needed.
// With reference the value says where to get it from (op://…, env:…, file:…,
// cmd:…); without, it is never taken for that.
func (c *Client) SetSecret(ctx context.Context, bundle, key, value string, reference bool) error {
	p, err := join("secrets", bundle, key)
	if err != nil {
		return err
	}
	v := url.Values{}
	set(v, "reference", reference)
	resp, err := c.request(ctx, http.MethodPut, p, v, strings.NewReader(value), "application/octet-stream")
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
