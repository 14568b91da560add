//go:build linux

package nft

import (
	"context"
	"net/netip"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// TestOwnerDoesNotWait checks that the owner of an address is known while the
// kernel is updated, and follows each change.
func TestOwnerDoesNotWait(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{})
	ctx := context.Background()
	s := w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	check := func(when string, want ...bool) {
		t.Helper()
		m.mu.Lock() // as in a transaction
		defer m.mu.Unlock()
		for i, x := range s {
			for _, a := range []netip.Addr{x.IPv4, x.IPv6, netip.AddrFrom16(x.IPv4.As16())} {
				if vmid, ok := m.Owner(a); ok != want[i] || ok && vmid != x.VMID {
					t.Errorf("%s: %s is of %d, %v", when, a, vmid, ok)
				}
			}
		}
		if _, ok := m.Owner(netip.Addr{}); ok {
			t.Error("an unassigned address has an owner")
		}
	}
	check("let in", true, true)
	if err := m.Forget(ctx, s[0].VMID); err != nil {
		t.Fatal(err)
	}
	check("forgotten", false, true)
	if err := m.Restore(ctx, s[:1]); err != nil {
		t.Fatal(err)
	}
	check("restored", true, false)
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if err := m.Restore(gone, s[1:]); err == nil {
		t.Fatal("restored without the kernel")
	}
	check("not restored", true, false)
}
