// Package proxmox runs sandboxes as virtual machines of Proxmox VE.
package proxmox

import (
	"context"
	"net"
	"net/netip"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

// Host is a node's network as this driver needs it: the rules on the bridge
// that sandboxes are on, and the way to and from them. It is made by whoever
// wires the driver (hostnet.Local and hostnet.Remote); a node without one runs
// no sandbox.
//
// Every method is idempotent and safe for concurrent use. Rules that were put
// stay in force when this process ends.
type Host interface {
	// Ready tells why policies cannot be enforced now: no bridge, no rules, or
	// rules that are not what they should be. nil means that they can.
	Ready(ctx context.Context) error

	// Put binds a guest to its address, MAC and bridge port, and to its
	// policy. When it returns nil all of that is in force and was read back,
	// and flows that the policy forbids are cut. After an error the guest has
	// no network.
	Put(ctx context.Context, g hostnet.Guest) error

	// Restore puts many at once, and forgets every guest that is not among
	// them: how a driver begins.
	Restore(ctx context.Context, guests []hostnet.Guest) error

	// Drop takes a guest off the network and forgets its records; its address
	// may be given to another one afterwards.
	Drop(ctx context.Context, id hostnet.ID) error

	// Listen returns the listener of the connections that this guest makes to
	// the guest plane: those that come from its address, which Put has bound
	// to its port. The last opener wins.
	Listen(ctx context.Context, id hostnet.ID) (net.Listener, error)

	// Dial opens a TCP connection to an address of a guest.
	Dial(ctx context.Context, to netip.AddrPort) (net.Conn, error)

	// Lease returns the address that the DHCP server of the bridge has
	// acknowledged to a MAC; not valid when none.
	Lease(ctx context.Context, mac net.HardwareAddr) (netip.Addr, error)

	// EgressLog is backend.EgressLogger's.
	EgressLog(ctx context.Context, id hostnet.ID, after int64, limit int) ([]agentlab.EgressRecord, error)
}
