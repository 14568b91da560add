package nft

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Limits on the memory and the kernel elements that one sandbox can use by
// asking for names.
const (
	maxAnswers  = 4096 // pairs of address and name
	maxNamesPer = 64   // names of one address
	maxOpens    = 8192 // elements, or equivalent work: a full set would affect all sandboxes
)

// addAnswer stores that a name resolves to an address. Above the limits, the
// entries that expire first are evicted; addresses without a name are
// returned.
func (x *member) addAnswer(addr netip.Addr, name string, until, now time.Time) (gone []netip.Addr) {
	names := x.answers[addr]
	if names == nil {
		names = map[string]time.Time{}
		x.answers[addr] = names
	}
	if old, known := names[name]; known {
		if until.After(old) {
			names[name] = until
		}
		return nil
	}
	if len(names) >= maxNamesPer {
		delete(names, earliest(names))
		x.pairs--
	}
	names[name] = until
	if x.pairs++; x.pairs <= maxAnswers {
		return nil
	}
	gone = x.expire(now)
	return append(gone, x.evictEarliest(addr, func(netip.Addr) bool { return x.pairs > maxAnswers*3/4 })...)
}

// limitElements removes addresses if they have too many elements, and returns them;
// addr is not removed.
func (x *member) limitElements(addr netip.Addr, now time.Time) []netip.Addr {
	if x.opens <= maxOpens {
		return nil
	}
	left := x.opens
	gone := x.expire(now)
	for _, a := range gone {
		left -= x.elems[a].weight
	}
	return append(gone, x.evictEarliest(addr, func(a netip.Addr) bool {
		tooMuch := left > maxOpens*3/4
		left -= x.elems[a].weight
		return tooMuch
	})...)
}

// expire removes expired names and returns the addresses without a name.
func (x *member) expire(now time.Time) (gone []netip.Addr) {
	for a, names := range x.answers {
		maps.DeleteFunc(names, func(_ string, until time.Time) bool { return !until.After(now) })
		if len(names) == 0 {
			gone = append(gone, a)
			delete(x.answers, a)
		}
	}
	x.pairs = x.count()
	return gone
}

// evictEarliest removes addresses other than but while tooMuch returns true, those
// whose names expire first before others, and returns them.
func (x *member) evictEarliest(but netip.Addr, tooMuch func(next netip.Addr) bool) (gone []netip.Addr) {
	for _, a := range x.order() {
		if a == but {
			continue
		}
		if !tooMuch(a) {
			break
		}
		x.pairs -= len(x.answers[a])
		delete(x.answers, a)
		gone = append(gone, a)
	}
	return gone
}

// order returns all addresses, sorted by the time when their last name
// expires.
func (x *member) order() []netip.Addr {
	ends := map[netip.Addr]time.Time{}
	for a, names := range x.answers {
		for _, until := range names {
			if until.After(ends[a]) {
				ends[a] = until
			}
		}
	}
	return slices.SortedFunc(maps.Keys(ends), func(a, b netip.Addr) int {
		if c := ends[a].Compare(ends[b]); c != 0 {
			return c
		}
		return a.Compare(b)
	})
}

func (x *member) count() int {
	n := 0
	for _, names := range x.answers {
		n += len(names)
	}
	return n
}

// earliest returns the name that expires first.
func earliest(names map[string]time.Time) string {
	out := ""
	for n, until := range names {
		if out == "" || until.Before(names[out]) {
			out = n
		}
	}
	return out
}

// opened are the elements of an address and their cost.
type opened struct {
	list   []binding
	weight int
}

// open writes the commands that replace the elements of an address by those
// for its current names, and returns their cost.
func (x *member) open(w *strings.Builder, addr netip.Addr, now time.Time) int {
	x.close(w, addr)
	list, weight := x.learned(addr, now).elements(x.plan)
	for _, e := range list {
		e.write(w, "add")
	}
	x.setElements(addr, list, weight)
	return weight
}

// setElements stores the elements of an address.
func (x *member) setElements(addr netip.Addr, list []binding, weight int) {
	if weight > 0 {
		x.opens += weight - x.elems[addr].weight
		x.elems[addr] = opened{list, weight}
	}
}

// close writes the commands that remove the elements of an address. Each is
// added first, because it may have expired.
func (x *member) close(w *strings.Builder, addr netip.Addr) {
	for _, e := range x.elems[addr].list {
		e.write(w, "add")
		e.write(w, "delete")
	}
	x.opens -= x.elems[addr].weight
	delete(x.elems, addr)
}

// trim removes answers from before a change of policy that exceed the limits
// under the new one, beginning with the addresses whose names expire first.
func (x *member) trim(now time.Time) {
	x.expire(now)
	sum, order := 0, x.order()
	for _, a := range slices.Backward(order) {
		if sum <= maxOpens*3/4 {
			_, weight := x.learned(a, now).elements(x.plan)
			sum += weight
			continue
		}
		x.pairs -= len(x.answers[a])
		delete(x.answers, a)
	}
}
