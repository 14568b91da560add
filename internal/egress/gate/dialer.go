package gate

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// hostAddrsAge is how long the list of the host's own addresses is used.
const hostAddrsAge = 10 * time.Second

// HostDialer dials from the host's own network. It checks the address of each
// socket directly before the socket connects, and refuses with
// *egress.DeniedError addresses that no policy allows, the host itself, and
// the networks that the host is directly connected to. The latter may be
// public: with IPv6 those of machines at home or in an office are. For an IPv6
// address that contains an IPv4 address, both are checked. An address under a
// NAT64 prefix of the local network is refused, because its translation is not
// known.
type HostDialer struct {
	mu    sync.Mutex
	read  time.Time
	addrs map[netip.Addr]bool
	nets  []netip.Prefix // the networks of those addresses
	asked time.Time      // when ipv6 was determined
	ipv6  bool

	translators *Translators
}

// NewHostDialer returns a HostDialer.
func NewHostDialer() *HostDialer {
	h := &HostDialer{}
	h.translators = NewTranslators(NewUpstream(h))
	return h
}

// Translators returns the NAT64 prefixes of the network that the dialer knows.
func (h *HostDialer) Translators() *Translators { return h.translators }

// AskTranslators sets the resolver for the network's NAT64 prefixes, instead
// of the host's name servers. It must be called before the first dial.
func (h *HostDialer) AskTranslators(r Resolver) { h.translators = NewTranslators(r) }

// DialContext implements Dialer. It returns agentlab.CodeInvalid for names: a
// name was resolved and checked before, and must not be resolved again.
func (h *HostDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	switch network {
	case "tcp", "udp", "tcp4", "udp4", "icmp":
	default:
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "unsupported network %q", network)
	}
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not an IP address and port", addr)
	}
	if network == "icmp" {
		return h.dialICMP(ctx, at.Addr())
	}
	d := net.Dialer{ControlContext: h.control}
	return d.DialContext(ctx, network, addr)
}

// DialResolver dials one of the host's name servers, which may be the host
// itself or on its private network. Only Upstream calls it, with servers of
// the host's configuration.
func (h *HostDialer) DialResolver(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, addr)
}

func (h *HostDialer) control(ctx context.Context, network, addr string, raw syscall.RawConn) error {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return &egress.DeniedError{Rule: egress.RuleInvalid}
	}
	if err := h.check(ctx, ap.Addr()); err != nil {
		return err
	}
	if strings.HasPrefix(network, "udp") {
		return forbidBroadcast(raw)
	}
	return nil
}

// check refuses addresses that no policy allows, the host itself and its
// neighbours.
func (h *HostDialer) check(ctx context.Context, a netip.Addr) error {
	if rule, err := h.refusalRule(ctx, a); err != nil || rule != "" {
		return cmp.Or(err, error(&egress.DeniedError{Addr: a, Rule: rule}))
	}
	leaves, err := leavesHost(a.Unmap())
	if err != nil {
		return err
	}
	for _, inner := range egress.Embedded(a) {
		out, err := leavesHost(inner)
		if noRoute := errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH); err != nil && !noRoute {
			return err
		} else if !noRoute {
			leaves = leaves && out // a host without IPv4 does not have that address
		}
	}
	if !leaves {
		return &egress.DeniedError{Addr: a, Rule: egress.RuleHostAddr}
	}
	return nil
}

// refusalRule returns the rule by which an address is refused, "" if it is not. It
// does not check the routes. After an error the answer is not known.
func (h *HostDialer) refusalRule(ctx context.Context, a netip.Addr) (rule string, err error) {
	if rule, denied := egress.AlwaysDenied(a); denied {
		return rule, nil
	}
	a = a.Unmap()
	for _, one := range append([]netip.Addr{a}, egress.Embedded(a)...) {
		rule, err := h.localRule(one)
		if err != nil {
			return "", agentlab.Errorf(agentlab.CodeUnavailable, "cannot read the host's addresses: %w", err)
		}
		if rule != "" {
			return rule, nil
		}
	}
	if a.Is4() || egress.Dropped(egress.RuleTransition) {
		return "", nil
	}
	prefixes, err := h.translators.Prefixes(ctx)
	if slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) }) {
		return egress.RuleTransition, nil
	}
	return "", err
}

// Withholds reports whether an address must be removed from a DNS answer
// because it would not be dialled.
func (h *HostDialer) Withholds(ctx context.Context, a netip.Addr) bool {
	rule, err := h.refusalRule(ctx, a)
	return err != nil || rule != ""
}

// publicIPv6 is an address of the public internet. It is only looked up in the
// routing table, never dialled.
var publicIPv6 = netip.MustParseAddr("2001:4860:4860::8888")

// IPv6 reports whether the host has a route to the IPv6 internet.
func (h *HostDialer) IPv6() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.asked.IsZero() || time.Since(h.asked) > hostAddrsAge {
		leaves, err := leavesHost(publicIPv6)
		h.asked, h.ipv6 = time.Now(), err == nil && leaves
	}
	return h.ipv6
}

// forbidBroadcast clears SO_BROADCAST, which package net sets on every UDP
// socket: a change of routes after the check could make the address a
// broadcast address.
func forbidBroadcast(raw syscall.RawConn) error {
	var failed error
	err := raw.Control(func(fd uintptr) {
		failed = os.NewSyscallError("setsockopt", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 0))
	})
	return errors.Join(err, failed)
}

// localRule returns the rule that refuses a if it is an address of one of the
// host's interfaces, on a network of an interface, or the broadcast address of
// such a network; otherwise it returns "".
func (h *HostDialer) localRule(a netip.Addr) (rule string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.addrs == nil || time.Since(h.read) > hostAddrsAge {
		list, err := net.InterfaceAddrs()
		if err != nil {
			return "", err
		}
		h.read, h.addrs, h.nets = time.Now(), map[netip.Addr]bool{}, nil
		for _, ifa := range list {
			if p, err := netip.ParsePrefix(ifa.String()); err == nil {
				h.add(p)
			}
		}
	}
	switch {
	case h.addrs[a]:
		return egress.RuleHostAddr, nil
	case slices.ContainsFunc(h.nets, func(p netip.Prefix) bool { return p.Contains(a) }):
		return egress.RuleLAN, nil
	}
	return "", nil
}

// minLocalBits is the minimum prefix length of a network that counts as local; a
// shorter one is a tunnel to all addresses.
const minLocalBits = 4

func (h *HostDialer) add(p netip.Prefix) {
	h.addrs[p.Addr().Unmap()] = true
	if last, ok := broadcastOf(p); ok {
		h.addrs[last] = true
	}
	if p.Bits() >= minLocalBits && !p.IsSingleIP() {
		h.nets = append(h.nets, p.Masked())
	}
}

// broadcastOf returns the broadcast address of an IPv4 network, if it has one.
func broadcastOf(p netip.Prefix) (netip.Addr, bool) {
	if !p.Addr().Is4() || p.Bits() > 30 {
		return netip.Addr{}, false
	}
	b := p.Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])|(1<<(32-p.Bits())-1))
	return netip.AddrFrom4(b), true
}
