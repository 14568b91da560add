package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strings"

	"github.com/agentlab-vm/agentlab/api"
)

// Health returns whether the daemon responds.
func (c *Client) Health(ctx context.Context) (api.Health, error) {
	return get[api.Health](ctx, c, nil, "health")
}

// Status returns the state of the daemon.
func (c *Client) Status(ctx context.Context) (api.Status, error) {
	return get[api.Status](ctx, c, nil, "status")
}

// Backends lists the backends of the daemon, the default first.
func (c *Client) Backends(ctx context.Context) (api.List[api.Backend], error) {
	return get[api.List[api.Backend]](ctx, c, nil, "backends")
}

// DrainBackend drains a backend: no sandbox and no workspace is made on it.
func (c *Client) DrainBackend(ctx context.Context, name string) (api.Backend, error) {
	return post[api.Backend](ctx, c, nil, "backends", name, "drain")
}

// UndrainBackend ends the draining of a backend.
func (c *Client) UndrainBackend(ctx context.Context, name string) (api.Backend, error) {
	return post[api.Backend](ctx, c, nil, "backends", name, "undrain")
}

// CheckBackend checks a backend now and returns all results.
func (c *Client) CheckBackend(ctx context.Context, name string) (api.HostChecks, error) {
	return get[api.HostChecks](ctx, c, nil, "backends", name, "checks")
}

// BackupDatabase makes a backup of the daemon's database.
func (c *Client) BackupDatabase(ctx context.Context) (api.Backup, error) {
	return post[api.Backup](ctx, c, nil, "daemon", "backup")
}

// ConfirmClock confirms that the clock of the daemon's host is right, so that
// retention continues after the clock jumped.
func (c *Client) ConfirmClock(ctx context.Context) (api.Clock, error) {
	return post[api.Clock](ctx, c, nil, "daemon", "clock", "confirm")
}

// StopDaemon asks the daemon to exit; VMs keep running. It returns when the
// daemon has accepted the request, before it exits. Code: busy while it builds images,
// unless force is set.
func (c *Client) StopDaemon(ctx context.Context, force bool) error {
	q := url.Values{}
	if force {
		q.Set("force", "true")
	}
	_, err := send[none](ctx, c, http.MethodPost, q, nil, "", "daemon", "stop")
	return err
}

// SandboxQuery selects sandboxes.
type SandboxQuery struct {
	State     string // only sandboxes in this state; "" means all
	Destroyed bool   // include those that are DESTROYED
	Limit     int    // at most this many, by VMID; 0 means all
	Cursor    string // Next of the previous page
}

func (q SandboxQuery) values() url.Values {
	v := url.Values{}
	set(v, "state", q.State)
	set(v, "destroyed", q.Destroyed)
	return v
}

// CreateSandbox creates a sandbox. It returns when the sandbox is recorded,
// before anything runs.
func (c *Client) CreateSandbox(ctx context.Context, s api.SandboxCreate) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, s, "sandboxes")
}

// Sandboxes lists sandboxes by VMID.
func (c *Client) Sandboxes(ctx context.Context, q SandboxQuery) (api.List[api.Sandbox], error) {
	return list[api.Sandbox](ctx, c, q.values(), q.Limit, q.Cursor, "sandboxes")
}

// EachSandbox yields the sandboxes that Sandboxes lists. It requests a page when
// the previous one was read. A pair with an error is the last one.
func (c *Client) EachSandbox(ctx context.Context, q SandboxQuery) iter.Seq2[api.Sandbox, error] {
	return items[api.Sandbox](ctx, c, q.values(), q.Limit, q.Cursor, "sandboxes")
}

// Sandbox returns a sandbox, by VMID or name.
func (c *Client) Sandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return get[api.Sandbox](ctx, c, nil, "sandboxes", sandbox)
}

// SandboxMemory returns a sandbox with the memory of the host that it occupies,
// which takes longer than Sandbox.
func (c *Client) SandboxMemory(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return get[api.Sandbox](ctx, c, url.Values{"memory": {"true"}}, "sandboxes", sandbox)
}

// StartSandbox requests the start of a stopped sandbox.
func (c *Client) StartSandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, nil, "sandboxes", sandbox, "start")
}

