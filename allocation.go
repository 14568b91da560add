package agentlab

import "net/netip"

// Allocation says which number and which addresses a new sandbox may get.
type Allocation struct {
	First, Last int // range of numbers, both ends included; 1 or more
	MaxLive     int // sandboxes that may exist at once; 0 means no maximum
	// Taken are numbers that somebody else has on the backend; those outside
	// of the range make no difference.
	Taken []int

	// IPv4 is the network that an address is leased from; not valid: none is.
	// Its first address, which names the network, and its last one, which
	// means everybody, are never leased.
	IPv4 netip.Prefix
	// IPv6, of 96 bits or fewer, gives an address that ends in the IPv4 one;
	// not valid: none.
	IPv6     netip.Prefix
	Reserved []netip.Addr // never leased: the gateway, for one
}
