//go:build linux

package nft

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
)

func (p *peer) hold(id, target string) bool {
	p.t.Helper()
	var res []guestapi.ProbeResult
	p.ask("hold", &res, guestapi.Probe{ID: id, Target: target})
	return res[0].Connected
}

func (p *peer) poke(id string) bool {
	p.t.Helper()
	return p.pokeWithin(id, 2000)
}

// mustPoke is poke for a connection that is to go on.
func (p *peer) mustPoke(id string) bool {
	p.t.Helper()
	return p.pokeWithin(id, 10_000)
}

func (p *peer) pokeWithin(id string, millis int) bool {
	p.t.Helper()
	var res []guestapi.ProbeResult
	p.ask("poke", &res, guestapi.Probe{ID: id, TimeoutMS: millis})
	return res[0].Reached
}

// TestPolicyChangeCutsFlows: open flows that the new policy forbids end, those
// that it allows go on, through the kernel and through the proxy.
func TestPolicyChangeCutsFlows(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{})
	allow := func(texts ...string) agentlab.Network {
		n := agentlab.Network{Mode: agentlab.NetworkAllowlist}
		for _, x := range texts {
			n.Allow = append(n.Allow, agentlab.NetworkRule{Rule: x})
		}
		return n
	}
	set := func(n agentlab.Network) {
		t.Helper()
		s := testSandbox(2, testPolicy(t, n))
		s.Port = taps[0]
		if err := m.Set(context.Background(), s); err != nil {
			t.Fatal(err)
		}
	}
	g := w.guests[0]
	set(allow("192.31.196.20:8080", "192.31.196.21:8080", "port.probe.example.com:2222", "[2620:4f:8000::28]:8080"))
	if !g.mustReach("tcp", "port.probe.example.com:2222") {
		t.Fatal("an address that was told for an allowed name is not reached")
	}
	for id, target := range map[string]string{"goes": "192.31.196.20:8080", "stays": "192.31.196.21:8080", "named": "192.31.196.15:2222", "six": "[2620:4f:8000::28]:8080"} {
		if !g.hold(id, target) {
			t.Fatalf("%s is not reached", target)
		}
	}
	set(allow("192.31.196.21:8080", "port.probe.example.com:2222"))
	for _, id := range []string{"goes", "six"} {
		if g.poke(id) {
			t.Errorf("flow %s goes on, although the policy forbids it", id)
		}
	}
	for _, id := range []string{"stays", "named"} {
		if !g.mustPoke(id) {
			t.Errorf("flow %s was cut, although the policy allows it", id)
		}
	}
	if g.reaches("tcp", "192.31.196.20:8080") {
		t.Error("a new flow is allowed by the old policy")
	}

	// The same policy again, and all rules again, cut nothing.
	if !g.hold("same", "192.31.196.21:8080") {
		t.Fatal("not reached")
	}
	set(allow("192.31.196.21:8080", "port.probe.example.com:2222"))
	if err := m.Apply(context.Background()); err != nil {
		t.Fatal(err)
	}
	if !g.mustPoke("same") {
		t.Error("loading the same policy again cut its flows")
	}
	if !g.hold("off", "192.31.196.21:8080") {
		t.Fatal("not reached")
	}
	if err := m.Forget(context.Background(), 1002); err != nil {
		t.Fatal(err)
	}
	if g.poke("off") || g.reaches("tcp", "192.31.196.21:8080") || g.reaches("dns", "port.probe.example.com") {
		t.Error("a sandbox that was forgotten still has a network")
	}
	if st, err := m.Status(context.Background()); err != nil || len(st.Drift) > 0 {
		t.Errorf("after all changes: %+v, %v", st, err)
	}
}