// SuspendSandbox requests that a READY sandbox be suspended, or that a suspended
// one be suspended to disk.
func (c *Client) SuspendSandbox(ctx context.Context, sandbox string, how api.SandboxSuspend) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, how, "sandboxes", sandbox, "suspend")
}

// ResumeSandbox requests that a suspended sandbox be resumed.
func (c *Client) ResumeSandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, nil, "sandboxes", sandbox, "resume")
}

// StopSandbox requests that a sandbox be powered off; its disk is kept.
func (c *Client) StopSandbox(ctx context.Context, sandbox string, how api.SandboxStop) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, how, "sandboxes", sandbox, "stop")
}

// DestroySandbox requests the destruction of a sandbox, in any state.
func (c *Client) DestroySandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, nil, "sandboxes", sandbox, "destroy")
}

// PurgeSandbox is DestroySandbox, also if the sandbox would be kept for work of its
// job that is not stored.
func (c *Client) PurgeSandbox(ctx context.Context, sandbox string) (api.Sandbox, error) {
	return send[api.Sandbox](ctx, c, http.MethodPost, url.Values{"purge": {"true"}}, nil, "", "sandboxes", sandbox, "destroy")
}

// RenewLease sets a sandbox's lease to end the given minutes from now.
func (c *Client) RenewLease(ctx context.Context, sandbox string, minutes int) (api.Sandbox, error) {
	return post[api.Sandbox](ctx, c, api.LeaseRenew{TTLMinutes: minutes}, "sandboxes", sandbox, "lease", "renew")
}

// Console reads the console of a sandbox's VM. With follow, the stream ends
// when the sandbox is destroyed.
func (c *Client) Console(ctx context.Context, sandbox string, follow bool) (Body, error) {
	v := url.Values{}
	set(v, "follow", follow)
	return c.stream(ctx, v, "sandboxes", sandbox, "console")
}

// SSHKey authorizes an ephemeral public key in the guest and starts its sshd.
func (c *Client) SSHKey(ctx context.Context, sandbox string, key api.SSHKey) (api.SSHTarget, error) {
	return post[api.SSHTarget](ctx, c, key, "sandboxes", sandbox, "ssh-key")
}

// VerifySandbox tests the network of a running sandbox from inside, which
// takes a while. A failed check is in the report, not an error.
func (c *Client) VerifySandbox(ctx context.Context, sandbox string, r api.VerifyRequest) (api.VerifyReport, error) {
	return post[api.VerifyReport](ctx, c, r, "sandboxes", sandbox, "verify")
}

// Orphans lists the virtual machines that have the daemon's mark but belong to
// no sandbox.
func (c *Client) Orphans(ctx context.Context) (api.List[api.Orphan], error) {
	return get[api.List[api.Orphan]](ctx, c, nil, "orphans")
}

// DestroyOrphan destroys an orphan, by UID, or by VMID if that is unique. It
// returns when the VM and its disk have been deleted.
func (c *Client) DestroyOrphan(ctx context.Context, orphan string) (api.Orphan, error) {
	return post[api.Orphan](ctx, c, nil, "orphans", orphan, "destroy")
}

// Profiles lists the profiles.
func (c *Client) Profiles(ctx context.Context) (api.List[api.Profile], error) {
	return get[api.List[api.Profile]](ctx, c, nil, "profiles")
}

// Profile returns a profile with its YAML.
func (c *Client) Profile(ctx context.Context, name string) (api.Profile, error) {
	return get[api.Profile](ctx, c, nil, "profiles", name)
}

// PutProfile creates or replaces a profile.
func (c *Client) PutProfile(ctx context.Context, name string, yaml string) (api.Profile, error) {
	return send[api.Profile](ctx, c, http.MethodPut, nil, strings.NewReader(yaml), "application/yaml", "profiles", name)
}

// RemoveProfile deletes a profile of the user, if its YAML has that SHA-256 (in
// hexadecimal). Codes: not_found, conflict.
func (c *Client) RemoveProfile(ctx context.Context, name, sum string) error {
	_, err := send[none](ctx, c, http.MethodDelete, url.Values{"sha256": {sum}}, nil, "", "profiles", name)
	return err
}

