package store

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
)

var lab = agentlab.Allocation{
	First: 1000, Last: 9999,
	IPv4: netip.MustParsePrefix("10.77.0.0/16"), IPv6: netip.MustParsePrefix("fd77:a91a:4d00::/64"),
	Reserved: []netip.Addr{netip.MustParseAddr("10.77.0.1"), netip.MustParseAddr("fd77:a91a:4d00::1")},
}

// end destroys a sandbox by the shortest way.
func end(t testing.TB, s *Store, vmid int) {
	t.Helper()
	sb := must(s.UpdateSandbox(context.Background(), vmid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		sb.State = agentlab.SandboxDestroyed
		return nil, nil
	}))(t)
	if sb.IPv4.IsValid() || sb.IPv6.IsValid() {
		t.Fatalf("a destroyed sandbox keeps %s and %s", sb.IPv4, sb.IPv6)
	}
}

func TestAddressesAreLeasedUntilTheEnd(t *testing.T) {
	ctx := t.Context()
	s := newStore(t).Store
	a := must(s.AllocateSandbox(ctx, newSandbox("alpha"), lab))(t)
	if a.IPv4.String() != "10.77.0.2" || a.IPv6.String() != "fd77:a91a:4d00::a4d:2" {
		t.Fatalf("the first sandbox got %s and %s", a.IPv4, a.IPv6)
	}
	if got := must(s.Sandbox(ctx, a.VMID))(t); !got.Equal(a) {
		t.Fatalf("read %+v, wrote %+v", got, a)
	}
	if _, err := s.UpdateSandbox(ctx, a.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		sb.IPv4 = sb.IPv4.Next()
		return nil, nil
	}); agentlab.CodeOf(err) != agentlab.CodeInternal {
		t.Errorf("an address was changed: %v", err)
	}
	b := must(s.AllocateSandbox(ctx, newSandbox("beta"), lab))(t)
	end(t, s, a.VMID)
	c := must(s.AllocateSandbox(ctx, newSandbox("gamma"), lab))(t)
	if b.IPv4.String() != "10.77.0.3" || c.IPv4.String() != "10.77.0.4" {
		t.Errorf("after .2 came %s, and %s though .2 was free: an address is not given again soon", b.IPv4, c.IPv4)
	}
	none := must(s.AllocateSandbox(ctx, newSandbox("delta"), agentlab.Allocation{First: 1, Last: 9}))(t)
	if none.IPv4.IsValid() || none.IPv6.IsValid() {
		t.Errorf("a sandbox of a backend without a network got %s", none.IPv4)
	}
}

func TestNumbersInUseAreSkipped(t *testing.T) {
	ctx := t.Context()
	s := newStore(t).Store
	room := agentlab.Allocation{First: 100, Last: 105, Taken: []int{100, 101, 103, 7, 100000}}
	var got []int
	for i := range 3 {
		got = append(got, must(s.AllocateSandbox(ctx, newSandbox(fmt.Sprintf("n%d", i)), room))(t).VMID)
	}
	if !slices.Equal(got, []int{102, 104, 105}) {
		t.Errorf("numbers %v", got)
	}
	if _, err := s.AllocateSandbox(ctx, newSandbox("more"), room); agentlab.CodeOf(err) != agentlab.CodeLimit {
		t.Errorf("no number is left, and the answer is %v", err)
	}
}

func TestAddressesRunOut(t *testing.T) {
	ctx := t.Context()
	s := newStore(t).Store
	room := agentlab.Allocation{First: 1, Last: 99, IPv4: netip.MustParsePrefix("10.9.8.0/29"), Reserved: []netip.Addr{netip.MustParseAddr("10.9.8.1")}}
	var first agentlab.Sandbox
	for i := range 5 { // of eight: network, broadcast and gateway are none
		sb := must(s.AllocateSandbox(ctx, newSandbox(fmt.Sprintf("n%d", i)), room))(t)
		if i == 2 {
			first = sb
		}
	}
	_, err := s.AllocateSandbox(ctx, newSandbox("more"), room)
	if agentlab.CodeOf(err) != agentlab.CodeLimit {
		t.Fatalf("no address is left, and the answer is %v", err)
	}
	end(t, s, first.VMID)
	if sb := must(s.AllocateSandbox(ctx, newSandbox("more"), room))(t); sb.IPv4 != first.IPv4 {
		t.Errorf("%s came free and %s was given", first.IPv4, sb.IPv4)
	}
}

// TestAddressesOfParallelClones is what 20 'sandbox new' at once do.
func TestAddressesOfParallelClones(t *testing.T) {
	s := newStore(t).Store
	var wg sync.WaitGroup
	out := make([]agentlab.Sandbox, 200)
	for i := range out {
		wg.Go(func() {
			sb, err := s.AllocateSandbox(context.Background(), newSandbox(fmt.Sprintf("n%d", i)), lab)
			if err != nil {
				t.Error(err)
			}
			out[i] = sb
		})
	}
	wg.Wait()
	seen := map[any]bool{}
	for _, sb := range out {
		for _, key := range []any{sb.VMID, sb.IPv4, sb.IPv6} {
			if seen[key] {
				t.Errorf("%v was given twice", key)
			}
			seen[key] = true
		}
	}
}

// TestLeasesProperty makes and ends sandboxes in any order on a network that
// is too small, and compares with a plain set.
func TestLeasesProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s, err := Open(context.Background(), t.TempDir()+"/db", Options{})
		if err != nil {
			rt.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		gw := netip.MustParseAddr("10.1.2.1")
		room := agentlab.Allocation{
			First: 1, Last: 1000, IPv4: netip.MustParsePrefix("10.1.2.0/28"), IPv6: netip.MustParsePrefix("fd00::/64"),
			Reserved: []netip.Addr{gw, netip.MustParseAddr("10.1.2.9"), netip.MustParseAddr("fd00::a01:203")},
		}
		const most = 14 - 3
		live := map[int]agentlab.Sandbox{}
		for i := range rapid.IntRange(1, 60).Draw(rt, "steps") {
			if len(live) > 0 && rapid.Bool().Draw(rt, "end") {
				vmid := rapid.SampledFrom(slices.Sorted(func(yield func(int) bool) {
					for v := range live {
						if !yield(v) {
							return
						}
					}
				})).Draw(rt, "which")
				end(t, s, vmid)
				delete(live, vmid)
				continue
			}
			sb, err := s.AllocateSandbox(context.Background(), newSandbox(fmt.Sprintf("n%d", i)), room)
			if len(live) == most {
				if agentlab.CodeOf(err) != agentlab.CodeLimit {
					rt.Fatalf("with %d leases: %v", most, err)
				}
				continue
			}
			if err != nil {
				rt.Fatal(err)
			}
			if !room.IPv4.Contains(sb.IPv4) || slices.Contains(room.Reserved, sb.IPv4) || slices.Contains(room.Reserved, sb.IPv6) ||
				sb.IPv4.As4()[3] == 0 || sb.IPv4.As4()[3] == 15 {
				rt.Fatalf("%s and %s were leased", sb.IPv4, sb.IPv6)
			}
			for _, o := range live {
				if o.IPv4 == sb.IPv4 || o.IPv6 == sb.IPv6 {
					rt.Fatalf("%s is leased twice", sb.IPv4)
				}
			}
			live[sb.VMID] = sb
		}
	})
}
