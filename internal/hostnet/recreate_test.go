//go:build linux

package hostnet

import (
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/test/netlab"
)

// A bridge that was removed and created again is served like the previous one.
func TestBridgeIsRecreated(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	ctx := t.Context()
	l := w.restored()
	must(t, l.Ready(ctx))
	a := w.box(2, all).static()
	w.greeter(l, a, "alpha")
	must(t, l.Put(ctx, a.Guest))
	if got := a.greeting(8844); got != "alpha\n" {
		t.Fatalf("the guest hears %q", got)
	}
	netlab.Sh(w, "ip link del vmbr1")
	w.bridge()
	netlab.Sh(w, "ip link set %s master vmbr1", a.Port)
	for a.greetingWithin(moment, 8844) != "alpha\n" { // or the test's time is over
		continue
	}
	if err := l.Ready(ctx); err != nil {
		t.Error(err)
	}
	if !a.reaches(site) {
		t.Error("a guest on the new bridge reaches nothing")
	}
}

// A number that is another sandbox's now: nothing of the one before is its.
func TestVMIDReused(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	ctx := t.Context()
	l := w.restored()
	must(t, l.Ready(ctx))
	a := w.box(2, all).static()
	must(t, l.Put(ctx, a.Guest))
	conn, err := a.dial(site)
	must(t, err)
	defer conn.Close()
	flows := func() (n int) {
		list, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		must(t, err)
		for _, f := range list {
			if f.Forward.SrcIP.Equal(a.IPv4.AsSlice()) {
				n++
			}
		}
		return n
	}
	must(t, l.Put(ctx, a.Guest))
	if flows() == 0 {
		t.Error("putting a guest again cut its flows")
	}
	// The guest is gone when its number is used again. A packet of a live one would open a
	// flow anew, as the other guest's.
	a.sh("ip link set eth0 down")
	other := a.Guest
	other.ID.UID = "another"
	must(t, l.Put(ctx, other))
	if n := flows(); n > 0 {
		t.Errorf("another guest has %d flows of the one that had its number", n)
	}
}
