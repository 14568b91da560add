//go:build linux

package nft

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/agentlab-vm/agentlab"
)

// TestRestoreKeepsFlows: a process that takes the bridge over puts all
// sandboxes on it in one transaction. Flows go on, and who is not among them
// is off.
func TestRestoreKeepsFlows(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()
	first, err := New(ctx, Options{Config: testConfig(), Resolver: testResolver{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Apply(ctx); err != nil {
		t.Fatal(err)
	}
	s := w.tenants(first, agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("192.31.196.20:8080")})
	a, b := w.guests[0], w.guests[1]
	if !a.hold("kept", "192.31.196.20:8080") || !a.hold("again", "192.31.196.20:8080") || !a.hold("off", "192.31.196.20:8080") || !b.hold("gone", "192.31.196.20:8080") {
		t.Fatal("not reached")
	}
	first.Close() // the process died; its rules stay

	second := w.manager(Options{})
	if second.Verify(ctx) != nil {
		t.Error("a manager without sandboxes reports a state for existing ones")
	}
	if err := second.Restore(ctx, []Sandbox{s[0]}); err != nil {
		t.Fatal(err)
	}
	if !a.mustPoke("kept") || !a.mustReach("tcp", "192.31.196.20:8080") {
		t.Error("a flow did not outlive the change of process")
	}
	if b.poke("gone") || b.reaches("tcp", "192.31.196.20:8080") {
		t.Error("a sandbox that was not restored has a network")
	}
	<-second.Served()
	if err := errors.Join(second.BridgeUp(), second.Verify(ctx)); err != nil {
		t.Error(err)
	}
	// Again: nothing changes. And with the other policy, the flow is cut.
	if err := second.Restore(ctx, []Sandbox{s[0], s[1]}); err != nil {
		t.Fatal(err)
	}
	if !a.mustPoke("again") {
		t.Error("restoring again cut a flow")
	}
	if !b.mustReach("tcp", "192.31.196.20:8080") {
		t.Error("the second sandbox was not let in")
	}
	s[0].Policy = testPolicy(t, agentlab.Network{Mode: agentlab.NetworkOff})
	if err := second.Restore(ctx, s[:]); err != nil {
		t.Fatal(err)
	}
	if a.poke("off") {
		t.Error("a flow outlived the policy that allowed it")
	}
}

// TestVerifyReadsBack: what is not in the kernel is not in force, whatever
// was loaded.
func TestVerifyReadsBack(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()
	m, err := New(ctx, Options{Config: testConfig(), Resolver: testResolver{}}) // who runs puts back what is gone before the test looks
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Apply(ctx); err != nil {
		t.Fatal(err)
	}
	s := w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	if err := m.Verify(ctx); err != nil {
		t.Fatal(err)
	}
	select {
	case <-m.Served():
		t.Error("no process serves")
	default:
	}
	for _, do := range []string{
		"delete element inet agentlab bound4 { " + s[0].MAC.String() + " . " + s[0].IPv4.String() + " }",
		"delete element bridge agentlab macs { \"" + s[0].Port + "\" . " + s[0].MAC.String() + " }",
		"delete table arp agentlab",
	} {
		if out, err := exec.Command("nft", do).CombinedOutput(); err != nil {
			t.Fatalf("%s: %s", do, out)
		}
		if err := m.Verify(ctx); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Errorf("after %q: %v", do, err)
		}
		if err := m.Apply(ctx); err != nil {
			t.Fatal(err)
		}
	}
	// A port that was unplugged, as those of VMs that stop are, is no drift; one
	// that is not known is.
	w.sh("ip link add gone0 type veth peer name gone1; ip link set gone0 master vmbr1")
	if err := m.Verify(ctx); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("with a port that is not known: %v", err)
	}
	if err := m.Load(ctx); err != nil {
		t.Fatal(err)
	}
	w.sh("ip link del gone0")
	if err := m.Verify(ctx); err != nil {
		t.Errorf("after a port was unplugged: %v", err)
	}
	w.sh("ip link set vmbr1 down")
	if err := m.BridgeUp(); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("the bridge is down: %v", err)
	}
	begin := time.Now()
	const rounds = 5
	for range rounds {
		if err := m.Verify(ctx); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("one reading back takes %v", time.Since(begin)/rounds)
}

