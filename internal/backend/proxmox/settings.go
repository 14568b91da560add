package proxmox

import (
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// Settings is the section proxmox of config.yaml.
type Settings struct {
	Transport string `yaml:"transport" doctor:"show" doc:"Access to the node: shell (this daemon runs on the node, as root) or rest (its API, with a token)."`

	URL         string `yaml:"url" doc:"URL of the API (transport rest), for example https://127.0.0.1:8006."`
	TokenID     string `yaml:"token_id" doc:"Name of the API token (transport rest), as USER@REALM!NAME."`
	TokenFile   string `yaml:"token_file" doctor:"secret-file" doc:"Absolute path of the file with the secret of the token (transport rest); only its owner may have access (mode 0600)."`
	CAFile      string `yaml:"ca_file" doctor:"show" doc:"Absolute path of the CA certificate of the API (transport rest), for example /etc/pve/pve-root-ca.pem; empty means the CA certificates of this machine."`
	Fingerprint string `yaml:"fingerprint" doc:"SHA-256 fingerprint of the certificate of the API (transport rest), instead of ca_file; 64 hexadecimal digits, with or without colons."`

	Nodes     []NodeSettings `yaml:"nodes" doctor:"show" doc:"Nodes that run sandboxes, each as name: NODE and, if its templates differ, templates: {IMAGE: VMID}. For a node that is not this machine also ssh: root@ADDRESS, which the daemon uses to run agentlabd there for its bridge; without it the node runs no sandbox. Empty means this machine."`
	Templates map[string]int `yaml:"templates" doctor:"show" doc:"Template VM of each image, as IMAGE: VMID; empty means base: 9000 and agents: 9001. No sandbox gets one of these VMIDs."`

	Storage   string `yaml:"storage" doctor:"show" doc:"Storage of the disks of full clones; empty means the storage of the template. Linked clones are always on the storage of their template."`
	FullClone bool   `yaml:"full_clone" doc:"Copy the disk of the template for each sandbox. With false, a sandbox stores only its changes (linked clone)."`
	Pool      string `yaml:"pool" doctor:"show" doc:"Pool of the sandboxes, which a token needs; empty means none."`
	Snippets  string `yaml:"snippets_storage" doctor:"show" doc:"Storage with the content type snippets, for the cloud-init data of sandboxes (transport shell)."`

	Addressing string `yaml:"addressing" doctor:"show" doc:"How a guest gets its address: static (cloud-init) or dhcp (the daemon answers on the bridge)."`
	Nameserver string `yaml:"nameserver" doctor:"show" doc:"Name server of guests; empty means the address of the host on the bridge, the only name server that policies allow."`
	Firewall   bool   `yaml:"firewall" doc:"Set the firewall flag of the network devices of sandboxes, for the firewall of Proxmox VE; policies do not need it."`
	Model      string `yaml:"model" doctor:"show" doc:"Model of the network devices of sandboxes if the profile names none: virtio, e1000 or vmxnet3."`
	SSHKeyFile string `yaml:"ssh_public_key_file" doctor:"show" doc:"Absolute path of a file with SSH public keys that can log in to every sandbox as agent; empty means none (agentlab ssh needs none)."`
}

// NodeSettings is one node of a cluster.
type NodeSettings struct {
	Name      string         `yaml:"name" doctor:"show"`
	Templates map[string]int `yaml:"templates" doctor:"show"`
	SSH       string         `yaml:"ssh" doctor:"show"`
}

// The values of proxmox.transport and proxmox.addressing.
const (
	transportShell = "shell"
	transportREST  = "rest"
	addressStatic  = "static"
	addressDHCP    = "dhcp"
)

// models lists the network devices that sandboxes may have.
var models = []string{"virtio", "e1000", "vmxnet3"}

// defaultSnippets is a storage that every node has.
const defaultSnippets = "local"

func newSettings() config.Section {
	return &Settings{
		Transport: transportShell, Nodes: []NodeSettings{}, Templates: map[string]int{}, Snippets: defaultSnippets,
		Addressing: addressStatic, Model: "virtio",
	}
}

var (
	storageName = lazyre.New(`^[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]$`)
	poolName    = lazyre.New(`^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+){0,2}$`)
	nodeName    = lazyre.New(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)
	sshTarget   = lazyre.New(`^[a-z_][a-z0-9_-]*@[A-Za-z0-9][A-Za-z0-9.:-]*$`)
	tokenName   = lazyre.New(`^[^\s:/!@]+@[A-Za-z][A-Za-z0-9._-]+![A-Za-z][A-Za-z0-9._-]+$`)
	fingerprint = lazyre.New(`^([0-9A-Fa-f]{2}:?){31}[0-9A-Fa-f]{2}$`)
)

// Validate implements config.Section. Values that the backend requires must be
// set only if it is the configured one.
func (p *Settings) Validate(c config.Config, used bool) error {
	if used {
		if err := c.UpstreamProxy.Refuse(Name); err != nil {
			return err
		}
	}
	if err := config.OneOf("proxmox.transport", p.Transport, []string{transportShell, transportREST}); err != nil {
		return err
	}
	if err := config.OneOf("proxmox.addressing", p.Addressing, []string{addressStatic, addressDHCP}); err != nil {
		return err
	}
	if err := config.OneOf("proxmox.model", p.Model, models); err != nil {
		return err
	}
	for _, f := range []struct {
		key, value string
		form       *lazyre.Regexp
		what       string
	}{
		{"storage", p.Storage, storageName, "the name of a storage"},
		{"snippets_storage", p.Snippets, storageName, "the name of a storage"},
		{"pool", p.Pool, poolName, "the name of a pool"},
		{"token_id", p.TokenID, tokenName, "the name of a token: USER@REALM!NAME"},
		{"fingerprint", p.Fingerprint, fingerprint, "a SHA-256 fingerprint"},
	} {
		if f.value != "" && !f.form.MatchString(f.value) {
			return bad(f.key, "%q is not %s", f.value, f.what)
		}
	}
	for _, f := range []struct{ key, path string }{{"token_file", p.TokenFile}, {"ca_file", p.CAFile}, {"ssh_public_key_file", p.SSHKeyFile}} {
		if f.path != "" && !filepath.IsAbs(f.path) {
			return bad(f.key, "%q is not an absolute path", f.path)
		}
	}
	if p.Storage != "" && !p.FullClone {
		return bad("storage", "linked clones use the storage of their template").WithHint("set full_clone: true or remove storage")
	}
	if err := p.validateNameserver(c.HostNetwork); err != nil {
		return err
	}
	if err := p.validateTransport(used); err != nil {
		return err
	}
	return p.validateNodes()
}

func bad(key, format string, args ...any) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField("proxmox." + key)
}

