// Package hostnet manages the network of this machine for sandboxes on its
// bridge: the rules in the kernel (package nft), connections from guests to
// the guest plane and from the daemon to guests, and the egress log of guests.
//
// A sandbox is identified only by its address on the bridge: the rules bind the
// address to its MAC and both to its bridge port, so no sandbox can use another's
// address. Packets from an unbound address are dropped.
package hostnet
