package daemon

import (
	"errors"
	"io"
	"net/netip"
	"os"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/cloudinit"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

// openProxmox opens the backend of Proxmox VE.
func openProxmox(env driverEnv) (place, error) {
	p := env.settings.Proxmox
	transport, err := proxmoxTransport(env)
	if err != nil {
		return place{}, err
	}
	v4, v6, err := env.settings.HostNetwork.Prefixes()
	if err != nil {
		return place{}, err
	}
	gw4, gw6, err := env.settings.HostNetwork.Gateways()
	if err != nil {
		return place{}, err
	}
	nodes, also, err := proxmoxNodes(env)
	if err != nil {
		return place{}, err
	}
	keys, err := sshKeys(p.SSHKeyFile)
	if err != nil {
		return place{}, err
	}
	cfg := proxmox.Config{
		StateDir: env.paths.State, Transport: transport, TokenID: p.TokenID, Nodes: nodes,
		First: env.settings.VMIDRange.First, Last: env.settings.VMIDRange.Last,
		Bridge: env.settings.HostNetwork.Bridge, Subnet4: v4, Subnet6: v6, Gateway4: gw4, Gateway6: gw6,
		DHCP: p.Addressing == config.ProxmoxDHCP, FullClone: p.FullClone, Storage: p.Storage, Pool: p.Pool,
		Firewall: p.Firewall, Models: config.ProxmoxModels, Model: p.Model, SSHKeys: keys, Logger: env.log,
	}
	if p.Nameserver != "" {
		if cfg.Nameserver, err = netip.ParseAddr(p.Nameserver); err != nil {
			return place{}, agentlab.Errorf(agentlab.CodeInvalid, "%w", err).WithField("proxmox.nameserver")
		}
	}
	d, err := proxmox.New(cfg)
	if err != nil {
		return place{}, err
	}
	return place{driver: d, images: d.Templates(), also: also}, nil
}

// envNode gives this machine, for tests only, the name of a node that it is.
const envNode = "AGENTLAB_TEST_NODE"

// proxmoxNodes are the nodes of the configuration. This machine is the node
// with its name, which a node of Proxmox VE always has: its network is that of
// no other one, whichever way the API is reached, for rules that are made here
// bind nobody there.
//
// Of another node it is the one that an agent there keeps, where ssh leads to
// it; one without runs no sandbox, and Check says so.
func proxmoxNodes(env driverEnv) (out []proxmox.Node, also []io.Closer, err error) {
	p := env.settings.Proxmox
	self := env.getenv(envNode)
	if self == "" {
		name, err := os.Hostname()
		if err != nil {
			return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "the name of this machine: %w", err)
		}
		self, _, _ = strings.Cut(name, ".")
	}
	list := p.Nodes
	if len(list) == 0 {
		list = []config.ProxmoxNode{{Name: self}}
	}
	for _, node := range list {
		n := proxmox.Node{Name: node.Name, Templates: p.TemplateVMIDs(node.Name)}
		switch {
		case node.Name == self:
			n.Host = thisNode(env.network)
		case node.SSH != "":
			r := hostnet.NewRemote(hostnet.RemoteConfig{
				Network: func() (nft.Config, error) { return bridgeConfig(env.settings) },
				Command: append(pve.Unconfined(env.getenv), agentCommand(node.SSH)...), Logger: env.log.With("node", node.Name),
			})
			n.Host = nodeHost{r}
			also = append(also, r)
		}
		out = append(out, n)
	}
	return out, also, nil
}

// agentCommand runs the network agent of another node.
func agentCommand(target string) []string {
	return []string{
		"ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
		"--", target, "agentlabd", "network", "agent", "--system",
	}
}

func proxmoxTransport(env driverEnv) (pve.Transport, error) {
	p := env.settings.Proxmox
	if p.Transport == config.ProxmoxShell {
		return pve.NewShell(pve.ShellOptions{Snippets: p.Snippets, Prefix: pve.Unconfined(env.getenv)}), nil
	}
	secret, err := tokenSecret(p)
	if err != nil {
		return nil, err
	}
	o := pve.RESTOptions{URL: p.URL, TokenID: p.TokenID, Secret: secret, Fingerprint: p.Fingerprint}
	if p.CAFile != "" {
		if o.CA, err = os.ReadFile(p.CAFile); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "it cannot be read: %w", err).WithField("proxmox.ca_file").
				WithHint("on a node it is /etc/pve/pve-root-ca.pem; elsewhere copy it, or set proxmox.fingerprint instead")
		}
	}
	return pve.NewREST(o)
}

// tokenSecret reads the secret of the API token that the configuration names.
func tokenSecret(p config.Proxmox) (string, error) {
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
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "it cannot be read: %w", err).WithField("proxmox.ssh_public_key_file").
			WithHint("put public keys there, or leave it out: agentlab ssh needs none")
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
