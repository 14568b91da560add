// Package vnet is the private network of one sandbox in userspace: the other
// end of the guest's network device. It has a gateway, which is also the
// controller's address and the DNS server, and no neighbours.
//
// An egress.Policy decides on each connection of the guest. An allowed
// connection is dialled through one Dialer, and its data is relayed; the guest's
// packets never reach a real network. Package gate decides, resolves names and
// dials; this package has the guest's end.
//
// The guest is untrusted. Frames are checked before they reach the TCP/IP
// stack, every table is limited by Limits, and a guest that does not read only
// blocks itself.
package vnet
