package proxmox

import (
	"context"
	"net"
	"net/netip"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

// nodeNetwork is the network of a node: of this machine, or of another one
// through its agent.
type nodeNetwork interface {
	Ready(ctx context.Context) error
	Put(ctx context.Context, g hostnet.Guest) error
	Restore(ctx context.Context, guests []hostnet.Guest) error
	Drop(ctx context.Context, ref backend.Ref) error
	Listen(ctx context.Context, ref backend.Ref) (net.Listener, error)
	Dial(ctx context.Context, to netip.AddrPort) (net.Conn, error)
	Lease(ctx context.Context, mac net.HardwareAddr) (netip.Addr, error)
	EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error)
}

// nodeHost is the network of a node in the words of the driver.
type nodeHost struct{ nodeNetwork }

var _ Host = nodeHost{}

// thisNode gives the driver the network of this machine, which from then on is
// told by it who is on the bridge.
func thisNode(l *hostnet.Local) Host {
	l.Claim()
	return nodeHost{l}
}

// Put implements Host.
func (h nodeHost) Put(ctx context.Context, g Guest) error {
	return h.nodeNetwork.Put(ctx, hostnet.Guest(g))
}

// Restore implements Host.
func (h nodeHost) Restore(ctx context.Context, guests []Guest) error {
	list := make([]hostnet.Guest, len(guests))
	for i, g := range guests {
		list[i] = hostnet.Guest(g)
	}
	return h.nodeNetwork.Restore(ctx, list)
}
