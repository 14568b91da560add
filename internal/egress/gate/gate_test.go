package gate_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = guard.Patience

// lab is a Gate with a fake internet behind it and a clock that a test moves.
type lab struct {
	*gate.Gate
	net *fakenet.Net

	mu    sync.Mutex
	clock time.Time
	recs  []agentlab.EgressRecord
	told  chan struct{}
}

func newLab(t testing.TB, n agentlab.Network, options ...func(*gate.Config)) *lab {
	t.Helper()
	internet := fakenet.New()
	t.Cleanup(internet.Close)
	l := &lab{net: internet, clock: time.Unix(1700000000, 0), told: make(chan struct{}, 1)}
	cfg := gate.Config{Policy: policy(t, n), Dialer: internet, Audit: l.add, Now: l.now}
	for _, o := range options {
		o(&cfg)
	}
	g, err := gate.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	l.Gate = g
	return l
}

func policy(t testing.TB, n agentlab.Network) *egress.Policy {
	t.Helper()
	p, err := egress.New(n)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func allow(rules ...string) agentlab.Network {
	n := agentlab.Network{Mode: agentlab.NetworkAllowlist}
	for _, r := range rules {
		n.Allow = append(n.Allow, agentlab.NetworkRule{Rule: r})
	}
	return n
}

func (l *lab) now() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.clock
}

func (l *lab) pass(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clock = l.clock.Add(d)
}

func (l *lab) add(r agentlab.EgressRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.recs = append(l.recs, r)
	select {
	case l.told <- struct{}{}:
	default:
	}
}

// record waits for the first record that is as wanted.
func (l *lab) record(t testing.TB, what string, want func(agentlab.EgressRecord) bool) agentlab.EgressRecord {
	t.Helper()
	limit := time.After(patience)
	for {
		l.mu.Lock()
		i := slices.IndexFunc(l.recs, want)
		all := slices.Clone(l.recs)
		l.mu.Unlock()
		if i >= 0 {
			return all[i]
		}
		select {
		case <-l.told:
		case <-limit:
			t.Fatalf("no record of %s in %+v", what, all)
		}
	}
}

// resolve asks for the addresses of a name as a guest does.
func (l *lab) resolve(t testing.TB, name string, kind uint16) *dns.Msg {
	t.Helper()
	wire, err := new(dns.Msg).SetQuestion(dns.Fqdn(name), kind).Pack()
	if err != nil {
		t.Fatal(err)
	}
	reply := new(dns.Msg)
	if err := reply.Unpack(l.Answer(t.Context(), wire, true)); err != nil {
		t.Fatal(err)
	}
	return reply
}

// connect is a TCP flow of the guest; the guest's end is returned.
func (l *lab) connect(t testing.TB, dst netip.AddrPort) net.Conn {
	t.Helper()
	guest, ours := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.ServeTCP(context.Background(), ours, dst)
	}()
	t.Cleanup(func() {
		_ = guest.Close()
		<-done
	})
	_ = guest.SetDeadline(time.Now().Add(patience))
	return guest
}

// hello answers whatever comes first, so that a guest sees that it got out.
func hello(c net.Conn) {
	var b [1]byte
	if _, err := io.ReadFull(c, b[:]); err == nil {
		_, _ = io.WriteString(c, "hello\n")
		_, _ = io.Copy(io.Discard, c)
	}
}

// talk sends the first bytes of a kind and reports whether the answer came.
func talk(t testing.TB, c net.Conn, say, name string) bool {
	t.Helper()
	switch say {
	case "tls":
		say = clientHello(t, name)
	case "http":
		say = "GET / HTTP/1.1\r\nHost: " + name + "\r\n\r\n"
	}
	sent := make(chan struct{})
	go func() { // a pipe blocks a write until it is read
		defer close(sent)
		_, _ = io.WriteString(c, say)
	}()
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		_ = c.Close()
	}
	<-sent
	return line == "hello\n"
}

// clientHello is what a real TLS client says first.
func clientHello(t testing.TB, name string) string {
	t.Helper()
	near, far := net.Pipe()
	defer func() { _ = far.Close() }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = tls.Client(near, &tls.Config{ServerName: name, MinVersion: tls.VersionTLS12}).Handshake()
		_ = near.Close()
	}()
	head := make([]byte, 5)
	if _, err := io.ReadFull(far, head); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, int(head[3])<<8|int(head[4]))
	if _, err := io.ReadFull(far, body); err != nil {
		t.Fatal(err)
	}
	_ = far.Close()
	<-done
	return string(head) + string(body)
}

