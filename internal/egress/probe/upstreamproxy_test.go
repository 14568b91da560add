package probe_test

import (
	"context"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/netguest"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

// On a host whose only neighbour is a proxy, and which has no route to
// anywhere else, a guest reaches the internet through the proxy, and does not
// without it.
func TestUpstreamProxyIsTheOnlyWayOut(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	netlab.Sh(t, "ip link add vmbr0 type bridge; ip link set vmbr0 up; ip addr add 192.168.50.1/24 dev vmbr0")
	corp := netlab.NewPeer(t, "corp0", "vmbr0", "192.168.50.2/24", "192.168.50.3/24")
	netlab.Resolver(t, netip.MustParseAddr("192.168.50.2"))
	p := &fakenet.Proxy{Net: corp.Net, User: "joe", Password: "secret"}
	corp.Net.SetName("proxy.test", netip.MustParseAddr("192.168.50.2"))
	corp.Net.HandleTCP("proxy.test", 8080, p.Serve)
	corp.Net.SetName("gateway.corp", netip.MustParseAddr("192.168.50.3"))
	corp.Net.HandleHTTP("gateway.corp", 4000, fakenet.Site())
	web := corp.Net.Web("www.test")
	const resolver = "192.31.196.253"
	ca, err := fakenet.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	corp.Net.SetName(resolver, netip.MustParseAddr(resolver))
	questions := make(chan string, 100)
	if _, err := corp.Net.HandleHTTPS(resolver, 443, ca, overHTTPS(corp.Net, questions)); err != nil {
		t.Fatal(err)
	}
	credentials, authority := filepath.Join(t.TempDir(), "credentials"), filepath.Join(t.TempDir(), "ca.pem")
	for path, text := range map[string]string{credentials: "joe:secret\n", authority: string(ca.PEM())} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	upstream, err := gate.NewProxyDialer(gate.ProxyConfig{
		URL: "http://192.168.50.2:8080", CredentialsFile: credentials, CAFile: authority, DNS: "https://" + resolver + "/dns-query",
	})
	if err != nil {
		t.Fatal(err)
	}
	probes := []guestapi.Probe{
		{ID: "name", Kind: "dns", Target: "www.test", Server: vnet.DefaultGateway.String() + ":53", TimeoutMS: 10000},
		{ID: "web", Kind: "http", Target: web.String(), Name: "www.test", TimeoutMS: 10000},
		{ID: "private name", Kind: "dns", Target: "gateway.corp", Server: vnet.DefaultGateway.String() + ":53", TimeoutMS: 10000},
		{ID: "private", Kind: "http", Target: "192.168.50.3:4000", Name: "gateway.corp", TimeoutMS: 10000},
		{ID: "udp", Kind: "udp", Target: netip.AddrPortFrom(web.Addr(), 443).String()},
		{ID: "ping", Kind: "ping", Target: web.Addr().String()},
		{ID: "proxy", Kind: "tcp", Target: "192.168.50.2:8080"},
		{ID: "host", Kind: "tcp", Target: "192.168.50.1:8080"},
	}
	for _, c := range []struct {
		name string
		edit func(*vnet.Config)
		want []string // probes that reach their target
	}{
		{"without the setting", func(*vnet.Config) {}, []string{"name", "private", "private name"}},
		{"with it", func(v *vnet.Config) { v.Dialer, v.Resolver = upstream, upstream.Resolver() }, []string{"name", "private", "private name", "web"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			reached, records := tryFrom(t, c.edit, probes)
			if !slices.Equal(reached, c.want) {
				t.Errorf("reached %v, want %v: %+v", reached, c.want, records)
			}
			if !slices.Contains(c.want, "web") {
				return
			}
			for proto, rule := range map[string]string{"udp": egress.RuleProxy, "icmp": egress.RuleProxy, "tcp": egress.RulePrivate} {
				if !slices.ContainsFunc(records, func(r agentlab.EgressRecord) bool { return !r.Allow && r.Proto == proto && r.Rule == rule }) {
					t.Errorf("no refusal of %s by %s: %+v", proto, rule, records)
				}
			}
		})
	}
	close(questions)
	for name := range questions {
		if name != "www.test." {
			t.Errorf("the resolver behind the proxy was asked for %s", name)
		}
	}
	if !slices.Contains(p.Asked(), resolver+":443") {
		t.Errorf("the resolver behind the proxy was not asked: %v", p.Asked())
	}
	for _, asked := range p.Asked() {
		if asked != web.String() && asked != resolver+":443" {
			t.Errorf("the proxy was asked for %s", asked)
		}
	}
}

// tryFrom runs probes in a guest of a network, and returns which of them
// reached their targets, and the decisions.
func tryFrom(t *testing.T, edit func(*vnet.Config), probes []guestapi.Probe) (reached []string, records []agentlab.EgressRecord) {
	t.Helper()
	u := &userspace{}
	u.Guest = netguest.Start(t, netguest.Config{Address: netip.MustParsePrefix("10.77.0.2/24"), Gateway: vnet.DefaultGateway, MTU: vnet.DefaultMTU})
	private := []agentlab.PrivateTarget{{Host: "gateway.corp", Port: 443, Reason: "test"}, {Host: "192.168.50.3", Port: 4000, Reason: "test"}}
	cfg := vnet.Config{Link: u.Link, Policy: policy(t, agentlab.Network{Mode: agentlab.NetworkNAT, Private: private}), Audit: u.record}
	edit(&cfg)
	n, err := vnet.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- n.Run(context.Background()) }()
	results, err := u.Exec(t.Context(), probes)
	n.Close() // hands over all records
	<-ended
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range results {
		t.Logf("%+v", r)
		if r.Reached {
			reached = append(reached, r.ID)
		}
	}
	slices.Sort(reached)
	return reached, u.records
}

// overHTTPS answers DNS over HTTPS out of a fakenet's zone, and sends the names
// that are asked for.
func overHTTPS(internet *fakenet.Net, names chan<- string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		question := new(dns.Msg)
		if err != nil || question.Unpack(body) != nil {
			http.Error(w, "no question", http.StatusBadRequest)
			return
		}
		names <- question.Question[0].Name
		answer, err := gate.NewUpstream(internet).Exchange(r.Context(), question)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		wire, _ := answer.Pack()
		w.Header().Set("Content-Type", "application/dns-message")
		_, _ = w.Write(wire)
	})
}
