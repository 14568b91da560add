//go:build mutation

package probetest

import (
	"strings"

	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
)

// Mutant is one rule that is taken out of force, under one policy.
type Mutant struct {
	Variant Variant
	Rule    string
	Rows    []string // ids of the rows that guard it; at least one must fail
	// Excused tells why nothing can be taken out; "" for all others.
	Excused string
}

// excused are rules that no line of a policy stands behind, and those that
// never count.
var excused = map[string]string{
	"always.protocol":   "there is no code that carries other protocols",
	"always.controller": "there is no service behind other ports",
	"always.invalid":    "such an address cannot be written into a packet",
	"always.host":       "the dialer's own: see its tests in package gate",
	"always.lan":        "the dialer's own too, and the bridge's (see package nft)",
	"proxy.unsupported": "the upstream proxy's: see its tests in package gate",
	"limit.flows":       "a limit, no target: see the tests of package gate",
	"limit.rate":        "a limit, no target: see the tests of package gate",
	"mode.nat":          "without it there is no such mode",

	// They stand below a deny rule, so that the row of that shows that it wins.
	"allow:denied.probe.example.com": "it never counts, because a deny rule wins",
	"allow:192.31.196.30":            "it never counts, because a deny rule wins",
}

// frameChecks are what the userspace network checks of frames, which are no
// rules of a policy and in no record.
var frameChecks = []Mutant{
	{Rule: "frame.group", Rows: []string{"spoof-group"}},
	{Rule: "frame.source", Rows: []string{"spoof-source", "spoof-source6"}},
	{Rule: "frame.options", Rows: []string{"source-route-loose", "source-route-strict"}},
	{Rule: "frame.extension", Rows: []string{"extension-headers"}},
}

// Excused tells why a rule is in no Mutant that counts; "" when it must be.
func Excused(rule string) string { return excused[rule] }

// Mutants are all rules that the variants' policies have, all that hold under
// every policy, and the checks of frames, each once, with the rows that guard
// it. env says where the table is run.
func Mutants(variants []Variant, env func(Variant) probe.Env) ([]Mutant, error) {
	var out []Mutant
	seen := map[string]bool{}
	add := func(v Variant, rule string, rows []string) {
		if !seen[rule] { // one policy is enough
			seen[rule] = true
			out = append(out, Mutant{Variant: v, Rule: rule, Rows: rows, Excused: excused[rule]})
		}
	}
	for _, v := range variants {
		e := env(v)
		var reach, order []string
		guards := map[string][]string{}
		for _, c := range probe.Table(e) {
			switch {
			case c.Want == probe.Reach && probe.SkipDetail(e, c) == "":
				reach = append(reach, c.ID)
			case c.Rule != "" && probe.SkipDetail(e, c) == "" && (!c.IPv6 || e.Guest6.IsValid()):
				if guards[c.Rule] == nil {
					order = append(order, c.Rule)
				}
				guards[c.Rule] = append(guards[c.Rule], c.ID)
			}
		}
		for _, rule := range order {
			add(v, rule, guards[rule])
		}
		p, err := egress.New(v.Network)
		if err != nil {
			return nil, err
		}
		for _, r := range p.Rules() {
			if r.Allow {
				add(v, r.Name, reach)
			} else {
				add(v, r.Name, guards[r.Name])
			}
		}
	}
	for _, v := range variants {
		for _, t := range v.Network.Private {
			p, err := egress.ParsePrivate(t)
			if err != nil {
				return nil, err
			}
			rows := opened(t.Host)
			if len(rows) > 0 {
				add(v, p.Rule, rows)
			}
		}
	}
	for _, f := range frameChecks {
		add(variants[0], f.Rule, f.Rows)
	}
	for _, d := range egress.Denials() {
		add(variants[0], d.Rule, nil) // no row: a fault, should it come to that
	}
	return out, nil
}

// opened are the rows that a private destination's rule makes come out as they
// do. Those of names that resolve to nothing that can be opened are guarded by
// always.rebinding.
func opened(host string) []string {
	return map[string][]string{
		"10.9.8.9": {"private-address"}, "fd12:9:8::9": {"private-address6"}, "gateway.corp": {"private-name", "private-tls"}, probe.HostName: {"private-host"},
	}[host]
}

// Line is how the result of a mutant is printed.
func (m Mutant) Line(r probe.Report) (line string, caught bool) {
	noticed := []string{}
	for _, o := range Failures(r) {
		noticed = append(noticed, o.Check.ID)
	}
	result, why := "caught", strings.Join(noticed, " ")
	switch {
	case m.Excused != "":
		result, why = "-", m.Excused
	case len(noticed) == 0:
		result, why = "MISSED", "rows that guard it: "+strings.Join(m.Rows, " ")
	}
	return pad(m.Variant.Name, 10) + " " + pad(m.Rule, 45) + " " + pad(result, 7) + " " + why, result != "MISSED"
}

func pad(s string, n int) string { return s + strings.Repeat(" ", max(0, n-len(s))) }
