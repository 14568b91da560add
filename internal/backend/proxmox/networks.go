package proxmox

import (
	"context"
	"sync"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

// networks are the nodes' networks on which this process has restored the
// guests.
type networks struct {
	mu    sync.Mutex
	nodes map[string]*nodeRestore
}

// nodeRestore is the restore of the guests of one node, and the last findings
// about the node. Each node has its own locks, so that a node that does not
// answer does not delay calls for others.
type nodeRestore struct {
	asking gate // held during the restore
	done   bool

	findings cached[[]backend.Finding]
}

func (n *networks) of(node string) *nodeRestore {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.nodes == nil {
		n.nodes = map[string]*nodeRestore{}
	}
	if n.nodes[node] == nil {
		n.nodes[node] = &nodeRestore{}
	}
	return n.nodes[node]
}

// network returns a node's network. The first call loads the existing sandboxes
// of the node and deletes all other rules.
func (d *Driver) network(ctx context.Context, name string) (Host, error) {
	n, err := d.node(name)
	if err != nil {
		return nil, err
	}
	if n.Host == nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the network of node %s cannot be managed from this host, so no sandbox is started there", name).
			WithHint("run the daemon on the node, or remove the node from proxmox.nodes")
	}
	t := d.networks.of(name)
	if err := t.asking.lock(ctx); err != nil {
		return nil, err
	}
	defer t.asking.Unlock()
	if t.done {
		return n.Host, nil
	}
	all, err := d.handles()
	if err != nil {
		return nil, err
	}
	var guests []hostnet.Guest
	for _, h := range all {
		if h.Node != name || h.Phase != phaseCreated {
			continue
		}
		g, err := h.guest(d.cfg.DHCP)
		if err != nil {
			return nil, err
		}
		guests = append(guests, g)
	}
	if err := n.Host.Restore(ctx, guests); err != nil {
		return nil, err
	}
	t.done = true
	return n.Host, nil
}
