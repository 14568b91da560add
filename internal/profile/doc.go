// Package profile reads profiles: YAML files in the schema of docs/profiles.md,
// shipped (package profiles) and the user's own, which replace shipped ones of
// the same name.
//
// Parsing is strict. A key of the schema that the configured backend does not
// support is not an error of the file, but makes the profile unusable on that
// backend, with an error for the key: no setting is ignored. Keys for a host
// directory in the guest are rejected at every level, in every spelling.
package profile

import (
	"path"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// Doc is the parsed text of a profile, without the keys that only some backends
// have. A pointer is nil, and an Any false, if the key is missing.
type Doc struct {
	Name          string    `yaml:"name"`    // required; the name of the file without .yaml
	Backend       string    `yaml:"backend"` // default: the configured default
	Image         string    `yaml:"image"`   // default: the configured image for the job's agent; a key of the backend may name it instead
	Network       network   `yaml:"network"`
	Resources     resources `yaml:"resources"`
	Storage       storage   `yaml:"storage"`
	Behavior      behavior  `yaml:"behavior"`
	SecretsBundle string    `yaml:"secrets_bundle"` // default: no secrets
	Repo          repo      `yaml:"repo"`
	Artifacts     artifacts `yaml:"artifacts"`

	CACertificates []string `yaml:"ca_certificates"` // paths of PEM files below the directory of profiles

	cas  []string // the certificates of CACertificates, each as PEM
	text string
	yaml *strictyaml.Document // text, parsed
	net  agentlab.Network     // Network with its lists expanded

	optionKeys []optionKey // the keys of it that only some backends have
	options    agentlab.Options
}

type network struct {
	Mode    string    `yaml:"mode"`    // nat (default), allowlist, off
	Allow   []string  `yaml:"allow"`   // of mode allowlist: rules, preset:NAME, file:PATH
	Deny    []string  `yaml:"deny"`    // the same; wins over allow and over the mode
	Ports   []string  `yaml:"ports"`   // 443, 443/udp, 8000-8010, icmp
	Limits  limits    `yaml:"limits"`  // 0: the backend's default
	Private []Private `yaml:"private"` // allowed private destinations; all others are denied
	Cache   bool      `yaml:"cache"`   // default true: use the registry cache of the host, if it is on
}

// Private is one private destination that the operator allows.
type Private struct {
	Host   string `yaml:"host"`                                                                   // a full name, a private address, or host.agentlab.internal: the host itself
	Port   int    `yaml:"port" hint:"give one port; for several ports, write one entry for each"` // TCP
	Reason string `yaml:"reason"`                                                                 // why it is allowed
}

type limits struct {
	BandwidthMbps int `yaml:"bandwidth_mbps"` // each way
	Flows         int `yaml:"flows"`          // open connections
	DNSPerSecond  int `yaml:"dns_per_second"` // questions
}

type resources struct {
	Cores    int `yaml:"cores"`     // default 2
	MemoryMB int `yaml:"memory_mb"` // MiB, default 2048

	Nested string `yaml:"nested"` // off (default), auto or on
}

type storage struct {
	RootSizeGB int    `yaml:"root_size_gb"` // GiB; default: the image's own size
	Workspace  string `yaml:"workspace"`    // none (default) or attach
}

type behavior struct {
	Mode              string   `yaml:"mode"` // dangerous, the default and only mode
	KeepaliveDefault  bool     `yaml:"keepalive_default"`
	GuestLeaseRenew   bool     `yaml:"guest_lease_renew"`
	TTLMinutesDefault int      `yaml:"ttl_minutes_default"` // default 180
	Terminal          string   `yaml:"terminal"`            // tmux (default) or zellij
	Devcontainer      string   `yaml:"devcontainer"`        // auto (default), on or off
	InnerSandbox      string   `yaml:"inner_sandbox"`       // none (default) or bubblewrap
	InnerSandboxArgs  []string `yaml:"inner_sandbox_args"`  // further options of bwrap
}

type repo struct {
	ClonePath string `yaml:"clone_path"` // absolute path in the guest
}

type artifacts struct {
	Upload   bool    `yaml:"upload"`   // default true
	Endpoint *string `yaml:"endpoint"` // default, and only choice today: the backend's own
	TTLDays  int     `yaml:"ttl_days"` // default: retention.artifacts_days of the configuration
}

// parse parses the text of a profile and checks everything that does not
// depend on the backend. Errors have code invalid, or denied for a host
// directory, with the key as Field and its line in the message. keys are those
// that only some backends have.
func parse(data []byte, files listFiles, keys optionKeys) (*Doc, error) {
	y, err := strictyaml.Parse(data)
	if err != nil {
		return nil, err
	}
	if err := refuseHostMounts(y); err != nil {
		return nil, err
	}
	d := &Doc{
		Network:   network{Mode: agentlab.NetworkNAT, Cache: true},
		Resources: resources{Cores: 2, MemoryMB: 2048, Nested: string(agentlab.NestedOff)},
		Storage:   storage{Workspace: "none"},
		Behavior:  behavior{Mode: "dangerous", TTLMinutesDefault: 180},
		Artifacts: artifacts{Upload: true},
		text:      string(data),
		yaml:      y,
	}
	if err := d.decode(keys); err != nil {
		return nil, err
	}
	if err := d.validate(); err != nil {
		return nil, y.At(err)
	}
	if err := d.resolveNetwork(files); err != nil {
		return nil, y.At(err)
	}
	if d.cas, err = certificatesIn(d.CACertificates, files); err != nil {
		return nil, y.At(err)
	}
	return d, nil
}

func (d *Doc) validate() error {
	if d.Name == "" {
		return invalid("name", "a profile needs a name")
	}
	for _, n := range []struct{ key, value string }{{"name", d.Name}, {"backend", d.Backend}, {"image", d.Image}, {"secrets_bundle", d.SecretsBundle}} {
		if n.value == "" {
			continue
		}
		if err := agentlab.ValidateName(n.value); err != nil {
			return invalid(n.key, "%q is not a valid name", n.value).WithHint("%s", agentlab.HintOf(err))
		}
	}
	for _, e := range []struct {
		key, value string
		allowed    []string
	}{
		{"network.mode", d.Network.Mode, []string{agentlab.NetworkNAT, agentlab.NetworkAllowlist, agentlab.NetworkOff}},
		{"storage.workspace", d.Storage.Workspace, []string{"none", agentlab.WorkspaceRequired}},
		{"behavior.mode", d.Behavior.Mode, []string{"dangerous"}},
	} {
		if err := strictyaml.OneOf(e.key, e.value, e.allowed); err != nil {
			return err
		}
	}
	if err := strictyaml.OneOf("resources.nested", agentlab.Nested(d.Resources.Nested), agentlab.NestedModes); err != nil {
		return err
	}
	if err := d.resources().Validate(); err != nil {
		return err
	}
	if m := d.Behavior.TTLMinutesDefault; m < 1 || m > int(agentlab.MaxTTL/time.Minute) {
		return invalid("behavior.ttl_minutes_default", "%d is not between 1 and %d", m, int(agentlab.MaxTTL/time.Minute))
	}
	if p := d.Repo.ClonePath; p != "" && (!path.IsAbs(p) || path.Clean(p) != p || p == "/" || strings.ContainsFunc(p, func(r rune) bool { return r < ' ' })) {
		return invalid("repo.clone_path", "%q is not the absolute path of a directory", p)
	}
	if t := d.Behavior.Terminal; t != "" {
		if err := strictyaml.OneOf("behavior.terminal", t, agentlab.Terminals); err != nil {
			return err
		}
	}
	if m := d.Behavior.Devcontainer; m != "" {
		if err := strictyaml.OneOf("behavior.devcontainer", m, agentlab.DevcontainerModes); err != nil {
			return err
		}
	}
	if err := d.validateInner(); err != nil {
		return err
	}
	if t := d.Artifacts.TTLDays; t < 0 || t > 3650 {
		return invalid("artifacts.ttl_days", "%d is not between 0 and 3650", t)
	}
	return nil
}

func (d *Doc) resources() agentlab.Resources {
	return agentlab.Resources{
		Cores: d.Resources.Cores, MemoryMB: d.Resources.MemoryMB, RootSizeGB: d.Storage.RootSizeGB, Nested: agentlab.Nested(d.Resources.Nested),
	}
}

func invalid(key, format string, args ...any) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField(key)
}

