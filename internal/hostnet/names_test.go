//go:build linux

package hostnet

import (
	"crypto/tls"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

// resolve asks our DNS server from the box.
func (b *box) resolve(name string) (out []netip.Addr) {
	b.w.Helper()
	q := new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA)
	b.in(func() {
		var answer *dns.Msg
		var err error
		for end := time.Now().Add(longEnough); time.Now().Before(end); { // a datagram can be lost
			if answer, _, err = (&dns.Client{Timeout: 5 * time.Second}).Exchange(q, "10.77.0.1:53"); err == nil {
				break
			}
		}
		if err != nil {
			b.w.Errorf("%s: %v", name, err)
			return
		}
		for _, rr := range answer.Answer {
			if a, ok := rr.(*dns.A); ok {
				addr, _ := netip.AddrFromSlice(a.A.To4())
				out = append(out, addr)
			}
		}
	})
	return out
}

// shakes reports whether a server at the address proves that it has a name.
func (b *box) shakes(addr netip.Addr, name string) bool {
	b.w.Helper()
	conn, err := b.dial(netip.AddrPortFrom(addr, 443).String())
	if err != nil {
		return false
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(longEnough))
	return tls.Client(conn, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake() == nil
}

// A guest remembers the answers to its DNS questions, so we do, too: a process
// that comes after ours lets it use them until they are over.
func TestNamesSurviveRestart(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	w.bridge()
	netlab.Resolver(t, netip.MustParseAddr("192.31.196.200"))
	ctx := t.Context()
	l := w.local()
	must(t, l.Restore(ctx, nil))
	must(t, l.Ready(ctx))
	b := w.box(2, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{
		{Rule: "port.probe.example.com:2222"}, {Rule: "site.probe.example.com"},
	}}).static()
	must(t, l.Put(ctx, b.Guest))
	const port = "192.31.196.15:2222"
	if !b.shut(port) {
		t.Fatal("an address is open before its name was asked for")
	}
	site := b.resolve("site.probe.example.com")
	if got := b.resolve("port.probe.example.com"); len(got) == 0 || len(site) == 0 {
		t.Fatalf("no answers: %v, %v", got, site)
	}
	if !b.reaches(port) || !b.shakes(site[0], "site.probe.example.com") {
		t.Fatal("what was asked for is not reached")
	}
	must(t, l.Close())

	l = w.local()
	must(t, l.Restore(ctx, []Guest{b.Guest}))
	must(t, l.Ready(ctx))
	if !b.reaches(port) {
		t.Error("an address that the guest remembers is shut")
	}
	if !b.shakes(site[0], "site.probe.example.com") {
		t.Error("a name that the guest remembers is not believed")
	}
	if b.shakes(site[0], "other.probe.example.com") {
		t.Error("the address is open for any name")
	}
	must(t, l.Close())

	// A journal that was truncated, or written by another program, is
	// ignored.
	path := l.namesPath(b.ID)
	text := `{"name":"port.probe.example.com.","addr":"10.0.0.1","until":"2999-01-01T00:00:00Z"}` + "\n" + `{"name":"port.probe`
	must(t, os.WriteFile(path, []byte(text), 0o600))
	l = w.local()
	must(t, l.Restore(ctx, []Guest{b.Guest}))
	must(t, l.Ready(ctx))
	if !b.shut(port) || !b.shut("10.0.0.1:2222") {
		t.Error("an address is open that no answer contained")
	}
}
