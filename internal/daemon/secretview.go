package daemon

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// secretView adapts the vault to the control API.
type secretView struct{ *secret.Vault }

func (v secretView) Init(context.Context) (api.SecretVault, error) {
	if err := v.Vault.Init(); err != nil {
		return api.SecretVault{}, err
	}
	public, others, err := v.Public()
	return api.SecretVault{PublicKey: public, Recipients: others}, err
}

func (v secretView) Rotate(ctx context.Context, add, remove []string) (api.SecretVault, error) {
	r, err := v.Vault.Rotate(ctx, add, remove)
	return api.SecretVault(r), err
}

func (v secretView) Bundles(ctx context.Context) ([]api.SecretBundle, error) {
	infos, err := v.Vault.Bundles(ctx)
	out := make([]api.SecretBundle, len(infos))
	for i, b := range infos {
		out[i] = api.SecretBundle(b)
		out[i].Keys = append([]string{}, b.Keys...)
	}
	return out, err
}

func (v secretView) Entries(ctx context.Context, bundle string, reveal bool) ([]api.SecretEntry, error) {
	entries, err := v.Vault.Entries(ctx, bundle, reveal)
	out := make([]api.SecretEntry, len(entries))
	for i, e := range entries {
		out[i] = api.SecretEntry(e)
	}
	return out, err
}

func (v secretView) Validate(ctx context.Context, bundle string, resolve bool) (api.SecretCheck, error) {
	checked, found, err := v.Vault.Validate(ctx, bundle, resolve)
	out := api.SecretCheck{Checked: append([]string{}, checked...), Findings: make([]api.SecretFinding, len(found))}
	for i, f := range found {
		out.Findings[i] = api.SecretFinding(f)
	}
	return out, err
}
