//go:build mutation

package probe_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
)

// structural are rules that nothing can drop, because no line of a policy
// stands behind them: what they refuse is what the enforcer has no code to
// carry.
var structural = map[string]string{
	"always.protocol":   "there is no code that carries other protocols",
	"always.controller": "there is no service behind other ports",
	"always.invalid":    "such an address cannot be written into a packet",
	"always.host":       "the dialer's own: see TestHostDialer of package gate",
	"limit.flows":       "a limit, no target: see the tests of package gate",
	"limit.rate":        "a limit, no target: see the tests of package gate",

	// They stand below a deny rule, so that the row of that shows that it wins.
	"allow:denied.probe.example.com": "it never counts, because a deny rule wins",
	"allow:192.31.196.30":            "it never counts, because a deny rule wins",
}

// permits are rules that allow by the mode alone; without them there is no
// such mode.
var permits = []string{"mode.nat"}

// frames are the checks of the userspace network's frame filter, which are no
// rules of a policy and in no record.
var frames = []struct {
	rule string
	rows []string
}{
	{"frame.group", []string{"spoof-group"}},
	{"frame.source", []string{"spoof-source", "spoof-source6"}},
	{"frame.options", []string{"source-route-loose", "source-route-strict"}},
	{"frame.extension", []string{"extension-headers"}},
}

// mutant is one rule that is taken out of force under one policy.
type mutant struct {
	variant probe.Variant
	rule    string
	rows    []string // that guard it
}

// mutants are all rules that the reference policies have, and all that hold
// under every policy, each with the rows that guard it.
func mutants(t *testing.T) []mutant {
	t.Helper()
	var out []mutant
	seen := map[string]bool{}
	add := func(v probe.Variant, rule string, rows []string) {
		if !seen[rule] { // one policy is enough
			seen[rule] = true
			out = append(out, mutant{v, rule, rows})
		}
	}
	for _, v := range probe.Reference() {
		var reach []string
		guards := map[string][]string{}
		var order []string
		for _, c := range probe.Table(userspaceEnv(v)) {
			switch {
			case c.Want == probe.Reach:
				reach = append(reach, c.ID)
			case c.Rule != "" && (!c.IPv6 || userspaceEnv(v).Guest6.IsValid()):
				if guards[c.Rule] == nil {
					order = append(order, c.Rule)
				}
				guards[c.Rule] = append(guards[c.Rule], c.ID)
			}
		}
		for _, rule := range order {
			add(v, rule, guards[rule])
		}
		for _, r := range policy(t, v.Network).Rules() {
			switch {
			case r.Allow:
				add(v, r.Name, reach)
			default:
				add(v, r.Name, guards[r.Name]) // none: it is not guarded
			}
		}
	}
	for _, f := range frames {
		add(probe.Reference()[0], f.rule, f.rows)
	}
	for _, d := range egress.Denials() {
		add(probe.Reference()[0], d.Rule, nil)
	}
	return out
}

// ruleConstants are all rule names that package egress has.
func ruleConstants(t *testing.T) []string {
	t.Helper()
	pkgs, err := filepath.Glob("../*.go")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	name := regexp.MustCompile(`(?m)^\s*Rule\w+\s*=\s*"([a-z]+(?:\.[a-z]+)?)"`)
	for _, file := range pkgs {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range name.FindAllStringSubmatch(string(text), -1) {
			out = append(out, m[1])
		}
	}
	if len(out) < 20 {
		t.Fatalf("only %d rule names found in package egress: %v", len(out), out)
	}
	return out
}

// No rule of package egress is without a row that guards it.
func TestEveryRuleIsGuarded(t *testing.T) {
	list := mutants(t)
	for _, rule := range ruleConstants(t) {
		listed := slices.ContainsFunc(list, func(m mutant) bool { return m.rule == rule && len(m.rows) > 0 })
		if !listed && structural[rule] == "" && !slices.Contains(permits, rule) {
			t.Errorf("no row of the table guards %s", rule)
		}
	}
}

// Each rule, taken out of force alone, is missed by a row that guards it.
func TestMutation(t *testing.T) {
	file := filepath.Join(t.TempDir(), "drop")
	t.Setenv(egress.DropRuleFileEnv, file)
	u := newUserspace(t)
	for _, v := range probe.Reference() { // else a mutant would be caught by what fails anyway
		for _, o := range u.run(t, v).Failures() {
			t.Fatalf("%s: %s fails with all rules in force: %s", v.Name, o.Check.ID, o.Detail)
		}
	}
	fmt.Printf("%-10s %-45s %-8s %s\n", "POLICY", "RULE TAKEN OUT", "RESULT", "NOTICED BY")
	for _, m := range mutants(t) {
		if p := os.Getenv("AGENTLAB_TEST_MUTANTS"); p != "" && !strings.HasPrefix(m.rule, p) {
			continue // to look at a few by hand
		}
		if why := structural[m.rule]; why != "" {
			fmt.Printf("%-10s %-45s %-8s %s\n", m.variant.Name, m.rule, "-", why)
			continue
		}
		if err := os.WriteFile(file, []byte(m.rule), 0o600); err != nil {
			t.Fatal(err)
		}
		r := u.run(t, m.variant, append(slices.Clone(m.rows), "controller")...)
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		var noticed []string
		for _, o := range r.Failures() {
			if o.Check.ID != "controller" {
				noticed = append(noticed, o.Check.ID)
			}
		}
		result := "caught"
		if len(noticed) == 0 {
			result = "MISSED"
			t.Errorf("%s: without %s the table passes (rows that guard it: %v)", m.variant.Name, m.rule, m.rows)
		}
		fmt.Printf("%-10s %-45s %-8s %s\n", m.variant.Name, m.rule, result, strings.Join(noticed, " "))
	}
}
