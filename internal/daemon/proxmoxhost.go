package daemon

import (
	"context"

	"github.com/agentlab-vm/agentlab/internal/backend/proxmox"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

// proxmoxHost is the network of this machine in the words of the driver, when
// this machine is a node of Proxmox VE.
type proxmoxHost struct{ *hostnet.Local }

var _ proxmox.Host = proxmoxHost{}

// thisNode gives the driver the network of this machine, which from then on is
// told by it who is on the bridge.
func thisNode(l *hostnet.Local) proxmox.Host {
	l.Claim()
	return proxmoxHost{l}
}

// Put implements proxmox.Host.
func (h proxmoxHost) Put(ctx context.Context, g proxmox.Guest) error {
	return h.Local.Put(ctx, hostnet.Guest(g))
}

// Restore implements proxmox.Host.
func (h proxmoxHost) Restore(ctx context.Context, guests []proxmox.Guest) error {
	list := make([]hostnet.Guest, len(guests))
	for i, g := range guests {
		list[i] = hostnet.Guest(g)
	}
	return h.Local.Restore(ctx, list)
}
