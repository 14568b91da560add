// Package gate is what every enforcer of an egress policy shares: one Gate
// stands between one guest and the network. It answers the guest's DNS
// questions, remembers which names it told, decides flows by a policy that
// may be exchanged at any time, reads the name that a TCP flow itself shows,
// dials what is allowed, and records each decision.
//
// It knows no packets: package vnet puts a userspace TCP/IP stack in front of
// it, and package nft the kernel's.
package gate
