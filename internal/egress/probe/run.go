package probe

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Status is the result of a row.
type Status string

// The statuses.
const (
	Pass Status = "pass"
	Fail Status = "fail"
	Skip Status = "skip" // it cannot be tested here; Outcome.Detail has the reason
)

// Outcome is one row with its result.
type Outcome struct {
	Check   Check
	Status  Status
	Detail  string // why it failed or was skipped; for a row that passed, what proved it
	Results []guestapi.ProbeResult
}

// Report is the whole table with its outcomes, in the table's order.
type Report struct {
	Mode     string
	Outcomes []Outcome
	Passed   int
	Failed   int
	Skipped  int
	// Seen lists what was checked in addition to the answers: "records"
	// and "outside". Without either, a blocked row only shows a missing
	// answer.
	Seen []string
}

// OK reports whether no row failed and at least one passed.
func (r Report) OK() bool { return r.Failed == 0 && r.Passed > 0 }

// Run runs the table of env through exec. The error is that of exec or of
// Records, or has code unavailable if the guest's results are not valid. The
// result of a row is in the report and is not an error.
func Run(ctx context.Context, exec Exec, env Env) (Report, error) {
	return RunChecks(ctx, exec, env, Table(env))
}

// RunChecks is Run with rows selected by the caller.
func RunChecks(ctx context.Context, exec Exec, env Env, checks []Check) (Report, error) {
	r := run{env: env, results: map[string]guestapi.ProbeResult{}}
	if env.Records != nil { // older records are not of this run
		old, err := env.Records(ctx)
		if err != nil {
			return Report{}, err
		}
		for _, rec := range old {
			r.after = max(r.after, rec.Seq)
		}
	}
	var probes []guestapi.Probe
	for _, c := range checks {
		if SkipDetail(env, c) != "" {
			continue
		}
		for _, p := range c.Probes {
			if c.Want == Reach || p.Kind == "tls" || p.Kind == "http" {
				p.TimeoutMS = reachAtMostMS
			}
			probes = append(probes, p)
		}
	}
	results, err := exec(ctx, probes)
	if err != nil {
		return Report{}, err
	}
	if err := r.take(probes, results); err != nil {
		return Report{}, err
	}
	if err := r.await(ctx, checks); err != nil {
		return Report{}, err
	}
	return r.report(checks), nil
}

// reachAtMostMS is the time limit of a probe that must reach its target, or send it a name
// that is refused, enough for a busy host. Other probes have the prober's default: their
// packets may be dropped without an answer.
const reachAtMostMS = 15_000

// run is one run of the table.
type run struct {
	env     Env
	after   int64 // records up to this ID are older than the run
	results map[string]guestapi.ProbeResult
	records []agentlab.EgressRecord
	outside Outside
}

// SkipDetail returns why a row cannot be tested in env, "" if it can.
func SkipDetail(env Env, c Check) string {
	for _, p := range c.Probes {
		if p.Kind == "raw" && !env.Frames {
			return "sending frames needs root in the guest"
		}
	}
	switch {
	case c.Names && env.NoNames:
		return "this enforcer does not read names out of flows"
	case c.IPv6 && c.Want == Reach && !env.Guest6.IsValid():
		return "the guest has no IPv6"
	}
	return ""
}

// take checks the guest's results: one for each probe, and no others.
func (r *run) take(probes []guestapi.Probe, results []guestapi.ProbeResult) error {
	for _, res := range results {
		known := slices.ContainsFunc(probes, func(p guestapi.Probe) bool { return p.ID == res.ID })
		if _, twice := r.results[res.ID]; !known || twice {
			return agentlab.Errorf(agentlab.CodeUnavailable, "the guest's probe results do not match the probes").
				WithHint("the agent-runner in the sandbox's image may be another version; build the image again")
		}
		r.results[res.ID] = res
	}
	for _, p := range probes {
		if _, ok := r.results[p.ID]; !ok {
			return agentlab.Errorf(agentlab.CodeUnavailable, "the guest gave no result for probe %s", p.ID).
				WithHint("check the sandbox's console; the guest may have too little memory or CPU time")
		}
	}
	return nil
}

// awaitAtMost limits the wait for records even while new ones arrive.
const awaitAtMost = time.Minute

