//go:build !linux

package gate

import (
	"net/netip"

	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// leavesHost returns an error: without the route to an address no connection is made.
func leavesHost(netip.Addr) (bool, error) {
	return false, hostos.Unsupported("the route to an address cannot be checked")
}
