//go:build linux

package nft

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/agentlab-vm/agentlab"
)

// TestFlowsOfAnOpenHourEnd: another program flushed the rules, and until they
// were restored, a sandbox opened any connection. Once the rules are in force
// again, denied connections end, and allowed ones continue.
func TestFlowsOfAnOpenHourEnd(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()
	m, err := New(ctx, Options{Config: testConfig(), Resolver: testResolver{}}) // not run: the process died
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Apply(ctx); err != nil {
		t.Fatal(err)
	}
	s := w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	l, err := net.Listen("tcp", "192.168.1.2:2222")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c) }()
		}
	}()
	w.lan.sh("ip route replace 10.77.0.0/16 via 192.168.1.2")
	a := w.guests[0]
	if !a.hold("kept", "192.31.196.20:8080") {
		t.Fatal("not reached")
	}
	// As on a node, another program also makes the kernel track
	// connections.
	const flush = "flush ruleset; table inet other { chain c { type filter hook prerouting priority 0; ct state established accept; }; }"
	if out, err := exec.Command("nft", flush).CombinedOutput(); err != nil {
		t.Fatalf("%s", out)
	}
	if !a.hold("lan", "192.168.1.50:8080") || !a.hold("host", "192.168.1.2:2222") ||
		!a.hold("lan now", "192.168.1.50:8080") || !a.hold("host now", "192.168.1.2:2222") || !a.mustPoke("lan now") || !a.mustPoke("host now") {
		t.Fatal("without rules everything is open")
	}
	if err := m.Restore(ctx, s[:]); err != nil {
		t.Fatal(err)
	}
	if a.poke("lan") {
		t.Error("a flow to the LAN goes on")
	}
	if a.poke("host") {
		t.Error("a flow to the host goes on")
	}
	if !a.mustReach("tcp", "192.31.196.20:8080") {
		t.Error("the internet is not reached")
	}
	if !a.mustPoke("kept") {
		t.Error("a flow that was allowed ended")
	}
}

// TestNeighboursOfOneSandboxAreBounded: one sandbox does not fill the table
// of neighbours, which all interfaces of the host share.
func TestNeighboursOfOneSandboxAreBounded(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{})
	s := w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	for i := range 400 {
		src := netip.AddrFrom16([16]byte{0xfe, 0x80, 14: byte(i >> 8), 15: byte(i)})
		p := neighbourSolicitation(src, mustAddr("fd77:a91a:4d00::1"), 255)
		w.guests[0].raw(ethernet(s[0].MAC, 0x86dd, p))
	}
	list, err := netlink.NeighList(0, netlink.FAMILY_V6)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, x := range list {
		if x.IP.IsLinkLocalUnicast() {
			n++
		}
	}
	if n > 200 || n == 0 {
		t.Errorf("the host knows %d neighbours by a sandbox's word", n)
	}
}