// Profile returns the profile for the services. Keys that no service supports
// are not in it; Usable reports them.
func (d *Doc) Profile() agentlab.Profile {
	return agentlab.Profile{
		Name:            d.Name,
		Backend:         d.Backend,
		Image:           d.Image,
		Resources:       d.resources(),
		Options:         d.options,
		Network:         d.net,
		Workspace:       d.Storage.Workspace,
		Mode:            d.Behavior.Mode,
		Keepalive:       d.Behavior.KeepaliveDefault,
		GuestRenew:      d.Behavior.GuestLeaseRenew,
		TTL:             time.Duration(d.Behavior.TTLMinutesDefault) * time.Minute,
		SecretsBundle:   d.SecretsBundle,
		ClonePath:       d.Repo.ClonePath,
		UploadArtifacts: d.Artifacts.Upload,
		ArtifactTTL:     time.Duration(d.Artifacts.TTLDays) * 24 * time.Hour,
		Terminal:        d.Behavior.Terminal,
		Devcontainer:    d.Behavior.Devcontainer,
		InnerSandbox:    d.innerSandbox(),
		InnerArgs:       d.Behavior.InnerSandboxArgs,
		CACertificates:  d.cas,
		NoCache:         !d.Network.Cache,
		YAML:            d.text,
	}
}
