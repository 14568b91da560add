package nft

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

// bridgePorts lists what is plugged into a bridge now.
func bridgePorts(bridge string) []string {
	list, err := os.ReadDir(filepath.Join("/sys/class/net", bridge, "brif"))
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range list {
		out = append(out, e.Name())
	}
	return out
}

// hostNets lists the networks that the host is on by itself, the bridge's and
// those of single addresses not.
func hostNets(c Config) []netip.Prefix {
	links, err := net.Interfaces()
	if err != nil {
		return nil
	}
	var out []netip.Prefix
	for _, l := range links {
		if l.Name == c.Bridge || l.Flags&net.FlagLoopback != 0 {
			continue
		}
		addrs, err := l.Addrs()
		if err != nil {
			continue
		}
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err == nil && p.Addr().IsGlobalUnicast() && p.Bits() > 3 && !p.IsSingleIP() {
				out = append(out, p.Masked())
			}
		}
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return slices.Compact(out)
}

// pinNeighbours tells the kernel where a sandbox is, for good: what it or
// another says by ARP or neighbour discovery changes nothing then.
func pinNeighbours(bridge string, s Sandbox) error {
	return eachNeighbour(bridge, s, func(n *netlink.Neigh) error {
		n.State = netlink.NUD_PERMANENT
		return netlink.NeighSet(n)
	})
}

func unpinNeighbours(bridge string, s Sandbox) error {
	return eachNeighbour(bridge, s, func(n *netlink.Neigh) error {
		if err := netlink.NeighDel(n); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		return nil
	})
}

func eachNeighbour(bridge string, s Sandbox, do func(*netlink.Neigh) error) error {
	l, err := netlink.LinkByName(bridge)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "there is no bridge %s: %w", bridge, err).
			WithField("host_network.bridge").WithHint("agentlab host network apply")
	}
	for _, a := range []netip.Addr{s.IPv4, s.IPv6} {
		if !a.IsValid() {
			continue
		}
		family := unix.AF_INET6
		if a.Is4() {
			family = unix.AF_INET
		}
		n := &netlink.Neigh{LinkIndex: l.Attrs().Index, Family: family, IP: a.AsSlice(), HardwareAddr: s.MAC}
		if err := do(n); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "the neighbour entry of %s on %s: %w", a, bridge, err)
		}
	}
	return nil
}
