package nft

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// bridgePorts returns the current ports of a bridge, none if there is no
// bridge.
func bridgePorts(bridge string) ([]string, error) {
	l, err := netlink.LinkByName(bridge)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil, nil
	}
	if err != nil {
		return nil, readError("the ports of "+bridge, err)
	}
	all, err := netlink.LinkList()
	if err != nil {
		return nil, readError("the ports of "+bridge, err)
	}
	var out []string
	for _, p := range all {
		if p.Attrs().MasterIndex == l.Attrs().Index {
			out = append(out, p.Attrs().Name)
		}
	}
	slices.Sort(out)
	return out, nil
}

// bridgeIndex returns the interface index of a bridge, 0 if it is not known.
func bridgeIndex(bridge string) int {
	l, err := netlink.LinkByName(bridge)
	if err != nil {
		return 0
	}
	return l.Attrs().Index
}

// pinNeighbours adds permanent neighbour entries for a sandbox, so that ARP
// and neighbour discovery cannot change them.
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
		return agentlab.Errorf(agentlab.CodeUnavailable, "bridge %s not found: %w", bridge, err).
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

// bridgeAlias marks a bridge that AgentLab created.
const bridgeAlias = "agentlab"

// prepare creates the bridge if it is missing, sets its addresses and enables
// forwarding. It must be called after the rules are loaded.
func prepare(c Config, log *slog.Logger) error {
	l, err := netlink.LinkByName(c.Bridge)
	if err != nil {
		if _, missing := errors.AsType[netlink.LinkNotFoundError](err); !missing {
			return agentlab.Errorf(agentlab.CodeInternal, "looking for %s: %w", c.Bridge, err)
		}
		if l, err = makeBridge(c.Bridge); err != nil {
			return err
		}
	}
	if l.Type() != "bridge" {
		return agentlab.Errorf(agentlab.CodeConflict, "%s is a network interface but not a bridge", c.Bridge).
			WithField("host_network.bridge").WithHint("use a bridge for sandboxes only; a missing one is created")
	}
	if err := fixAddress(c.Bridge, log); err != nil {
		return err
	}
	// The host must not accept router advertisements from the bridge.
	for _, knob := range []string{"accept_ra", "autoconf", "accept_redirects"} {
		if err := sysctl("net/ipv6/conf/"+c.Bridge+"/"+knob, "0"); err != nil {
			return err
		}
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "cannot bring %s up: %w", c.Bridge, err)
	}
	for _, p := range []netip.Prefix{netip.PrefixFrom(c.Gateway4, c.Subnet4.Bits()), netip.PrefixFrom(c.Gateway6, c.Subnet6.Bits())} {
		if !p.IsValid() {
			continue
		}
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
		if p.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD // no other interface can have it
		}
		if err := netlink.AddrReplace(l, addr); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "adding %s to %s: %w", p, c.Bridge, err)
		}
	}
	return forwarding(c)
}

// bridgeMAC is the MAC address for a bridge on which none was set. Such a
// bridge has the lowest address of its ports, so its address changes when a
// sandbox is added or removed. The kernel then drops the permanent neighbour
// entries, and guests send to the old address for up to a minute.
var bridgeMAC = net.HardwareAddr{0x02, 0xa9, 0x1a, 0x4d, 0x00, 0x01}

// netAddrSet is NET_ADDR_SET of linux/netdevice.h, an address set by user
// space.
const netAddrSet = "3"

// fixAddress sets bridgeMAC on the bridge, so that its address does not depend
// on its ports. An address that the owner or another program set has the same
// effect and is not changed.
func fixAddress(bridge string, log *slog.Logger) error {
	l, err := netlink.LinkByName(bridge)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil
	}
	if err != nil {
		return readError("the bridge "+bridge, err)
	}
	if l.Type() != "bridge" {
		return nil
	}
	from, err := os.ReadFile("/sys/class/net/" + bridge + "/addr_assign_type") // not available by netlink
	if err != nil {
		return readError("where the hardware address of "+bridge+" comes from", err)
	}
	if strings.TrimSpace(string(from)) == netAddrSet {
		return nil
	}
	if err := netlink.LinkSetHardwareAddr(l, bridgeMAC); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "setting the hardware address of %s to %s: %w", bridge, bridgeMAC, err)
	}
	log.Info("fixed the hardware address of the bridge", "bridge", bridge, "address", bridgeMAC, "before", l.Attrs().HardwareAddr)
	return nil
}

// BridgeUp returns an error with code unavailable if the bridge is not usable.
func (m *Manager) BridgeUp() error {
	m.mu.Lock()
	c := m.opts.Config // HostNets may change
	m.mu.Unlock()
	no := func(format string, args ...any) error {
		return agentlab.Errorf(agentlab.CodeUnavailable, format, args...).WithField("host_network.bridge").
			WithHint("create it with scripts/net/setup_vmbr1.sh --apply, or until the next boot with: agentlab host network apply")
	}
	l, err := netlink.LinkByName(c.Bridge)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return no("there is no bridge %s", c.Bridge)
	}
	if err != nil {
		return readError("the bridge "+c.Bridge, err)
	}
	if l.Type() != "bridge" || l.Attrs().Flags&net.FlagUp == 0 {
		return no("%s is not a bridge, or is not up", c.Bridge)
	}
	addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		return readError("the addresses of "+c.Bridge, err)
	}
	if !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.Equal(c.Gateway4.AsSlice()) }) {
		return no("%s does not have the address %s", c.Bridge, c.Gateway4)
	}
	return nil
}