func TestDialledAddressesAreChecked(t *testing.T) {
	t.Parallel()
	network := allow("site.test", "*.wild.test", "git.test:22", "odd.test:8443", "192.31.197.0/24")
	network.Deny = []agentlab.NetworkRule{{Rule: "bad.wild.test"}}
	cases := []struct {
		name string // what is resolved and dialled
		port uint16
		say  string // "tls", "http" or the bytes themselves
		with string // the name that is shown
		rule string // of a refusal; "" when it gets out
	}{
		{"site.test", 443, "tls", "site.test", ""},
		{"site.test", 443, "tls", "SITE.Test", ""},
		{"site.test", 443, "tls", "other.test", egress.RuleNameMismatch},
		{"site.test", 443, "tls", "a.wild.test", egress.RuleNameMismatch}, // allowed, but not what was resolved
		{"site.test", 443, "tls", "192.31.196.1", egress.RuleNameMissing}, // an address is no name
		{"site.test", 80, "http", "site.test", ""},
		{"site.test", 80, "http", "site.test:80", ""},
		{"site.test", 80, "http", "other.test", egress.RuleNameMismatch},
		{"site.test", 80, "\x00\x01 binary", "", egress.RuleNameMissing},
		{"site.test", 443, "GET / HTTP/1.1\r\nHost: site.test\r\nHost: other.test\r\n\r\n", "", egress.RuleNameMismatch},
		{"site.test", 8443, "x", "", egress.RuleAllowlist},
		{"a.wild.test", 443, "tls", "a.wild.test", ""},
		{"a.wild.test", 443, "tls", "bad.wild.test", "deny:bad.wild.test"},
		{"git.test", 22, "SSH-2.0-x\r\n", "", ""},
		{"odd.test", 8443, "anything", "", ""},
	}
	for _, c := range cases {
		t.Run(c.name+"/"+c.say[:min(len(c.say), 4)]+"/"+c.with, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, network)
			dst := l.net.HandleTCP(c.name, c.port, hello)
			if r := l.resolve(t, c.name, dns.TypeA); len(r.Answer) == 0 {
				t.Fatalf("%s: %v", c.name, r)
			}
			if out := talk(t, l.connect(t, dst), c.say, c.with); out != (c.rule == "") {
				t.Errorf("it got out: %v", out)
			}
			r := l.record(t, "the flow", func(r agentlab.EgressRecord) bool { return r.Proto == "tcp" })
			if r.Allow != (c.rule == "") || c.rule != "" && r.Rule != c.rule {
				t.Errorf("recorded as %+v, want rule %s", r, c.rule)
			}
			dialled := slices.ContainsFunc(l.net.Dials(), func(d string) bool { return strings.HasPrefix(d, "tcp") })
			if dialled != (c.rule == "") {
				t.Errorf("dialled: %v", l.net.Dials())
			}
		})
	}
}

func TestAddressIsAllowedOnlyByOurDNSAnswer(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow("site.test"))
	dst := l.net.HandleTCP("site.test", 443, hello)
	if talk(t, l.connect(t, dst), "tls", "site.test") {
		t.Error("it got out by an address that was not resolved")
	}
	r := l.record(t, "the flow", func(r agentlab.EgressRecord) bool { return r.Proto == "tcp" })
	if r.Rule != egress.RuleAllowlist || r.Allow {
		t.Errorf("recorded as %+v", r)
	}
	if m := l.resolve(t, "other.test", dns.TypeA); m.Rcode != dns.RcodeNameError {
		t.Errorf("a name that nothing allows: %v", m)
	}
	if dials := l.net.Dials(); len(dials) != 0 {
		t.Errorf("dialled: %v", dials)
	}
}

