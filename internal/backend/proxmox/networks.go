package proxmox

import (
	"context"

	"github.com/agentlab-vm/agentlab"
)

// networks are the nodes' networks that this process has taken over from the
// one before it.
type networks struct {
	asking   gate
	restored map[string]bool
}

// network returns a node's network. The first time it is told of all
// sandboxes there are, so that those that are gone lose what they had.
func (d *Driver) network(ctx context.Context, name string) (Host, error) {
	n, err := d.node(name)
	if err != nil {
		return nil, err
	}
	if n.Host == nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the network of node %s is not within reach, so nothing is started there", name).
			WithHint("the daemon must run on the node, or leave the node out of proxmox.nodes")
	}
	if err := d.networks.asking.lock(ctx); err != nil {
		return nil, err
	}
	defer d.networks.asking.unlock()
	if d.networks.restored[name] {
		return n.Host, nil
	}
	all, err := d.handles()
	if err != nil {
		return nil, err
	}
	var guests []Guest
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
	if d.networks.restored == nil {
		d.networks.restored = map[string]bool{}
	}
	d.networks.restored[name] = true
	return n.Host, nil
}