// await reads the records until every row has its expected ones, or until no
// record has arrived for some time.
func (r *run) await(ctx context.Context, checks []Check) error {
	idle := time.Duration(r.env.RecordsWithinSeconds) * time.Second
	if idle <= 0 {
		idle = 3 * time.Second
	}
	last := time.Now()
	end := last.Add(max(awaitAtMost, idle))
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		if r.env.Outside != nil {
			r.outside = r.env.Outside()
		}
		if r.env.Records == nil {
			return nil
		}
		all, err := r.env.Records(ctx)
		if err != nil {
			return err
		}
		had := len(r.records)
		r.records = slices.DeleteFunc(slices.Clone(all), func(rec agentlab.EgressRecord) bool { return rec.Seq <= r.after })
		wait := idle
		if slices.ContainsFunc(checks, r.lacking) {
			wait = max(idle, lookupAtMost)
		} else if !slices.ContainsFunc(checks, r.unrecorded) {
			return nil
		}
		now := time.Now()
		if len(r.records) > had {
			last = now
		}
		if now.Sub(last) >= wait || now.After(end) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// unrecorded reports whether a row still lacks a record.
func (r *run) unrecorded(c Check) bool {
	return SkipDetail(r.env, c) == "" && r.recordsOf(c) != "" && r.absent(c) == ""
}

func (r *run) report(checks []Check) Report {
	rep := Report{Mode: r.env.Network.Mode}
	if r.env.Records != nil {
		rep.Seen = append(rep.Seen, "records")
	}
	if r.env.Outside != nil {
		rep.Seen = append(rep.Seen, "outside")
	}
	for _, c := range checks {
		o := r.judge(c)
		switch o.Status {
		case Pass:
			rep.Passed++
		case Fail:
			rep.Failed++
		case Skip:
			rep.Skipped++
		}
		rep.Outcomes = append(rep.Outcomes, o)
	}
	return rep
}

// judge decides one row.
func (r *run) judge(c Check) Outcome {
	o := Outcome{Check: c, Status: Pass}
	if why := SkipDetail(r.env, c); why != "" {
		o.Status, o.Detail = Skip, why
		return o
	}
	// Faults that an absent host explains (no expected answer, no record
	// of a denial) are separate from all other faults.
	var faults, missing []string
	for _, p := range c.Probes {
		res := r.results[p.ID]
		o.Results = append(o.Results, res)
		if f := answered(c, p, res); f != "" && c.Want == Reach {
			missing = append(missing, f)
		} else if f != "" {
			faults = append(faults, f)
		}
		for _, a := range res.Addrs {
			if addr, err := netip.ParseAddr(a); err != nil || forbidden(addr) && (!c.Opened || !addr.IsPrivate()) {
				faults = append(faults, fmt.Sprintf("%s: the guest received the address %q", p.Target, a))
			}
		}
	}
	if f := r.recordsOf(c); f != "" {
		missing = append(missing, f) // an absent host has no address for a record
	}
	if f := r.arrived(c); f != "" {
		faults = append(faults, f)
	}
	if why := r.absent(c); len(faults) == 0 && why != "" {
		o.Status, o.Detail = Skip, why
		return o
	}
	if faults = append(missing, faults...); len(faults) > 0 {
		o.Status, o.Detail = Fail, strings.Join(faults, "; ")
		return o
	}
	o.Detail = r.seen(c, o.Results)
	return o
}

// answered returns what is wrong with a probe's result, "" if nothing.
func answered(c Check, p guestapi.Probe, res guestapi.ProbeResult) string {
	what := p.Kind + " " + p.Target
	switch {
	case c.Want == Reach && !res.Reached:
		return fmt.Sprintf("%s: not reached: %s", what, res.Error)
	case c.Want != Reach && res.Reached:
		return fmt.Sprintf("%s: it answered %q", what, first(res.Answer, strings.Join(res.Addrs, " ")))
	case c.Want == Closed && res.Connected:
		return what + ": the connection was accepted"
	case p.Kind == "raw" && res.Error != "":
		return fmt.Sprintf("%s: the frame was not sent: %s", what, res.Error)
	case res.Error == guestapi.ProbeUnknown:
		return what + ": the guest's agent-runner does not know this kind of probe"
	}
	return ""
}

// recordsOf returns what is wrong with the audit records of a row.
func (r *run) recordsOf(c Check) string {
	if r.env.Records == nil || c.Want == Reach {
		return ""
	}
	if c.IPv6 && !r.env.Guest6.IsValid() {
		return "" // there was no decision
	}
	for i, t := range c.Traces {
		found, rules := false, []string{}
		for _, rec := range r.records {
			if !r.about(rec, t, c.Probes[i]) {
				continue
			}
			found = found || !rec.Allow && rec.Rule == c.Rule
			rules = append(rules, rec.Rule)
			if rec.Allow && !c.Shared && (t.Proto != DNS || c.Rule != ruleRebinding) {
				return fmt.Sprintf("%s: recorded as allowed by %s", t, rec.Rule)
			}
		}
		if c.Rule != "" && !found {
			return fmt.Sprintf("%s: no record of a denial by %s (records by: %s)", t, c.Rule, first(strings.Join(slices.Compact(rules), ", "), "none"))
		}
	}
	return ""
}

// about reports whether a record is about a trace.
func (r *run) about(rec agentlab.EgressRecord, t Trace, p guestapi.Probe) bool {
	if rec.Proto != t.Proto {
		return false
	}
	if t.Proto == DNS {
		return sameName(rec.Name, t.Name)
	}
	if rec.Port != int(t.Port) {
		return false
	}
	addr, err := netip.ParseAddr(rec.Addr)
	if err != nil {
		return false
	}
	if t.Addr.IsValid() {
		return addr.Unmap() == t.Addr.Unmap()
	}
	return slices.Contains(r.results[p.ID].Addrs, addr.String())
}

// arrived returns what arrived outside from a blocked row.
func (r *run) arrived(c Check) string {
	if r.env.Outside == nil || c.Want == Reach {
		return ""
	}
	if c.Said != "" && slices.ContainsFunc(r.outside.Names, func(n string) bool { return sameName(n, c.Said) }) {
		return fmt.Sprintf("the name %s was heard outside", c.Said)
	}
	if c.Shared {
		return ""
	}
	for _, t := range c.Traces {
		for _, f := range r.outside.Flows {
			if t.Addr.IsValid() && f.Proto == t.Proto && f.Addr.Unmap() == t.Addr.Unmap() && f.Port == t.Port {
				return t.String() + ": it arrived outside"
			}
		}
		if t.Proto == DNS && c.Rule != ruleRebinding && slices.ContainsFunc(r.outside.Names, func(n string) bool { return sameName(n, t.Name) }) {
			return t.String() + ": the question arrived outside"
		}
	}
	return ""
}

// seen returns a short text with what proved a row.
func (r *run) seen(c Check, results []guestapi.ProbeResult) string {
	if c.Want == Reach {
		return "it answers"
	}
	var words []string
	for _, res := range results {
		if res.Error != "" && !slices.Contains(words, res.Error) {
			words = append(words, res.Error)
		}
	}
	if r.env.Records != nil && c.Rule != "" && (!c.IPv6 || r.env.Guest6.IsValid()) {
		words = append(words, "recorded as "+c.Rule)
	}
	if r.env.Outside != nil && !c.Shared {
		words = append(words, "nothing arrived outside")
	}
	return first(strings.Join(words, ", "), "no answer")
}

// String returns a description of a trace.
func (t Trace) String() string {
	switch {
	case t.Proto == DNS:
		return "dns " + t.Name
	case t.Addr.IsValid() && t.Port != 0:
		return t.Proto + " " + netip.AddrPortFrom(t.Addr, t.Port).String()
	case t.Addr.IsValid():
		return t.Proto + " " + t.Addr.String()
	case t.Name != "":
		return fmt.Sprintf("%s %s:%d", t.Proto, t.Name, t.Port)
	}
	return t.Proto
}

// forbidden reports, by the standard library's classification, whether a guest
// must not get an address.
func forbidden(a netip.Addr) bool {
	a = a.Unmap()
	return !a.IsGlobalUnicast() || a.IsPrivate() || cgnat.Contains(a)
}

var cgnat = netip.MustParsePrefix("100.64.0.0/10")

func sameName(a, b string) bool {
	return strings.EqualFold(strings.TrimSuffix(a, "."), strings.TrimSuffix(b, "."))
}

func first(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