func makeBridge(name string) (netlink.Link, error) {
	l := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
	l.Name = name
	if err := netlink.LinkAdd(l); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "creating the bridge %s: %w", name, err)
	}
	if err := netlink.LinkSetAlias(l, bridgeAlias); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "marking the bridge %s as AgentLab's: %w", name, err)
	}
	return netlink.LinkByName(name)
}

// forwarding enables IP forwarding. A host that gets its own IPv6 routes from
// router advertisements would then ignore them, so it is configured to still
// accept them.
func forwarding(c Config) error {
	if err := sysctl("net/ipv4/ip_forward", "1"); err != nil {
		return err
	}
	if !c.Subnet6.IsValid() {
		return nil
	}
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, l := range links {
		name := "net/ipv6/conf/" + l.Name + "/accept_ra"
		if v, err := os.ReadFile("/proc/sys/" + name); l.Name != c.Bridge && err == nil && string(v) == "1\n" {
			if err := sysctl(name, "2"); err != nil {
				return err
			}
		}
	}
	return sysctl("net/ipv6/conf/all/forwarding", "1")
}

func sysctl(name, value string) error {
	path := "/proc/sys/" + name
	if old, err := os.ReadFile(path); err == nil && string(old) == value+"\n" {
		return nil
	}
	if err := os.WriteFile(path, []byte(value), 0o644); err != nil { //nolint:gosec // a file of the kernel
		return agentlab.Errorf(agentlab.CodeDenied, "setting %s: %w", name, err).WithHint("run it as root")
	}
	return nil
}

// downBridge sets a bridge down, which stops all its traffic.
func downBridge(name string) error {
	l, err := netlink.LinkByName(name)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil
	}
	if err == nil {
		err = netlink.LinkSetDown(l)
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "taking %s down: %w", name, err)
	}
	return nil
}

// cutFlows deletes the conntrack entries of a removed sandbox, so that the
// next sandbox with its address does not receive its packets.
func cutFlows(s Sandbox) error {
	for _, a := range []netip.Addr{s.IPv4, s.IPv6} {
		if !a.IsValid() {
			continue
		}
		family := netlink.InetFamily(unix.AF_INET6)
		if a.Is4() {
			family = unix.AF_INET
		}
		var filters []netlink.CustomConntrackFilter
		for _, side := range []netlink.ConntrackFilterType{netlink.ConntrackOrigSrcIP, netlink.ConntrackOrigDstIP} {
			f := &netlink.ConntrackFilter{}
			if err := f.AddIP(side, a.AsSlice()); err != nil {
				return err
			}
			filters = append(filters, f)
		}
		if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, filters...); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "ending the flows of %s: %w", a, err)
		}
	}
	return nil
}

// removeBridge deletes a bridge that AgentLab created and that has no ports.
func removeBridge(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil || l.Attrs().Alias != bridgeAlias {
		return nil //nolint:nilerr // what is not there, or not AgentLab's, stays
	}
	if ports, err := bridgePorts(name); err != nil || len(ports) > 0 {
		return err
	}
	return netlink.LinkDel(l)
}

// lanDialer is the host's dialer, which also refuses the networks that the host
// is connected to, and addresses that are not routed to the uplink: the proxy
// must not reach what sandboxes may not reach.
type lanDialer struct {
	*gate.HostDialer
	config Config
	nets   func() ([]netip.Prefix, error)
}

// ways returns the names of the interfaces through which the host reaches an address.
func ways(a netip.Addr) ([]string, error) {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "no route to %s: %w", a, err)
	}
	names := make([]string, len(routes))
	for i, r := range routes {
		l, err := netlink.LinkByIndex(r.LinkIndex)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "no route to %s: %w", a, err)
		}
		names[i] = l.Attrs().Name
	}
	return names, nil
}

// checkWay refuses an address that the host does not route to the uplink.
func (d lanDialer) checkWay(a netip.Addr) error {
	names, err := ways(a)
	if err != nil {
		return err
	}
	for _, name := range names {
		switch {
		case name == d.config.Tailscale:
			return &egress.DeniedError{Addr: a, Rule: ruleTailnetIf}
		case name == d.config.Bridge || d.config.Uplink != "" && name != d.config.Uplink:
			return &egress.DeniedError{Addr: a, Rule: ruleUplink}
		}
	}
	return nil
}

// DialPrivate implements gate.PrivateDialer. Other sandboxes are always
// refused.
func (d lanDialer) DialPrivate(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	a := to.Addr().Unmap()
	for _, n := range []netip.Prefix{d.config.Subnet4, d.config.Subnet6} {
		if n.IsValid() && n.Contains(a) {
			return nil, &egress.DeniedError{Addr: a, Rule: ruleNeighbour}
		}
	}
	names, err := ways(a)
	if err != nil {
		return nil, err
	}
	if slices.Contains(names, d.config.Bridge) {
		return nil, &egress.DeniedError{Addr: a, Rule: ruleNeighbour}
	}
	return d.HostDialer.DialPrivate(ctx, to)
}

// DialContext implements gate.Dialer.
func (d lanDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not an IP address and port", addr)
	}
	nets, err := d.nets()
	if err != nil {
		return nil, err
	}
	if a := to.Addr().Unmap(); slices.ContainsFunc(nets, func(p netip.Prefix) bool { return contains(p, a) }) {
		return nil, &egress.DeniedError{Addr: a, Rule: ruleLAN}
	}
	if err := d.checkWay(to.Addr().Unmap()); err != nil {
		return nil, err
	}
	return d.HostDialer.DialContext(ctx, network, addr)
}
