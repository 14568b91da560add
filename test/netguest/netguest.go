// Package netguest is a guest for the userspace network without a VM: a
// process in a network namespace of its own, with the kernel's real network
// stack and one card, whose frames go to the network under test. It has no
// other way out.
package netguest

import "net/netip"

// Config is how the guest's card is set up.
type Config struct {
	Address  netip.Prefix // e.g. 10.77.0.2/24
	Gateway  netip.Addr
	Address6 netip.Prefix // not valid: the guest has no IPv6
	Gateway6 netip.Addr
	MTU      int
}