// After its time a name is resolved again, and what it means then is dialled.
func TestStaleNamesAreResolvedAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow("site.test", "git.test:22"))
	oldSite, oldGit := l.net.HandleTCP("site.test", 443, hello), l.net.HandleTCP("git.test", 22, hello)
	l.resolve(t, "site.test", dns.TypeA)
	l.resolve(t, "git.test", dns.TypeA)
	newSite := l.net.HandleTCP("moved.test", 443, hello)
	l.pass(2 * time.Minute)
	l.net.SetName("site.test", newSite.Addr())
	if !talk(t, l.connect(t, oldSite), "tls", "site.test") {
		t.Error("a name that moved is not followed")
	}
	if dials := l.net.Dials(); !slices.Contains(dials, "tcp "+newSite.String()) || slices.Contains(dials, "tcp "+oldSite.String()) {
		t.Errorf("dialled: %v", dials)
	}
	if !talk(t, l.connect(t, oldGit), "SSH-2.0-x\r\n", "") {
		t.Error("a name that still means the address is refused")
	}
	l.pass(2 * time.Minute)
	l.net.SetName("git.test", newSite.Addr())
	if talk(t, l.connect(t, oldGit), "SSH-2.0-x\r\n", "") {
		t.Error("an address that the name has left is dialled")
	}
	// A name whose new address is denied to everybody is denied.
	l.pass(2 * time.Minute)
	l.net.SetName("site.test", netip.MustParseAddr("10.1.2.3"))
	if talk(t, l.connect(t, oldSite), "tls", "site.test") {
		t.Error("a rebound name gets out")
	}
	for _, d := range l.net.Dials() {
		if strings.Contains(d, "10.1.2.3") {
			t.Errorf("dialled: %s", d)
		}
	}
	l.pass(24 * time.Hour) // and after a day nothing is left of it
	if _, err := l.BeginTCP(t.Context(), oldSite); !gate.IsDenied(err) {
		t.Errorf("after a day: %v", err)
	}
}

func TestPolicyChangesCutWhatTheyForbid(t *testing.T) {
	t.Parallel()
	l := newLab(t, agentlab.Network{Mode: agentlab.NetworkNAT})
	stays, goes := l.net.HandleTCP("stays.test", 443, hello), l.net.HandleTCP("goes.test", 443, hello)
	l.resolve(t, "stays.test", dns.TypeA)
	l.resolve(t, "goes.test", dns.TypeA)
	a, b := l.connect(t, stays), l.connect(t, goes)
	for _, c := range []net.Conn{a, b} {
		if !talk(t, c, "x", "") {
			t.Fatal("it does not get out")
		}
	}
	l.SetPolicy(policy(t, allow(stays.Addr().String())))
	if n := l.Flows(egress.TCP); n != 1 {
		t.Errorf("%d flows are left", n)
	}
	if _, err := b.Read(make([]byte, 1)); err == nil {
		t.Error("a flow that the new policy forbids goes on")
	}
	if _, err := a.Write([]byte("y")); err != nil {
		t.Errorf("a flow that the new policy allows was cut: %v", err)
	}
	if _, err := l.Begin(egress.UDP, goes); !gate.IsDenied(err) {
		t.Errorf("the old policy decides: %v", err)
	}
	l.SetPolicy(policy(t, agentlab.Network{Mode: agentlab.NetworkOff}))
	if n := l.Flows(egress.TCP); n != 0 {
		t.Errorf("%d flows are left in mode off", n)
	}
}

// A flow that is still to show its name shows it to the policy of that moment.
func TestAPolicyChangesBeforeTheNameIsShown(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow("site.test"))
	dst := l.net.HandleTCP("site.test", 443, hello)
	l.resolve(t, "site.test", dns.TypeA)
	c := l.connect(t, dst)
	if _, err := c.Write([]byte{0x16}); err != nil { // the flow waits for the rest
		t.Fatal(err)
	}
	l.SetPolicy(policy(t, allow("other.test")))
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("it goes on")
	}
	if slices.ContainsFunc(l.net.Dials(), func(d string) bool { return strings.HasPrefix(d, "tcp") }) {
		t.Errorf("dialled: %v", l.net.Dials())
	}
}

// hookedDialer is a dialer that a test sees at work.
type hookedDialer struct {
	gate.Dialer
	before func(network, addr string)
}

func (d hookedDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	d.before(network, addr)
	return d.Dialer.DialContext(ctx, network, addr)
}

// A name that is resolved again may have many addresses. Each is judged by the
// policy of the moment at which it is dialled.
func TestAPolicyChangesWhileAddressesAreTried(t *testing.T) {
	t.Parallel()
	var l *lab
	var dead, forbidden netip.AddrPort
	l = newLab(t, allow("site.test"), func(c *gate.Config) {
		c.Dialer = hookedDialer{c.Dialer, func(_, addr string) {
			if addr == dead.String() {
				n := allow("site.test")
				n.Deny = []agentlab.NetworkRule{{Rule: forbidden.Addr().String()}}
				l.SetPolicy(policy(t, n))
			}
		}}
	})
	old := l.net.HandleTCP("site.test", 443, hello)
	forbidden = l.net.HandleTCP("forbidden.test", 443, hello)
	dead = netip.AddrPortFrom(l.net.Host("dead.test"), 443)
	l.resolve(t, "site.test", dns.TypeA)
	l.pass(2 * time.Minute)
	l.net.SetName("site.test", dead.Addr(), forbidden.Addr())
	if talk(t, l.connect(t, old), "tls", "site.test") {
		t.Error("it got out")
	}
	if dials := l.net.Dials(); !slices.Contains(dials, "tcp "+dead.String()) || slices.Contains(dials, "tcp "+forbidden.String()) {
		t.Errorf("dialled: %v", dials)
	}
	l.record(t, "the refusal", func(r agentlab.EgressRecord) bool {
		return !r.Allow && r.Rule == "deny:"+forbidden.Addr().String()
	})
}

