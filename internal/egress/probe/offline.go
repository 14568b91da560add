package probe

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// lookupAtMost limits the wait for the record of a lookup or a connection that
// got no answer: the enforcer waits longer than the guest.
const lookupAtMost = 10 * time.Second

// Prefix and suffixes of the Error of a probe whose name was not resolved.
const (
	nameError = "name: "
	noAddress = "no address"
)

// namesHost reports whether a probe finds its target by a name.
func namesHost(t Trace) bool { return t.Proto != DNS && !t.Addr.IsValid() && t.Name != "" }

// lacking reports whether a row is about a host that the guest did not find or
// reach and that has no record yet.
func (r *run) lacking(c Check) bool {
	if !r.env.MayBeOffline || r.env.Records == nil || c.Want != Reach {
		return false
	}
	for i, t := range c.Traces {
		res := r.results[c.Probes[i].ID]
		if !namesHost(t) || res.Reached {
			continue
		}
		if len(res.Addrs) == 0 && !strings.HasPrefix(res.Error, nameError) {
			continue
		}
		if r.offline(t, c.Probes[i]) == "" {
			return true
		}
	}
	return false
}

// offline returns why the host of a probe does not exist or answer, if the
// enforcer's records show that the policy allowed it, and "" otherwise or if
// not known. The guest's result alone is never sufficient.
func (r *run) offline(t Trace, p guestapi.Probe) string {
	res := r.results[p.ID]
	if !r.env.MayBeOffline || !namesHost(t) || res.Reached {
		return ""
	}
	if why, ok := strings.CutPrefix(res.Error, nameError); ok {
		return r.unresolved(t.Name, why)
	}
	return r.unreached(t, p)
}

// unresolved is offline for a name without addresses.
func (r *run) unresolved(name, why string) string {
	final := why == "NXDOMAIN" || why == "SERVFAIL" || why == noAddress
	asked, failure := false, ""
	for _, rec := range r.records {
		if rec.Proto != DNS || !sameName(rec.Name, name) {
			continue
		}
		if !rec.Allow || rec.Addr != "" {
			return "" // the policy denied it or withheld its addresses, or it does resolve
		}
		asked, failure = true, first(rec.Error, failure)
	}
	if !asked || !final && failure == "" {
		return ""
	}
	return fmt.Sprintf("%s does not resolve here: %s", name, first(failure, why))
}

// unreached is offline for a name whose address does not answer the host.
func (r *run) unreached(t Trace, p guestapi.Probe) string {
	failure := ""
	for _, rec := range r.records {
		if !r.about(rec, t, p) {
			continue
		}
		if !rec.Allow || rec.Error == "" {
			return ""
		}
		failure = rec.Error
	}
	if failure == "" {
		return ""
	}
	return fmt.Sprintf("%s cannot be reached from here: %s", t.Name, failure)
}

// absent returns why a row without another fault proves nothing: none of the
// hosts that it tries by name exist. A row with other targets is never absent,
// nor is a blocked row whose host does resolve.
func (r *run) absent(c Check) string {
	why := ""
	for i, t := range c.Traces {
		res := r.results[c.Probes[i].ID]
		w := r.offline(t, c.Probes[i])
		if w == "" || c.Want != Reach && (len(res.Addrs) > 0 || !strings.HasPrefix(res.Error, nameError)) {
			return ""
		}
		why = first(why, w)
	}
	return why
}

// SkipReason is why rows were skipped.
type SkipReason struct {
	Reason string
	Count  int // number of rows
}

// SkipReasons returns each reason once, in the table's order.
func (r Report) SkipReasons() []SkipReason {
	var out []SkipReason
	for _, o := range r.Outcomes {
		if o.Status != Skip {
			continue
		}
		i := slices.IndexFunc(out, func(s SkipReason) bool { return s.Reason == o.Detail })
		if i < 0 {
			i, out = len(out), append(out, SkipReason{Reason: o.Detail})
		}
		out[i].Count++
	}
	return out
}
