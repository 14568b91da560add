package store

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"

	"github.com/agentlab-vm/agentlab"
)

// nextVMID takes the next free number and stores it, so that a number is not
// reused soon after its row was deleted.
func nextVMID(w *tx, a agentlab.Allocation) (int, error) {
	if a.First < 1 || a.Last < a.First || a.Last > math.MaxInt32 {
		return 0, invalid("vmid_range", "%d to %d is not a VMID range", a.First, a.Last)
	}
	taken := map[int64]bool{}
	for _, n := range a.Taken {
		taken[int64(n)] = true
	}
	n, err := next(w, "vmid", "vmid", int64(a.First), int64(a.Last), taken)
	if err == nil && n == 0 {
		err = agentlab.Errorf(agentlab.CodeLimit, "all VMIDs from %d to %d are in use", a.First, a.Last).
			WithHint("increase vmid_range in config.yaml; VMIDs of destroyed sandboxes are reused after retention.jobs_days")
	}
	return int(n), err
}

// nextAddress leases the next free IPv4 address of a network, and the IPv6
// address that ends in it. Both are zero if a has no network.
func nextAddress(w *tx, a agentlab.Allocation) (ip4, ip6 netip.Addr, err error) {
	if !a.IPv4.IsValid() {
		return ip4, ip6, nil
	}
	if !a.IPv4.Addr().Is4() || a.IPv4.Bits() > 30 || a.IPv4.Masked() != a.IPv4 {
		return ip4, ip6, invalid("subnet", "%s is not an IPv4 network of at least four addresses", a.IPv4)
	}
	if a.IPv6.IsValid() && (!a.IPv6.Addr().Is6() || a.IPv6.Bits() > 96 || a.IPv6.Masked() != a.IPv6) {
		return ip4, ip6, invalid("subnet6", "%s is not an IPv6 network with a prefix length of at most 96", a.IPv6)
	}
	lo := int64(number(a.IPv4.Addr())) + 1
	hi := lo + int64(1)<<(32-a.IPv4.Bits()) - 3
	taken := map[int64]bool{}
	for _, r := range a.Reserved {
		switch r = r.Unmap(); {
		case r.Is4():
			taken[int64(number(r))] = true
		case r.Is6() && a.IPv6.IsValid() && a.IPv6.Contains(r):
			// Only the sandbox whose IPv4 address has these four bytes could get
			// it.
			b := r.As16()
			taken[int64(binary.BigEndian.Uint32(b[12:]))] = true
		}
	}
	n, err := next(w, "ipv4 "+a.IPv4.String(), "ipv4", lo, hi, taken)
	switch {
	case err != nil:
		return ip4, ip6, err
	case n == 0:
		return ip4, ip6, agentlab.Errorf(agentlab.CodeLimit, "every address of %s is in use", a.IPv4).
			WithHint("destroy sandboxes (agentlab sandbox list), or set a larger host_network.subnet in config.yaml while no sandbox exists")
	}
	b := binary.BigEndian.AppendUint32(nil, uint32(n))
	ip4 = netip.AddrFrom4([4]byte(b))
	if a.IPv6.IsValid() {
		b16 := a.IPv6.Addr().As16()
		copy(b16[12:], b)
		ip6 = netip.AddrFrom16(b16)
	}
	return ip4, ip6, nil
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

// next returns the next number after the stored counter, from lo to hi, that
// no row of a sandbox has in column and that is not taken; 0 if there is none.
func next(w *tx, counter, column string, lo, hi int64, taken map[int64]bool) (int64, error) {
	var last int64
	err := w.QueryRowContext(w.ctx, "SELECT value FROM counters WHERE name = ?", counter).Scan(&last)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return 0, fault(err)
	}
	start := last + 1
	if start < lo || start > hi {
		start = lo
	}
	n, err := firstFree(w, column, start, hi, taken)
	if err == nil && n == 0 && start > lo {
		n, err = firstFree(w, column, lo, start-1, taken)
	}
	if err != nil || n == 0 {
		return 0, err
	}
	return n, w.exec("INSERT INTO counters (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", counter, n)
}

// firstFree returns the lowest number from lo to hi that no row has in column
// and that is not taken, 0 if there is none.
func firstFree(w *tx, column string, lo, hi int64, taken map[int64]bool) (int64, error) {
	query := fmt.Sprintf(`
		SELECT CASE WHEN NOT EXISTS (SELECT 1 FROM sandboxes WHERE %[1]s = ?1) THEN ?1
		ELSE (SELECT s.%[1]s + 1 FROM sandboxes s WHERE s.%[1]s BETWEEN ?1 AND ?2 - 1
			AND NOT EXISTS (SELECT 1 FROM sandboxes n WHERE n.%[1]s = s.%[1]s + 1)
			ORDER BY s.%[1]s LIMIT 1) END`, column)
	for lo <= hi {
		if taken[lo] {
			lo++
			continue
		}
		var free sql.NullInt64
		if err := w.QueryRowContext(w.ctx, query, lo, hi).Scan(&free); err != nil {
			return 0, fault(err)
		}
		if free.Int64 == 0 || !taken[free.Int64] {
			return free.Int64, nil
		}
		lo = free.Int64 + 1
	}
	return 0, nil
}

// SkipVMIDs makes the next sandbox get a number above upTo. It is for a
// database without the rows of sandboxes that had numbers up to that one.
func (s *Store) SkipVMIDs(ctx context.Context, upTo int) error {
	return s.write(ctx, func(w *tx) error {
		return w.exec("INSERT INTO counters (name, value) VALUES ('vmid', ?) ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)", upTo)
	})
}
