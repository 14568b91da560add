package gate

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

// Outside opens connections of the controller itself, for guests whose policies
// allow them. It reaches what a guest can reach: addresses that no policy allows,
// the host and its networks are refused as by a HostDialer, and an upstream proxy
// is used as for guests. It is safe for concurrent use.
type Outside struct {
	dialer   Dialer
	resolver Resolver

	mu    sync.Mutex
	known map[question]resolved
}

type question struct {
	name    string
	private bool
}

type resolved struct {
	addrs []netip.Addr
	until time.Time
}

// NewOutside returns an Outside for an upstream proxy, or for the host's own network
// if the proxy has no URL.
func NewOutside(proxy ProxyConfig) (*Outside, error) {
	if proxy.URL == "" {
		return OutsideThrough(NewHostDialer()), nil
	}
	d, err := NewProxyDialer(proxy)
	if err != nil {
		return nil, err
	}
	o := OutsideThrough(d)
	if r := d.Resolver(); r != nil {
		o.resolver = r
	}
	return o, nil
}

// OutsideThrough returns an Outside that dials with d, and asks the host's name
// servers through it.
func OutsideThrough(d Dialer) *Outside {
	return &Outside{dialer: d, resolver: NewUpstream(d), known: map[question]resolved{}}
}

// maxLookups is the maximum number of remembered names.
const maxLookups = 256

// Lookup returns the addresses of a canonical name that may be dialled. With
// private they include addresses that the operator may open. The error is an
// *egress.DeniedError if the name has only other addresses. An answer is used for
// its TTL, at least a minute.
func (o *Outside) Lookup(ctx context.Context, name string, private bool) ([]netip.Addr, error) {
	q := question{name, private}
	o.mu.Lock()
	have := o.known[q]
	o.mu.Unlock()
	if time.Now().Before(have.until) {
		return have.addrs, nil
	}
	addrs, ttl, err := o.lookup(ctx, q)
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.known) >= maxLookups {
		clear(o.known)
	}
	o.known[q] = resolved{addrs, time.Now().Add(ttl)}
	return addrs, nil
}

func (o *Outside) lookup(ctx context.Context, q question) (addrs []netip.Addr, ttl time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, Limits{}.withDefaults().DNSTimeout)
	defer cancel()
	r := o.resolver
	if own, ok := r.(privateResolver); ok && q.private {
		r = own.Private()
	}
	kinds := []uint16{dns.TypeA}
	if d, ok := o.dialer.(ipv6er); !ok || d.IPv6() {
		kinds = append(kinds, dns.TypeAAAA)
	}
	ttl = maxTTL
	var withheld []netip.Addr
	for _, kind := range kinds {
		ask := new(dns.Msg)
		ask.SetQuestion(q.name, kind)
		ask.SetEdns0(1232, false)
		answer, aerr := r.Exchange(ctx, ask)
		if aerr != nil || answer == nil {
			err = aerr
			continue
		}
		f := answerFilter{aliases: aliases(q.name, answer.Answer), ipv6: len(kinds) == 2, private: q.private, withholds: func(a netip.Addr) bool {
			d, ok := o.dialer.(addressFilter)
			return ok && d.Withholds(ctx, a)
		}}
		f.filter(answer)
		addrs, withheld = append(addrs, f.kept...), append(withheld, f.withheld...)
		ttl = min(ttl, clampTTL(f.ttl))
	}
	switch {
	case len(addrs) > 0:
		return addrs, ttl, nil
	case len(withheld) > 0:
		return nil, 0, &egress.DeniedError{Addr: withheld[0], Rule: egress.RuleRebinding}
	case err == nil:
		err = &net.DNSError{Err: "no such host", Name: q.name, IsNotFound: true}
	}
	return nil, 0, err
}

// Dial opens a TCP connection to an address. private means that a policy opens it
// although it is private.
func (o *Outside) Dial(ctx context.Context, to netip.AddrPort, private bool) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, Limits{}.withDefaults().DialTimeout)
	defer cancel()
	if d, ok := o.dialer.(PrivateDialer); ok && private && egress.Openable(to.Addr()) {
		return d.DialPrivate(ctx, to)
	}
	return o.dialer.DialContext(ctx, "tcp", to.String())
}
