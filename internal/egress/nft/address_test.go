//go:build linux

package nft

import (
	"bytes"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// TestBridgeKeepsItsAddress: flows go on when the port with the lowest
// hardware address, which a bridge takes for its own, is plugged in or removed.
func TestBridgeKeepsItsAddress(t *testing.T) {
	w := newWorld(t)
	plug := func() {
		w.sh("ip link add tap109i0 type veth peer name peer109; ip link set tap109i0 address 02:00:00:00:00:01; ip link set tap109i0 master vmbr1 up")
	}
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "tap109i0").Run() })
	plug() // before the guests learn where their gateway is
	m := w.manager(Options{})
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	kept := func(after string, want net.HardwareAddr) {
		t.Helper()
		if err := m.reconcile(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		l, err := net.InterfaceByName("vmbr1")
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(l.HardwareAddr, want) {
			t.Errorf("%s: the bridge has the address %s", after, l.HardwareAddr)
		}
	}
	kept("rules were applied", bridgeMAC)
	for _, id := range []string{"first", "second"} {
		if !w.guests[0].hold(id, "192.31.196.20:8080") {
			t.Fatal("the internet is not reached")
		}
	}
	w.sh("ip link del tap109i0")
	kept("the lowest port was removed", bridgeMAC)
	if !w.guests[0].mustPoke("first") {
		t.Error("after the lowest port was removed, a flow does not go on")
	}
	plug()
	kept("the lowest port was plugged in", bridgeMAC)
	if !w.guests[0].mustPoke("second") {
		t.Error("after the lowest port was plugged in, a flow does not go on")
	}
	w.sh("ip link set vmbr1 address 02:00:00:00:00:02")
	kept("the owner set another one", net.HardwareAddr{0x02, 0, 0, 0, 0, 0x02})
}

// TestBridgeAddressIsFixed: a bridge that has the fixed address only from its
// port gets it for good, which is logged once; an address that was set stays.
func TestBridgeAddressIsFixed(t *testing.T) {
	if os.Getenv(envInner) == "" {
		t.Skip("needs a network namespace of its own and the nft program")
	}
	w := &world{t: t}
	t.Cleanup(func() { w.sh("ip link del vmbr1; ip link del vmbr2") })
	w.sh("ip link add vmbr1 type bridge; ip link add vmbr2 address 02:00:00:00:00:02 type bridge")
	w.sh("ip link add low type veth peer name high; ip link set low address %s; ip link set low master vmbr1", bridgeMAC)
	address := func() string {
		l, err := net.InterfaceByName("vmbr1")
		if err != nil {
			t.Fatal(err)
		}
		return l.HardwareAddr.String()
	}
	if got := address(); got != bridgeMAC.String() {
		t.Fatalf("the bridge has %s, not the address of its port", got)
	}
	var log bytes.Buffer
	for range 2 {
		if err := fixAddress("vmbr1", slog.New(slog.NewTextHandler(&log, nil))); err != nil {
			t.Fatal(err)
		}
	}
	w.sh("ip link del low")
	if got := address(); got != bridgeMAC.String() {
		t.Errorf("without its port, the bridge has %s", got)
	}
	if n := strings.Count(log.String(), "\n"); n != 1 {
		t.Errorf("%d lines were logged:\n%s", n, &log)
	}
	if err := fixAddress("vmbr2", slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	if l, err := net.InterfaceByName("vmbr2"); err != nil || l.HardwareAddr.String() != "02:00:00:00:00:02" {
		t.Errorf("%+v, %v: the address of the owner was changed", l, err)
	}
}
