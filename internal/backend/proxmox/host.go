// Package proxmox runs sandboxes as virtual machines of Proxmox VE.
package proxmox

import (
	"context"
	"net"
	"net/netip"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

// Host is the network of a node for this driver: the rules on the bridge of
// sandboxes, and connections to and from them. hostnet.Local and
// hostnet.Remote implement it; a node without one runs no sandbox.
//
// Every method is idempotent and safe for concurrent use. Its rules stay in
// force when this process ends.
type Host interface {
	// Ready returns why policies cannot be enforced now: no bridge, no rules,
	// or changed rules. nil means that they can.
	Ready(ctx context.Context) error

	// Put binds a guest to its address, MAC and bridge port, and to its
	// policy. When it returns nil, all of that is in force and was read back,
	// and flows that the policy denies are closed. After an error the guest
	// has no network.
	Put(ctx context.Context, g hostnet.Guest) error

	// Restore sets all guests at once, and removes all others. A driver
	// calls it at its start.
	Restore(ctx context.Context, guests []hostnet.Guest) error

	// Drop removes a guest from the network and deletes its records.
	// Afterwards another guest may get its address.
	Drop(ctx context.Context, id hostnet.ID) error

	// Listen returns a listener for the connections of this guest to the
	// guest plane: those from its address, which Put has bound to its port. A
	// new listener replaces the one before.
	Listen(ctx context.Context, id hostnet.ID) (net.Listener, error)

	// Dial opens a TCP connection to an address of a guest.
	Dial(ctx context.Context, to netip.AddrPort) (net.Conn, error)

	// Lease returns the address that the DHCP server of the bridge has
	// acknowledged to a MAC, zero if none.
	Lease(ctx context.Context, mac net.HardwareAddr) (netip.Addr, error)

	// EgressLog implements backend.Net.
	EgressLog(ctx context.Context, id hostnet.ID, after int64, limit int) ([]agentlab.EgressRecord, error)
}
