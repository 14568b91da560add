package gate

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
)

// translatorName is the name by which a network announces the prefixes of its
// NAT64 (RFC 7050): a resolver with DNS64 returns AAAA records for it, each with
// one of two known addresses inside a prefix.
const translatorName = "ipv4only.arpa."

var translatorAddrs = [][4]byte{{192, 0, 0, 170}, {192, 0, 0, 171}}

const (
	translatorsAge     = time.Minute      // after which the resolver is asked again
	translatorsMaxAge  = 10 * time.Minute // how long an answer is valid if the resolver no longer answers
	translatorsRetry   = 5 * time.Second  // between unanswered questions
	translatorsTimeout = 3 * time.Second  // for one answer
)

// Translators finds the NAT64 prefixes of the host's network other than the
// well-known 64:ff9b::/96. It is safe for concurrent use.
type Translators struct {
	resolver Resolver
	now      func() time.Time

	mu       sync.Mutex
	asked    time.Time // the last question
	answered time.Time // the last answer; zero: never
	failure  error     // of the last question
	prefixes []netip.Prefix
}

// NewTranslators returns Translators that ask resolver.
func NewTranslators(resolver Resolver) *Translators {
	return &Translators{resolver: resolver, now: time.Now}
}

// Prefixes returns the network's own NAT64 prefixes, sorted; none if the
// resolver answers that there are none. An error with agentlab.CodeUnavailable
// means that the resolver does not answer, so the translation of an IPv6
// address is not known.
func (t *Translators) Prefixes(ctx context.Context) ([]netip.Prefix, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	pause := translatorsAge
	if t.failure != nil {
		pause = translatorsRetry
	}
	if t.asked.IsZero() || now.Sub(t.asked) > pause {
		list, err := t.ask(ctx)
		t.asked, t.failure = now, err
		if err == nil {
			t.answered, t.prefixes = now, list
		}
	}
	if t.answered.IsZero() || t.failure != nil && now.Sub(t.answered) > translatorsMaxAge {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot determine the NAT64 prefixes of the host's network: %w", t.failure).
			WithHint("the host's name server must answer the question for %s (AAAA); until then IPv6 is refused", translatorName)
	}
	return t.prefixes, nil
}

// ask asks the question once. The wait does not end with the caller's ctx,
// because the answer is shared by all callers.
func (t *Translators) ask(ctx context.Context) ([]netip.Prefix, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), translatorsTimeout)
	defer cancel()
	question := new(dns.Msg)
	question.SetQuestion(translatorName, dns.TypeAAAA)
	answer, err := t.resolver.Exchange(ctx, question)
	if err != nil {
		return nil, err
	}
	if answer.Rcode != dns.RcodeSuccess && answer.Rcode != dns.RcodeNameError {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the name server answers %s", dns.RcodeToString[answer.Rcode])
	}
	var out []netip.Prefix
	for _, rr := range answer.Answer {
		if aaaa, ok := rr.(*dns.AAAA); ok {
			out = append(out, translatorPrefixes(aaaa.AAAA)...)
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out), nil
}

// translatorPrefixes returns the prefixes of RFC 6052 in ip that contain one
// of the two well-known addresses, except the well-known prefix, whose
// embedded addresses are checked.
func translatorPrefixes(ip net.IP) []netip.Prefix {
	a, ok := netip.AddrFromSlice(ip)
	if !ok || !a.Is6() || a.Is4In6() {
		return nil
	}
	var out []netip.Prefix
	for _, bits := range []int{32, 40, 48, 56, 64, 96} {
		p := netip.PrefixFrom(a, bits).Masked()
		if slices.Contains(translatorAddrs, embeddedIPv4(a, bits)) && p != wellKnownTranslator {
			out = append(out, p)
		}
	}
	return out
}

var wellKnownTranslator = netip.MustParsePrefix("64:ff9b::/96")

// embeddedIPv4 returns the IPv4 address in a after a prefix of that length: the
// next four bytes, without the ninth byte, which is never part of it.
func embeddedIPv4(a netip.Addr, bits int) (out [4]byte) {
	b := a.As16()
	rest := slices.Concat(b[bits/8:max(bits/8, 8)], b[max(bits/8, 9):])
	if bits == 96 {
		rest = b[12:]
	}
	copy(out[:], rest)
	return out
}
