// Package hostnet is the network of this machine as sandboxes on its bridge
// have it: the rules in the kernel (package nft), the way from guests to the
// guest plane and from us to guests, and the record of what guests wanted.
//
// A sandbox is known by its address on the bridge, and by that alone it is
// distinguished from others: the rules bind the address to its MAC and both to its
// bridge port, so nobody can speak with another's. What is not bound is not
// heard.
package hostnet
