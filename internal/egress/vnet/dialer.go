package vnet

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// hostAddrsAge is how long the list of the host's own addresses is used.
const hostAddrsAge = 10 * time.Second

// HostDialer dials from the host's own network. Whatever it is asked for, it
// looks at the address of each socket just before that connects, and refuses
// with *egress.DeniedError what no policy allows and what is the host itself.
type HostDialer struct {
	mu    sync.Mutex
	read  time.Time
	addrs map[netip.Addr]bool
}

// NewHostDialer returns a HostDialer.
func NewHostDialer() *HostDialer { return &HostDialer{} }

// DialContext implements Dialer. Names are refused with agentlab.CodeInvalid:
// a name was resolved and checked before, and must not be resolved again.
func (h *HostDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	switch network {
	case "tcp", "udp", "tcp4", "udp4":
	default:
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "network %q is not carried", network)
	}
	if _, err := netip.ParseAddrPort(addr); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not an IP address and port", addr)
	}
	d := net.Dialer{Control: h.control}
	return d.DialContext(ctx, network, addr)
}

// DialResolver dials one of the host's name servers, which may well be the
// host itself or on its private network. Only Upstream calls it, with servers
// out of the host's configuration.
func (h *HostDialer) DialResolver(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, addr)
}

func (h *HostDialer) control(_, addr string, _ syscall.RawConn) error {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return &egress.DeniedError{Rule: egress.RuleInvalid}
	}
	a := ap.Addr()
	if rule, denied := egress.AlwaysDenied(a); denied {
		return &egress.DeniedError{Addr: a, Rule: rule}
	}
	own, err := h.isOwn(a.Unmap())
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the host's own addresses are not known: %w", err)
	}
	if own {
		return &egress.DeniedError{Addr: a, Rule: egress.RuleHostAddr}
	}
	return nil
}

func (h *HostDialer) isOwn(a netip.Addr) (bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.addrs == nil || time.Since(h.read) > hostAddrsAge {
		list, err := net.InterfaceAddrs()
		if err != nil {
			return false, err
		}
		h.read, h.addrs = time.Now(), map[netip.Addr]bool{}
		for _, ifa := range list {
			if p, err := netip.ParsePrefix(ifa.String()); err == nil {
				h.addrs[p.Addr().Unmap()] = true
			}
		}
	}
	return h.addrs[a], nil
}