func (p *Settings) validateNameserver(bridge config.HostNetwork) error {
	if p.Nameserver == "" {
		return nil
	}
	addr, err := netip.ParseAddr(p.Nameserver)
	v4, v6, berr := bridge.Gateways()
	if err != nil || berr != nil {
		return bad("nameserver", "%q is not an address", p.Nameserver)
	}
	if addr != v4 && addr != v6 {
		return bad("nameserver", "%s is not the host's address on the bridge, and policies block all other name servers", addr).
			WithHint("remove the setting")
	}
	return nil
}

func (p *Settings) validateTransport(used bool) error {
	if p.Transport == transportShell {
		for _, f := range []struct{ key, value string }{
			{"url", p.URL}, {"token_id", p.TokenID}, {"token_file", p.TokenFile}, {"ca_file", p.CAFile}, {"fingerprint", p.Fingerprint},
		} {
			if f.value != "" {
				return bad(f.key, "transport shell does not support this setting").WithHint("set proxmox.transport: rest or remove the setting")
			}
		}
		if used && p.Snippets == "" {
			return bad("snippets_storage", "missing, but required by transport shell").WithHint("set a storage whose content includes snippets, or remove the setting: %s", defaultSnippets)
		}
		return nil
	}
	if p.Snippets != "" && p.Snippets != defaultSnippets {
		return bad("snippets_storage", "transport rest does not support this setting: a token cannot write snippets").WithHint("set proxmox.transport: shell or remove the setting")
	}
	if p.URL != "" {
		u, err := url.Parse(p.URL)
		if err != nil || u.Scheme != "https" || u.Hostname() == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
			return bad("url", "%q is not a valid API URL", p.URL).WithHint("such as https://127.0.0.1:8006")
		}
	}
	if p.CAFile != "" && p.Fingerprint != "" {
		return bad("ca_file", "ca_file and fingerprint are mutually exclusive")
	}
	if !used {
		return nil
	}
	for _, need := range []struct{ key, value string }{{"url", p.URL}, {"token_id", p.TokenID}, {"token_file", p.TokenFile}} {
		if need.value == "" {
			return bad(need.key, "missing, but required by transport rest").WithHint("run scripts/create_api_token.sh to create a token")
		}
	}
	return nil
}

func (p *Settings) validateNodes() error {
	var names []string
	check := func(key string, templates map[string]int) error {
		for _, image := range slices.Sorted(maps.Keys(templates)) {
			vmid := templates[image]
			if err := agentlab.ValidateName(image); err != nil {
				return bad(key, "%q is not an image name", image)
			}
			if vmid < 100 || vmid > 999999999 {
				return bad(key+"."+image, "%d is not between 100 and 999999999", vmid)
			}
		}
		return nil
	}
	if err := check("templates", p.Templates); err != nil {
		return err
	}
	for i, n := range p.Nodes {
		key := fmt.Sprintf("nodes[%d]", i)
		if !nodeName.MatchString(n.Name) {
			return bad(key+".name", "%q is not a node name", n.Name).WithHint("list nodes with: pvesh get /nodes")
		}
		if slices.Contains(names, n.Name) {
			return bad(key+".name", "node %s is listed twice", n.Name)
		}
		names = append(names, n.Name)
		if n.SSH != "" && !sshTarget.MatchString(n.SSH) {
			return bad(key+".ssh", "%q is not USER@ADDRESS", n.SSH).WithHint("such as root@192.0.2.7")
		}
		if err := check(key+".templates", n.Templates); err != nil {
			return err
		}
	}
	return nil
}

// GuestsUseDHCP implements the optional interface of config.Config.
func (p *Settings) GuestsUseDHCP() bool { return p.Addressing == addressDHCP }

// TemplateVMIDs returns the template VMs of a node by image: those of the node
// itself, otherwise those of all nodes.
func (p *Settings) TemplateVMIDs(node string) map[string]int {
	out := map[string]int{"base": 9000, "agents": 9001}
	if len(p.Templates) > 0 {
		out = maps.Clone(p.Templates)
	}
	for _, n := range p.Nodes {
		if n.Name == node {
			maps.Copy(out, n.Templates)
		}
	}
	return out
}