// TestDHCPAnswers: each sandbox that may ask gets the address that it is bound
// to, and nothing else that it says changes anything.
func TestDHCPAnswers(t *testing.T) {
	c := testConfig()
	c.DHCP = true
	m := &Manager{opts: Options{Config: c, Now: time.Now}, members: map[int]*member{}}
	s := testSandbox(2, testPolicy(t, agentlab.Network{Mode: agentlab.NetworkNAT}))
	s.Port, s.DHCP = taps[0], true
	x, err := m.newMember(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer x.gate.Close()
	m.members[s.VMID] = x
	ask := func(mac net.HardwareAddr, mods ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
		t.Helper()
		q, err := dhcpv4.New(append([]dhcpv4.Modifier{dhcpv4.WithHwAddr(mac)}, mods...)...)
		if err != nil {
			t.Fatal(err)
		}
		answer, to := m.answerDHCP(q.ToBytes())
		if answer != nil && to != s.IPv4 {
			t.Errorf("the answer goes to %s", to)
		}
		return answer
	}
	want := func(ip string) dhcpv4.Modifier {
		return dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.ParseIP(ip)))
	}
	if ask(net.HardwareAddr{2, 9, 9, 9, 9, 9}, dhcpv4.WithMessageType(dhcpv4.MessageTypeDiscover)) != nil {
		t.Error("an unknown sender got an answer")
	}
	offer := ask(s.MAC, dhcpv4.WithMessageType(dhcpv4.MessageTypeDiscover))
	if offer == nil || offer.MessageType() != dhcpv4.MessageTypeOffer || offer.YourIPAddr.String() != "10.77.0.2" ||
		offer.Router()[0].String() != "10.77.0.1" || offer.DNS()[0].String() != "10.77.0.1" || offer.SubnetMask().String() != "ffff0000" {
		t.Fatalf("offer: %v", offer)
	}
	if m.Lease(s.MAC).IsValid() {
		t.Error("an offer is stored as a lease")
	}
	if a := ask(s.MAC, dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), want("10.77.0.3")); a == nil || a.MessageType() != dhcpv4.MessageTypeNak {
		t.Errorf("another's address: %v", a)
	}
	if a := ask(s.MAC, dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), want("10.77.0.2"),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.ParseIP("10.77.0.99")))); a != nil {
		t.Errorf("an offer of another server: %v", a)
	}
	if a := ask(s.MAC, dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), want("10.77.0.2")); a == nil || a.MessageType() != dhcpv4.MessageTypeAck {
		t.Errorf("request: %v", a)
	}
	if m.Lease(s.MAC) != netip.MustParseAddr("10.77.0.2") {
		t.Error("the lease is not known")
	}
	for _, kind := range []dhcpv4.MessageType{dhcpv4.MessageTypeRelease, dhcpv4.MessageTypeDecline} {
		if ask(s.MAC, dhcpv4.WithMessageType(kind)) != nil {
			t.Errorf("%s got an answer", kind)
		}
	}
	if ask(s.MAC, dhcpv4.WithMessageType(dhcpv4.MessageTypeDiscover), dhcpv4.WithGatewayIP(net.ParseIP("10.77.0.9"))) != nil {
		t.Error("a relayed question got an answer")
	}
	n := 0
	for range 10 * dhcpAnswers {
		if ask(s.MAC, dhcpv4.WithMessageType(dhcpv4.MessageTypeDiscover)) != nil {
			n++
		}
	}
	if n > 2*dhcpAnswers {
		t.Errorf("%d answers in no time", n)
	}
}

// FuzzDHCP feeds the server what a guest might send.
func FuzzDHCP(f *testing.F) {
	c := testConfig()
	c.DHCP = true
	m := &Manager{opts: Options{Config: c, Now: time.Now}, members: map[int]*member{}}
	s := testSandbox(2, testPolicy(f, agentlab.Network{Mode: agentlab.NetworkNAT}))
	s.DHCP = true
	x, err := m.newMember(s, nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(x.gate.Close)
	m.members[s.VMID] = x
	for _, kind := range []dhcpv4.MessageType{dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest, dhcpv4.MessageTypeInform} {
		q, err := dhcpv4.New(dhcpv4.WithHwAddr(s.MAC), dhcpv4.WithMessageType(kind))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(q.ToBytes())
	}
	f.Fuzz(func(t *testing.T, wire []byte) {
		answer, to := m.answerDHCP(wire)
		if answer != nil && (to != s.IPv4 || len(answer.ToBytes()) > 1500) {
			t.Errorf("an answer of %d bytes to %s", len(answer.ToBytes()), to)
		}
	})
}
