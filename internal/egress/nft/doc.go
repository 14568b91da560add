// Package nft enforces the egress policies of sandboxes on a Linux bridge, as
// Proxmox has it, with nftables.
//
// It renders three tables, "inet agentlab", "bridge agentlab" and "arp
// agentlab", and loads them in one transaction. The work for a packet is the
// same for any number of sandboxes and names: a lookup of its source address
// in a verdict map, then a lookup in the sets of that sandbox's policy. The
// kernel has no names. The DNS server on the bridge adds the addresses of its
// answers to sets whose elements expire with the answer's time to live. Flows
// that need a host name (see egress.Verdict.NeedName) are redirected to
// AgentLab's proxy, which decides on them with the same code as the userspace
// network.
//
// Everything fails closed: a source without a bound sandbox, a missing policy,
// and a stopped proxy or DNS server each mean no network.
package nft
