// Package gate is the common part of all enforcers of an egress policy. A Gate
// controls the network access of one guest. It answers the guest's DNS
// questions, stores the resolved names, decides on flows by a policy that can
// be replaced at any time, reads the name in a TCP flow, dials allowed
// destinations, and records each decision.
//
// It does not process packets: package vnet provides a userspace TCP/IP stack
// for it, and package nft uses the kernel's.
package gate