func TestFlowLimits(t *testing.T) {
	t.Parallel()
	n := agentlab.Network{Mode: agentlab.NetworkNAT, Limits: agentlab.NetworkLimits{Flows: 2}}
	l := newLab(t, n)
	dst := netip.MustParseAddrPort("192.31.196.9:1")
	for _, proto := range []egress.Proto{egress.TCP, egress.UDP} {
		a, errA := l.Begin(proto, dst)
		b, errB := l.Begin(proto, dst)
		_, errC := l.Begin(proto, dst)
		if errA != nil || errB != nil || !gate.IsDenied(errC) {
			t.Errorf("%s: %v, %v, %v", proto, errA, errB, errC)
		}
		a.End()
		a.End() // again
		c, err := l.Begin(proto, dst)
		if err != nil {
			t.Errorf("%s: after one ended: %v", proto, err)
			continue
		}
		c.End()
		b.End()
	}
	r := l.record(t, "the limit", func(r agentlab.EgressRecord) bool { return r.Rule == egress.RuleLimit })
	if r.Allow {
		t.Errorf("recorded as %+v", r)
	}
	l.Close()
	if _, err := l.Begin(egress.TCP, dst); err == nil {
		t.Error("a closed gate opens")
	}
}

func TestAnswersHaveOnlyRequestedRecords(t *testing.T) {
	t.Parallel()
	answer := func(q *dns.Msg) (*dns.Msg, error) {
		m := new(dns.Msg).SetReply(q)
		for _, rr := range []string{
			"site.test. 99999 IN CNAME cdn.test.", "cdn.test. 5 IN CNAME edge.test.", "edge.test. 99999 IN A 192.31.196.5",
			"edge.test. 5 IN A 10.0.0.1", "stranger.test. 5 IN A 192.31.196.6", "edge.test. 5 IN AAAA 2620:4f:8000::5",
			"loop.test. 5 IN CNAME loop.test.",
		} {
			r, err := dns.NewRR(rr)
			if err != nil {
				return nil, err
			}
			m.Answer = append(m.Answer, r)
		}
		ns, _ := dns.NewRR("test. 5 IN NS ns.test.")
		glue, _ := dns.NewRR("ns.test. 5 IN A 192.31.196.7")
		m.Ns, m.Extra = []dns.RR{ns}, []dns.RR{glue}
		return m, nil
	}
	var learned []string
	l := newLab(t, allow("site.test"), func(c *gate.Config) {
		c.Resolver = resolverFunc(answer)
		c.NoIPv6 = true
		c.Learned = func(name string, addrs []netip.Addr, ttl time.Duration) {
			for _, a := range addrs {
				learned = append(learned, name+" "+a.String()+" "+ttl.String())
			}
		}
	})
	reply := l.resolve(t, "site.test", dns.TypeA)
	var got []string
	for _, rr := range slices.Concat(reply.Answer, reply.Ns, reply.Extra) {
		got = append(got, strings.ReplaceAll(rr.String(), "\t", " "))
	}
	want := []string{
		"site.test. 3600 IN CNAME cdn.test.", "cdn.test. 5 IN CNAME edge.test.", "edge.test. 3600 IN A 192.31.196.5",
		"loop.test. 5 IN CNAME loop.test.",
	}
	if !slices.Equal(got, want) {
		t.Errorf("answered %q, want %q", got, want)
	}
	if len(learned) != 1 || learned[0] != "site.test. 192.31.196.5 1h0m0s" {
		t.Errorf("learned %q", learned)
	}
	r := l.record(t, "the private address", func(r agentlab.EgressRecord) bool { return r.Rule == egress.RuleRebinding })
	if r.Addr != "10.0.0.1" || r.Name != "site.test" || r.Allow {
		t.Errorf("recorded as %+v", r)
	}
}

type resolverFunc func(*dns.Msg) (*dns.Msg, error)

func (f resolverFunc) Exchange(_ context.Context, q *dns.Msg) (*dns.Msg, error) { return f(q) }
