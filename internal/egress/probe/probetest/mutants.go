//go:build mutation

package probetest

import (
	"strings"

	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
)

// Mutant is one rule that is disabled, under one policy.
type Mutant struct {
	Variant Variant
	Rule    string
	Rows    []string // IDs of the rows that test it; at least one must fail
	// Excused is why the rule cannot be disabled; "" for all others.
	Excused string
}

// excused lists rules that are not based on a line of a policy, and rules that
// never match.
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

	// A deny rule covers them; the row of the deny rule shows that it takes
	// precedence.
	"allow:denied.probe.example.com": "it never counts, because a deny rule wins",
	"allow:192.31.196.30":            "it never counts, because a deny rule wins",
}

// frameChecks are the userspace network's checks of frames, which are not
// rules of a policy and are not recorded.
var frameChecks = []Mutant{
	{Rule: "frame.group", Rows: []string{"spoof-group"}},
	{Rule: "frame.source", Rows: []string{"spoof-source", "spoof-source6"}},
	{Rule: "frame.options", Rows: []string{"source-route-loose", "source-route-strict"}},
	{Rule: "frame.extension", Rows: []string{"extension-headers"}},
}

// Excused returns why a rule needs no Mutant, "" if it needs one.
func Excused(rule string) string { return excused[rule] }

// Mutants returns all rules of the variants' policies, all rules that apply
// under every policy, and the checks of frames, each once, with the rows that
// test it. env returns the environment of a variant.
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
		add(variants[0], d.Rule, nil) // without a row it is reported as a fault
	}
	return out, nil
}

// opened returns the rows whose result depends on the rule of a private
// destination. Rows of names that resolve only to addresses that cannot be
// allowed test always.rebinding.
func opened(host string) []string {
	return map[string][]string{
		"10.9.8.9": {"private-address"}, "fd12:9:8::9": {"private-address6"}, "gateway.corp": {"private-name", "private-tls"}, probe.HostName: {"private-host"},
	}[host]
}

// Line returns the printed result of a mutant.
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
