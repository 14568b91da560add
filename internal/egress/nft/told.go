package nft

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"time"
)

// Bounds on what one sandbox can have us remember, and keep open in the
// kernel, by asking for names.
const (
	maxTold     = 4096 // pairs of address and name
	maxNamesPer = 64   // names of one address
)

// tell remembers that a name stands for an address. What ends first makes way
// when there is too much; the addresses that have no name left are returned.
func (x *member) tell(addr netip.Addr, name string, until, now time.Time) (gone []netip.Addr) {
	names := x.told[addr]
	if names == nil {
		names = map[string]time.Time{}
		x.told[addr] = names
	}
	if old, known := names[name]; known {
		if until.After(old) {
			names[name] = until
		}
		return nil
	}
	if len(names) >= maxNamesPer {
		delete(names, first(names))
		x.pairs--
	}
	names[name] = until
	if x.pairs++; x.pairs <= maxTold {
		return nil
	}
	for a, names := range x.told {
		maps.DeleteFunc(names, func(_ string, until time.Time) bool { return !until.After(now) })
		if len(names) == 0 {
			gone = append(gone, a)
			delete(x.told, a)
		}
	}
	for x.pairs = x.count(); x.pairs > maxTold*3/4; x.pairs = x.count() {
		a := x.soonest(addr)
		gone = append(gone, a)
		delete(x.told, a)
	}
	return gone
}

func (x *member) count() int {
	n := 0
	for _, names := range x.told {
		n += len(names)
	}
	return n
}

// first is the name that ends first.
func first(names map[string]time.Time) string {
	out := ""
	for n, until := range names {
		if out == "" || until.Before(names[out]) {
			out = n
		}
	}
	return out
}

// soonest is the address, other than one, whose names all end first.
func (x *member) soonest(other netip.Addr) netip.Addr {
	var out netip.Addr
	var end time.Time
	for a, names := range x.told {
		if a == other {
			continue
		}
		var last time.Time
		for _, until := range names {
			if until.After(last) {
				last = until
			}
		}
		if !out.IsValid() || last.Before(end) {
			out, end = a, last
		}
	}
	return out
}

// close writes what takes the elements of an address out. Each is added
// first, because it may have ended by itself.
func (x *member) close(w *strings.Builder, addr netip.Addr) {
	pair := fmt.Sprintf(" %s . %s . ", Learned{Sandbox: x.Sandbox, Addr: addr}.guest(), addr)
	for key, e := range x.elems {
		if strings.Contains(key, pair) {
			e.write(w, "add")
			e.write(w, "delete")
			delete(x.elems, key)
		}
	}
}
