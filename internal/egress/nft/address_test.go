package nft

import (
	"bytes"
	"net"
	"os/exec"
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
	kept := func(after string) {
		t.Helper()
		if err := m.reconcile(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		l, err := net.InterfaceByName("vmbr1")
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(l.HardwareAddr, bridgeMAC) {
			t.Errorf("%s: the bridge has the address %s", after, l.HardwareAddr)
		}
	}
	kept("rules were applied")
	for _, id := range []string{"first", "second"} {
		if !w.guests[0].hold(id, "192.31.196.20:8080") {
			t.Fatal("the internet is not reached")
		}
	}
	w.sh("ip link del tap109i0")
	kept("the lowest port was removed")
	if !w.guests[0].mustPoke("first") {
		t.Error("after the lowest port was removed, a flow does not go on")
	}
	plug()
	kept("the lowest port was plugged in")
	if !w.guests[0].mustPoke("second") {
		t.Error("after the lowest port was plugged in, a flow does not go on")
	}
	w.sh("ip link set vmbr1 address 02:00:00:00:00:02")
	kept("another program changed it")
}
