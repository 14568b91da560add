package agentlab

import "net/netip"

// Allocation describes the VMIDs and addresses that a new sandbox may get.
type Allocation struct {
	First, Last int // range of numbers, both ends included; 1 or more
	MaxLive     int // sandboxes that may exist at once; 0 means no maximum
	// Taken lists numbers of the range that other objects on the backend
	// have. Numbers outside of the range are ignored.
	Taken []int

	// IPv4 is the network that addresses are leased from. The zero value
	// means that no address is leased. The network address and the broadcast
	// address are never leased.
	IPv4 netip.Prefix
	// IPv6 is a prefix of 96 bits or fewer. The sandbox gets the address in
	// it that ends in its IPv4 address. The zero value means no IPv6.
	IPv6     netip.Prefix
	Reserved []netip.Addr // never leased, for example the gateway

	Workspace *WorkspaceUse // that the sandbox wants; nil if it wants none
	Session   string        // ID of the session that it is for; "" if it is for none
}
