//go:build linux

package nft

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
)

// doubled are the rules whose removal alone changes nothing that could be
// seen here, each with what stands behind it.
var doubled = map[string]string{
	egress.RuleLoopback:    "the kernel routes 127.0.0.0/8 and ::1 nowhere",
	egress.RuleUnspecified: "the kernel routes 0.0.0.0/8 and :: nowhere",
	egress.RuleMulticast:   "the kernel forwards no multicast without a routing daemon",
	egress.RuleBroadcast:   "the kernel forwards no broadcast",
	egress.RuleHostAddr:    "the host's addresses are in always.private or always.lan too",
	egress.RuleGateway:     "always.host refuses what it no longer does",
	egress.RuleTailnet:     "the tailnet is not behind the uplink (always.uplink)",
	ruleEtherType:          "nothing on this host listens to other protocols",
	ruleUnknown:            "who has no policy has no bound address either; TestNoPolicyNoNetwork takes that away",
}

// without takes every rule and element of a name out.
func without(name string) func(*ruleset) {
	return func(r *ruleset) {
		for _, t := range r.tables {
			for _, s := range t.sets {
				s.elems = slices.DeleteFunc(s.elems, func(e elem) bool { return e.rule == name })
			}
			for _, c := range t.chains {
				c.rules = slices.DeleteFunc(c.rules, func(x rule) bool { return x.name == name })
			}
		}
	}
}

// quick lets probes wait no longer than an answer takes here.
func quick(exec probe.Exec) probe.Exec {
	return func(ctx context.Context, list []guestapi.Probe) ([]guestapi.ProbeResult, error) {
		for i := range list {
			list[i].TimeoutMS = 1200
		}
		return exec(ctx, list)
	}
}

// TestMutations takes each rule out of the rules, one at a time, and expects
// that the probe table or an extra notices. It takes minutes:
//
//	AGENTLAB_MUTATION=1 go test ./internal/egress/nft -run TestMutations -v
func TestMutations(t *testing.T) {
	if os.Getenv("AGENTLAB_MUTATION") == "" {
		t.Skip("takes minutes: make mutation, or AGENTLAB_MUTATION=1")
	}
	w := newWorld(t)
	w.surroundings()
	w.controller()
	log := &records{}
	m := w.manager(Options{Audit: log.add})
	found := map[string]string{}
	for _, v := range probetest.Reference() {
		if v.Network.Mode == agentlab.NetworkOff {
			v.Network.Deny = nil
		}
		m.tamper = nil
		s := w.tenants(m, v.Network)
		rules, err := build(m.state())
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range append([]string{""}, rules.names()...) {
			if name != "" && (found[name] != "" || !strings.HasPrefix(name, os.Getenv("AGENTLAB_TEST_MUTANTS"))) {
				continue
			}
			m.tamper = nil
			if name != "" {
				m.tamper = without(name)
			}
			if err := m.Apply(context.Background()); err != nil {
				t.Fatalf("without %s: %v", name, err)
			}
			// Flows that were opened without a rule must not go on.
			if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
				t.Fatal(err)
			}
			fault := w.firstFault(m, s, v, log)
			if strings.Contains(fault, "timeout") { // a busy machine is no fault of the rules
				fault = w.firstFault(m, s, v, log)
			}
			switch {
			case name == "" && fault != "":
				t.Fatalf("%s, with every rule in its place: %s", v.Name, fault)
			case fault != "":
				found[name] = v.Name + ": " + fault
				t.Logf("%-22s caught by %s", name, found[name])
			case found[name] == "" && name != "":
				found[name] = ""
			}
		}
	}
	for name, what := range found {
		why, known := doubled[name]
		switch {
		case what == "" && known:
			t.Logf("%-22s DOUBLED: %s", name, why) // scripts/mutation.sh looks for the word
		case what == "" && name != "":
			t.Errorf("%-22s MISSED by every probe", name)
		}
	}
}

// firstFault runs the table and, in mode nat, the extras, and returns the
// first thing that is wrong.
func (w *world) firstFault(m *Manager, s [2]Sandbox, v probetest.Variant, _ *records) string {
	w.t.Helper()
	w.settle()
	env := w.env(s, v, &records{})
	env.Records = nil // only what arrives counts here, not the records
	rep, err := probe.Run(context.Background(), quick(w.guests[0].exec), env)
	if err != nil {
		w.t.Fatal(err)
	}
	if f := probetest.Failures(rep); len(f) > 0 {
		return f[0].Check.ID + ": " + strings.TrimSpace(f[0].Detail)
	}
	if v.Name != "nat" {
		return ""
	}
	for _, x := range slices.Concat(extras, attacks) {
		if fault := x.run(w, m, s); fault != "" {
			return x.id + ": " + fault
		}
	}
	return ""
}

// settle forgets what arrived, when all that was sent before has arrived: the
// answer to a question comes after it.
func (w *world) settle() {
	w.t.Helper()
	w.guests[0].reaches("dns", "site.probe.example.com")
	seen := -1
	for n := len(w.outside().Flows); n != seen; n = len(w.outside().Flows) {
		seen = n
	}
	w.forget()
}

// TestNoPolicyNoNetwork: a sandbox that is bound and has no policy reaches
// nothing.
func TestNoPolicyNoNetwork(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{})
	w.tenants(m, agentlab.Network{Mode: agentlab.NetworkNAT})
	if !w.guests[0].mustReach("tcp", "192.31.196.20:8080") {
		t.Fatal("the internet is not reached with a policy")
	}
	m.tamper = func(r *ruleset) {
		for _, s := range r.tables[0].sets {
			if s.name == "policy4" || s.name == "live4" {
				s.elems = nil
			}
		}
	}
	if err := m.Apply(context.Background()); err != nil {
		t.Fatal(err)
	}
	if w.guests[0].reaches("tcp", "192.31.196.20:8080") {
		t.Error("the internet is reached without a policy")
	}
}

// names returns the names of all rules and elements without duplicates.
func (r *ruleset) names() []string {
	var out []string
	add := func(n string) {
		if n != "" && !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	for _, t := range r.tables {
		for _, s := range t.sets {
			for _, e := range s.elems {
				add(e.rule)
			}
		}
		for _, c := range t.chains {
			for _, x := range c.rules {
				add(x.name)
			}
		}
	}
	return out
}