// ValidateProfile checks the YAML of a profile and stores nothing. The error
// has code unsupported if the configured backend does not support a setting.
func (c *Client) ValidateProfile(ctx context.Context, yaml string) (api.Profile, error) {
	return send[api.Profile](ctx, c, http.MethodPost, nil, strings.NewReader(yaml), "application/yaml", "profiles", "validate")
}

// Images lists the built images.
func (c *Client) Images(ctx context.Context) (api.List[api.Image], error) {
	return get[api.List[api.Image]](ctx, c, nil, "images")
}

// Image returns an image, by name or name@digest.
func (c *Client) Image(ctx context.Context, name string) (api.Image, error) {
	return get[api.Image](ctx, c, nil, "images", name)
}

// RemoveImage removes an image, by name or name@digest. The error has code
// conflict if the image is in use.
func (c *Client) RemoveImage(ctx context.Context, name string) error {
	_, err := del[none](ctx, c, "images", name)
	return err
}

// Templates lists the templates, the last used first. The error has code
// unsupported if the backend has none.
func (c *Client) Templates(ctx context.Context) (api.List[api.Template], error) {
	return get[api.List[api.Template]](ctx, c, nil, "templates")
}

// Setups lists the snapshots after setup, the last used first.
func (c *Client) Setups(ctx context.Context) (api.List[api.Setup], error) {
	return get[api.List[api.Setup]](ctx, c, nil, "setups")
}

// RemoveSetup removes a snapshot after setup by its ID or a unique prefix of it, and
// returns it.
func (c *Client) RemoveSetup(ctx context.Context, id string) (api.List[api.Setup], error) {
	return del[api.List[api.Setup]](ctx, c, "setups", id)
}

// RemoveSetups removes and returns all snapshots after setup.
func (c *Client) RemoveSetups(ctx context.Context) (api.List[api.Setup], error) {
	return del[api.List[api.Setup]](ctx, c, "setups")
}

// ImageLayers returns the results of build steps that later builds use again, the last
// used first.
func (c *Client) ImageLayers(ctx context.Context) (api.List[api.ImageLayer], error) {
	return get[api.List[api.ImageLayer]](ctx, c, nil, "layers")
}

// RemoveImageLayers removes and returns all results of build steps.
func (c *Client) RemoveImageLayers(ctx context.Context) (api.List[api.ImageLayer], error) {
	return del[api.List[api.ImageLayer]](ctx, c, "layers")
}

// RemoveTemplate removes a template by its key or a unique prefix of it, and
// returns it.
func (c *Client) RemoveTemplate(ctx context.Context, key string) (api.List[api.Template], error) {
	return del[api.List[api.Template]](ctx, c, "templates", key)
}

// RemoveTemplates removes and returns all templates.
func (c *Client) RemoveTemplates(ctx context.Context) (api.List[api.Template], error) {
	return del[api.List[api.Template]](ctx, c, "templates")
}

// Cache returns the use of the registry cache.
func (c *Client) Cache(ctx context.Context) (api.Cache, error) {
	return get[api.Cache](ctx, c, nil, "cache")
}

// ClearCache removes all objects of the registry cache.
func (c *Client) ClearCache(ctx context.Context) (api.CacheCleared, error) {
	return del[api.CacheCleared](ctx, c, "cache")
}

// ClearCacheOf removes the objects of one kind of registry from the registry cache.
func (c *Client) ClearCacheOf(ctx context.Context, kind string) (api.CacheCleared, error) {
	return del[api.CacheCleared](ctx, c, "cache", kind)
}

// SandboxPolicy returns the network policy of a sandbox, by VMID or name.
func (c *Client) SandboxPolicy(ctx context.Context, sandbox string) (api.Policy, error) {
	return get[api.Policy](ctx, c, nil, "sandboxes", sandbox, "policy")
}

// ProfilePolicy returns the network policy of a profile.
func (c *Client) ProfilePolicy(ctx context.Context, profile string) (api.Policy, error) {
	return get[api.Policy](ctx, c, nil, "profiles", profile, "policy")
}

