// Package nft enforces the egress policies of sandboxes on a Linux bridge, as
// Proxmox has it, with nftables.
//
// It renders three tables, "inet agentlab", "bridge agentlab" and "arp
// agentlab", and loads them in one transaction. What a packet meets is the
// same for any number of sandboxes and names: a lookup by its source address
// in a verdict map, then a lookup in the sets of that sandbox's policy. Names
// are not known to the kernel. The DNS server on the bridge adds the addresses
// that it tells a guest to sets whose elements end with the answer's time to
// live, and flows whose own words must name their host (see
// egress.Verdict.NeedName) are redirected to a proxy of ours, which judges
// them with the same code as the userspace network does.
//
// Everything fails closed: a source that no sandbox is bound to, a policy that
// is not there, a proxy or a DNS server that is down each mean no network.
package nft