// TestServingEndsClosed: without DNS server and proxy, what needs them is
// refused and what does not goes on.
func TestServingEndsClosed(t *testing.T) {
	w := newWorld(t)
	m, err := New(context.Background(), Options{Config: testConfig(), Resolver: testResolver{}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Apply(context.Background()); err != nil {
		t.Fatal(err)
	}
	s := w.tenants(m, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("site.probe.example.com", "192.31.196.20:8080")})
	addr := probetest.ReferenceTargets().SiteAddr
	if err := m.learn(s[0].VMID, m.members[s[0].VMID].gate, "site.probe.example.com.", []netip.Addr{addr}, 1<<40); err != nil {
		t.Fatal(err)
	}
	g := w.guests[0]
	if g.reaches("tls", fmt.Sprintf("%s:443", addr)) || g.reaches("tcp", fmt.Sprintf("%s:80", addr)) {
		t.Error("a flow that requires a name passed without a process to read the name")
	}
	if g.reaches("dns", "site.probe.example.com") {
		t.Error("DNS was answered")
	}
	if !g.mustReach("tcp", "192.31.196.20:8080") {
		t.Error("an address rule without a serving process was not reachable")
	}
}

// TestRulesAreRestored: what others remove or change is seen and put back.
func TestRulesAreRestored(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()
	m, err := New(ctx, Options{Config: testConfig(), Resolver: testResolver{}}) // who runs puts them back before the test looks
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Apply(ctx); err != nil {
		t.Fatal(err)
	}
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	drift := func() string {
		t.Helper()
		st, err := m.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(st.Drift, "; ")
	}
	if d := drift(); d != "" {
		t.Fatalf("as loaded: %s", d)
	}
	for _, c := range []struct{ do, want string }{
		{"flush chain inet agentlab inbound", "inet chain inbound is changed"},
		{"delete element inet agentlab always4 { 10.0.0.0/8 }", "inet map always4 is changed"},
		{"add chain inet agentlab mine", "inet chain mine is not AgentLab's"},
		{"add rule bridge agentlab forward counter", "bridge chain forward is changed"},
	} {
		if out, err := exec.Command("nft", c.do).CombinedOutput(); err != nil {
			t.Fatalf("%s: %s", c.do, out)
		}
		if d := drift(); !strings.Contains(d, c.want) {
			t.Errorf("after %q: %q", c.do, d)
		}
		if err := m.reconcile(ctx, true); err != nil {
			t.Fatal(err)
		}
		if d := drift(); d != "" {
			t.Errorf("after it was put right: %s", d)
		}
	}
	if out, err := exec.Command("nft", "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatalf("%s", out)
	}
	if err := m.reconcile(ctx, false); err != nil {
		t.Fatal(err)
	}
	if d := drift(); d != "" || !w.guests[0].mustReach("tcp", "192.31.196.20:8080") {
		t.Errorf("after a flush: %s", d)
	}
	if err := m.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if left, err := m.kernel.tables(); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if w.guests[0].reaches("tcp", "192.31.196.20:8080") {
		t.Error("a sandbox has a network without rules")
	}
}

// TestNoUplinkNamed: where no uplink is named, the tailnet is
// still not one.
func TestNoUplinkNamed(t *testing.T) {
	w := newWorld(t)
	w.sh("ip route add 185.20.20.0/24 via 100.101.102.103")
	c := testConfig()
	c.Uplink = ""
	m := w.manager(Options{Config: c})
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	if !w.guests[0].mustReach("tcp", "192.31.196.20:8080") {
		t.Error("the internet is not reached")
	}
	if w.guests[0].reaches("tcp", "185.20.20.20:8080") {
		t.Error("the way into the tailnet is open")
	}
	m.tamper = without(ruleTailnetIf)
	if err := m.Apply(context.Background()); err != nil {
		t.Fatal(err)
	}
	if !w.guests[0].mustReach("tcp", "185.20.20.20:8080") {
		t.Error("without its rule the way into the tailnet is closed too: this test shows nothing")
	}
}

// TestLearnedEnds: an address is open for as long as its answer says.
func TestLearnedEnds(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{})
	s := w.tenants(m, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("port.probe.example.com:2222")})
	addr := "192.31.196.15"
	if w.guests[0].reaches("tcp", addr+":2222") {
		t.Fatal("an address is open before it was told")
	}
	l := Learned{Sandbox: s[0], Addr: mustAddr(addr), Names: []string{"port.probe.example.com."}, TTL: 1}
	var text strings.Builder
	list, _ := l.elements(planOf(s[0]))
	for _, e := range list {
		e.write(&text, "add")
	}
	if !strings.Contains(text.String(), "timeout 1s") {
		t.Fatalf("no time to live in %s", text.String())
	}
	if err := m.kernel.load(context.Background(), text.String()); err != nil {
		t.Fatal(err)
	}
	if !w.guests[0].mustReach("tcp", addr+":2222") {
		t.Error("an address is not open after it was told")
	}
	for w.guests[0].reaches("tcp", addr+":2222") { // ends with the element, or with the test's time
		continue
	}
}
