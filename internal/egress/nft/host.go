package nft

import (
	"net"
	"net/netip"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

func readError(what string, err error) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "%s cannot be read: %w", what, err).WithHint("try again")
}

// hostNets returns the networks that the host is directly connected to, except
// the bridge's and those of single addresses. Without them in the rules
// sandboxes could reach them, so the caller must not ignore an error.
func hostNets(c Config) ([]netip.Prefix, error) {
	links, err := net.Interfaces()
	if err != nil {
		return nil, readError("the host's networks", err)
	}
	var out []netip.Prefix
	for _, l := range links {
		if l.Name == c.Bridge || l.Flags&net.FlagLoopback != 0 {
			continue
		}
		addrs, err := l.Addrs()
		if err != nil {
			if _, gone := net.InterfaceByName(l.Name); gone != nil {
				continue
			}
			return nil, readError("the host's networks", err)
		}
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err == nil && p.Addr().IsGlobalUnicast() && p.Bits() > 3 && !p.IsSingleIP() {
				out = append(out, p.Masked())
			}
		}
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return slices.Compact(out), nil
}

// hostAddrs returns the host's own IPv4 addresses that are not always denied:
// those that could be reached through an external NAT64.
func hostAddrs() ([]netip.Addr, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, readError("the host's addresses", err)
	}
	var out []netip.Addr
	for _, a := range list {
		p, err := netip.ParsePrefix(a.String())
		if err != nil || !p.Addr().Is4() {
			continue
		}
		if _, denied := egress.AlwaysDenied(p.Addr()); !denied {
			out = append(out, p.Addr())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// contains reports whether an address, or an IPv4 address that it contains, is on
// a network.
func contains(p netip.Prefix, a netip.Addr) bool {
	if p.Addr().Is4() && a.Is6() {
		return slices.ContainsFunc(egress.Embedded(a), p.Contains)
	}
	return p.Contains(a)
}