// CheckSandboxPolicy returns the decision of a sandbox's policy on a target
// such as "github.com:443".
func (c *Client) CheckSandboxPolicy(ctx context.Context, sandbox, target string) (api.PolicyCheck, error) {
	return get[api.PolicyCheck](ctx, c, url.Values{"target": {target}}, "sandboxes", sandbox, "policy", "check")
}

// CheckProfilePolicy returns the decision of a profile's policy on a target.
func (c *Client) CheckProfilePolicy(ctx context.Context, profile, target string) (api.PolicyCheck, error) {
	return get[api.PolicyCheck](ctx, c, url.Values{"target": {target}}, "profiles", profile, "policy", "check")
}

// PolicyPresets lists the shipped rule lists.
func (c *Client) PolicyPresets(ctx context.Context) (api.List[api.PolicyPreset], error) {
	return get[api.List[api.PolicyPreset]](ctx, c, nil, "policy", "presets")
}

// ReloadPolicies applies the current network policy of its profile to every
// sandbox whose policy has changed, and closes forbidden connections.
func (c *Client) ReloadPolicies(ctx context.Context) (api.List[api.PolicyReload], error) {
	return post[api.List[api.PolicyReload]](ctx, c, nil, "policy", "reload")
}

// ReloadSandboxPolicy is ReloadPolicies for one sandbox, even if its policy has
// not changed.
func (c *Client) ReloadSandboxPolicy(ctx context.Context, sandbox string) (api.PolicyReload, error) {
	return post[api.PolicyReload](ctx, c, nil, "sandboxes", sandbox, "policy", "reload")
}

// InitSecrets creates the key that encrypts secrets bundles, if it is missing,
// and returns who can open them.
func (c *Client) InitSecrets(ctx context.Context) (api.SecretVault, error) {
	return post[api.SecretVault](ctx, c, nil, "secrets", "init")
}

// RotateSecrets creates a new key and re-encrypts every bundle.
func (c *Client) RotateSecrets(ctx context.Context, r api.SecretRotate) (api.SecretVault, error) {
	return post[api.SecretVault](ctx, c, r, "secrets", "rotate")
}

// ValidateSecrets checks secrets bundles. Faults of a bundle are findings, not
// an error.
func (c *Client) ValidateSecrets(ctx context.Context, v api.SecretValidate) (api.SecretCheck, error) {
	return post[api.SecretCheck](ctx, c, v, "secrets", "validate")
}

// Secrets lists the secrets bundles and their keys.
func (c *Client) Secrets(ctx context.Context) (api.List[api.SecretBundle], error) {
	return get[api.List[api.SecretBundle]](ctx, c, nil, "secrets")
}

// CreateSecrets creates an empty secrets bundle.
func (c *Client) CreateSecrets(ctx context.Context, bundle string) error {
	_, err := post[none](ctx, c, api.SecretCreate{Name: bundle}, "secrets")
	return err
}

// SecretKeys lists the keys of a secrets bundle.
func (c *Client) SecretKeys(ctx context.Context, bundle string) (api.List[string], error) {
	return get[api.List[string]](ctx, c, nil, "secrets", bundle)
}

// ShowSecrets lists the entries of a secrets bundle: their references, and
// with reveal the literal values.
func (c *Client) ShowSecrets(ctx context.Context, bundle string, reveal bool) (api.List[api.SecretEntry], error) {
	return post[api.List[api.SecretEntry]](ctx, c, api.SecretShow{Reveal: reveal}, "secrets", bundle, "show")
}

// SecretsText returns the decrypted text of a secrets bundle, for editing.
func (c *Client) SecretsText(ctx context.Context, bundle string) (api.SecretText, error) {
	return post[api.SecretText](ctx, c, nil, "secrets", bundle, "text")
}

// ReplaceSecrets replaces the content of a secrets bundle. version is that of
// the edited text, "" for a new bundle; code conflict if the bundle has changed
// since.
func (c *Client) ReplaceSecrets(ctx context.Context, bundle, text, version string) error {
	v := url.Values{}
	set(v, "version", version)
	_, err := send[none](ctx, c, http.MethodPut, v, strings.NewReader(text), "application/yaml", "secrets", bundle)
	return err
}

