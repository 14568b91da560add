// Package vnet is the private network of one sandbox, run in userspace: the
// other end of the guest's network card. It has a gateway, which is also the
// controller's address and the DNS server, and no neighbours.
//
// What the guest opens is put to an egress.Policy, and what is allowed is
// dialled through one Dialer and relayed byte by byte; the guest never has a
// packet of its own on any wire. Package gate decides, names and dials; this one
// holds the guest's end.
//
// The guest is hostile. Frames are checked before the TCP/IP stack sees them,
// every table is bounded by Limits, and a guest that does not read only
// stalls itself.
package vnet
