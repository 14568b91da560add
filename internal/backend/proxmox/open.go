package proxmox

import (
	"errors"
	"io"
	"net/netip"
	"os"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/cloudinit"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

// Backend is the backend of Proxmox VE.
var Backend = registry.Backend{Name: Name, Section: newSettings, Options: profileOptions, Open: open}

func open(env registry.Env) (registry.Opened, error) {
	p := env.Section.(*Settings)
	transport, err := p.openTransport(env.Getenv)
	if err != nil {
		return registry.Opened{}, err
	}
	v4, v6, err := env.Config.HostNetwork.Prefixes()
	if err != nil {
		return registry.Opened{}, err
	}
	gw4, gw6, err := env.Config.HostNetwork.Gateways()
	if err != nil {
		return registry.Opened{}, err
	}
	nodes, remotes, err := p.openNodes(env)
	if err != nil {
		return registry.Opened{}, err
	}
	keys, err := sshKeys(p.SSHKeyFile)
	if err != nil {
		return registry.Opened{}, err
	}
	cfg := Config{
		StateDir: env.State, Transport: transport, TokenID: p.TokenID, Nodes: nodes,
		First: env.Config.VMIDRange.First, Last: env.Config.VMIDRange.Last,
		Bridge: env.Config.HostNetwork.Bridge, Subnet4: v4, Subnet6: v6, Gateway4: gw4, Gateway6: gw6,
		DHCP: p.GuestsUseDHCP(), FullClone: p.FullClone, Storage: p.Storage, Pool: p.Pool,
		Firewall: p.Firewall, Models: models, Model: p.Model, SSHKeys: keys, Remotes: remotes, Logger: env.Log,
	}
	if p.Nameserver != "" {
		if cfg.Nameserver, err = netip.ParseAddr(p.Nameserver); err != nil {
			return registry.Opened{}, agentlab.Errorf(agentlab.CodeInvalid, "%w", err).WithField("proxmox.nameserver")
		}
	}
	d, err := New(cfg)
	if err != nil {
		return registry.Opened{}, err
	}
	return registry.Opened{Driver: d, Images: d.Templates()}, nil
}

// openNodes returns the nodes of the configuration. The node with the hostname
// of this machine is this machine, because a node of Proxmox VE always has its
// hostname as its name. Rules on this machine have no effect on other nodes,
// regardless of how the API is reached.
//
// The network of another node is managed by an agent there, if an ssh target
// is configured. A node without one runs no sandbox, and Check reports that.
func (p *Settings) openNodes(env registry.Env) (out []Node, remotes []io.Closer, err error) {
	name, err := os.Hostname()
	if err != nil {
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot read the host name of this machine: %w", err)
	}
	self, _, _ := strings.Cut(name, ".")
	list := p.Nodes
	if len(list) == 0 {
		list = []NodeSettings{{Name: self}}
	}
	for _, node := range list {
		n := Node{Name: node.Name, Templates: p.TemplateVMIDs(node.Name)}
		switch {
		case node.Name == self:
			env.Network.Claim() // from here on the driver manages the sandboxes on the bridge
			n.Host, n.Local = env.Network, true
		case node.SSH != "":
			r := hostnet.NewRemote(hostnet.RemoteConfig{
				Network: func() (nft.Config, error) { return hostnet.Rules(env.Config) },
				Command: append(pve.Unconfined(env.Getenv), agentCommand(node.SSH)...), Logger: env.Log.With("node", node.Name),
			})
			n.Host = r
			remotes = append(remotes, r)
		}
		out = append(out, n)
	}
	return out, remotes, nil
}

// agentCommand runs the network agent of another node.
func agentCommand(target string) []string {
	return []string{
		"ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
		"--", target, "agentlabd", "network", "agent", "--system",
	}
}

func (p *Settings) openTransport(getenv func(string) string) (pve.Transport, error) {
	if p.Transport == transportShell {
		return pve.NewShell(pve.ShellOptions{Snippets: p.Snippets, Prefix: pve.Unconfined(getenv)}), nil
	}
	secret, err := p.tokenSecret()
	if err != nil {
		return nil, err
	}
	o := pve.RESTOptions{URL: p.URL, TokenID: p.TokenID, Secret: secret, Fingerprint: p.Fingerprint}
	if p.CAFile != "" {
		if o.CA, err = os.ReadFile(p.CAFile); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "cannot read the file: %w", err).WithField("proxmox.ca_file").
				WithHint("use /etc/pve/pve-root-ca.pem of a node, copy that file to this machine, or set proxmox.fingerprint instead")
		}
	}
	return pve.NewREST(o)
}

// tokenSecret reads the secret of the API token in the configuration.
func (p *Settings) tokenSecret() (string, error) {
	secret, err := pve.ReadTokenFile(p.TokenFile, p.TokenID)
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		return "", e.WithField("proxmox." + e.Field)
	}
	return secret, err
}

// sshKeys reads a file of public keys.
func sshKeys(path string) ([]string, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "cannot read the file: %w", err).WithField("proxmox.ssh_public_key_file").
			WithHint("write public keys to the file, or remove the setting: agentlab ssh works without it")
	}
	var keys []string
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, err := cloudinit.SSHKey(line)
		if e, ok := errors.AsType[*agentlab.Error](err); ok {
			return nil, e.WithField("proxmox.ssh_public_key_file")
		}
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}