// SetSecret sets one value of a secrets bundle, and creates the bundle if
// needed. With reference the value is a reference (op://…, env:…, file:…,
// cmd:…); without, it is stored literally.
func (c *Client) SetSecret(ctx context.Context, bundle, key, value string, reference bool) error {
	v := url.Values{}
	set(v, "reference", reference)
	_, err := send[none](ctx, c, http.MethodPut, v, strings.NewReader(value), "application/octet-stream", "secrets", bundle, key)
	return err
}

// UnsetSecret removes one value of a secrets bundle.
func (c *Client) UnsetSecret(ctx context.Context, bundle, key string) error {
	_, err := del[none](ctx, c, "secrets", bundle, key)
	return err
}

// CreateToken creates an API token. Only this response contains its secret.
// Requires the unix socket.
func (c *Client) CreateToken(ctx context.Context, t api.TokenCreate) (api.TokenCreated, error) {
	return post[api.TokenCreated](ctx, c, t, "tokens")
}

// Tokens lists the API tokens by name, without their secrets. Requires the
// unix socket.
func (c *Client) Tokens(ctx context.Context) (api.List[api.Token], error) {
	return list[api.Token](ctx, c, nil, 0, "", "tokens")
}

// RevokeToken revokes an API token, by ID or name, and ends all calls that use
// it. Requires the unix socket.
func (c *Client) RevokeToken(ctx context.Context, idOrName string) (api.Token, error) {
	return del[api.Token](ctx, c, "tokens", idOrName)
}

// HostNetwork returns the state of the firewall rules of the bridge.
func (c *Client) HostNetwork(ctx context.Context) (api.HostNetwork, error) {
	return get[api.HostNetwork](ctx, c, nil, "host", "network")
}

// HostChecks checks the daemon's host now and returns all results.
func (c *Client) HostChecks(ctx context.Context) (api.HostChecks, error) {
	return get[api.HostChecks](ctx, c, nil, "host", "checks")
}

// Metrics returns the metrics of the daemon in the text format of Prometheus.
func (c *Client) Metrics(ctx context.Context) (Body, error) {
	return c.stream(ctx, nil, "metrics")
}

// Doctor makes a doctor bundle (tar.gz) of the whole installation.
func (c *Client) Doctor(ctx context.Context) (Body, error) {
	return c.raw(ctx, http.MethodPost, nil, "doctor")
}

// SandboxDoctor makes a doctor bundle of a sandbox, by VMID or name.
func (c *Client) SandboxDoctor(ctx context.Context, sandbox string) (Body, error) {
	return c.raw(ctx, http.MethodPost, nil, "sandboxes", sandbox, "doctor")
}

// SessionDoctor makes a doctor bundle of a session, by ID or name.
func (c *Client) SessionDoctor(ctx context.Context, session string) (Body, error) {
	return c.raw(ctx, http.MethodPost, nil, "sessions", session, "doctor")
}

// WorkspaceDoctor makes a doctor bundle of a workspace, by ID or name.
func (c *Client) WorkspaceDoctor(ctx context.Context, workspace string) (Body, error) {
	return c.raw(ctx, http.MethodPost, nil, "workspaces", workspace, "doctor")
}

// JobDoctor makes a doctor bundle of a job.
func (c *Client) JobDoctor(ctx context.Context, id string) (Body, error) {
	return c.raw(ctx, http.MethodPost, nil, "jobs", id, "doctor")
}

// HostNetworkRules returns the rules in the format of 'nft -f', without
// applying them.
func (c *Client) HostNetworkRules(ctx context.Context) (Body, error) {
	return c.stream(ctx, nil, "host", "network", "rules")
}

// ApplyHostNetwork applies the rules atomically.
func (c *Client) ApplyHostNetwork(ctx context.Context) (api.HostNetwork, error) {
	return post[api.HostNetwork](ctx, c, nil, "host", "network")
}

// RemoveHostNetwork removes the rules; sandboxes on the bridge have no network
// without them.
func (c *Client) RemoveHostNetwork(ctx context.Context) (api.HostNetwork, error) {
	return del[api.HostNetwork](ctx, c, "host", "network")
}
