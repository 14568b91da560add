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
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
)

func mutants(t *testing.T) []probetest.Mutant {
	t.Helper()
	list, err := probetest.Mutants(probetest.Reference(), userspaceEnv)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// ruleConstants are all rule names that package egress has.
func ruleConstants(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("../*.go")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	name := regexp.MustCompile(`(?m)^\s*Rule\w+\s*=\s*"([a-z]+(?:\.[a-z]+)?)"`)
	for _, file := range files {
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
		listed := slices.ContainsFunc(list, func(m probetest.Mutant) bool { return m.Rule == rule && len(m.Rows) > 0 })
		if !listed && probetest.Excused(rule) == "" {
			t.Errorf("no row of the table guards %s", rule)
		}
	}
}

// Each rule, taken out of force alone, is missed by a row that guards it.
func TestMutation(t *testing.T) {
	file := filepath.Join(t.TempDir(), "drop")
	egress.DropRuleFile = file
	u := newUserspace(t)
	for _, v := range probetest.Reference() { // else a mutant would be caught by what fails anyway
		for _, o := range probetest.Failures(u.run(t, v)) {
			t.Fatalf("%s: %s fails with all rules in force: %s", v.Name, o.Check.ID, o.Detail)
		}
	}
	for _, m := range mutants(t) {
		if !strings.HasPrefix(m.Rule, os.Getenv("AGENTLAB_TEST_MUTANTS")) {
			continue // to look at a few by hand
		}
		var r probe.Report
		if m.Excused == "" && len(m.Rows) > 0 {
			if err := os.WriteFile(file, []byte(m.Rule), 0o600); err != nil {
				t.Fatal(err)
			}
			r = u.run(t, m.Variant, m.Rows...)
		}
		line, caught := m.Line(r)
		fmt.Println(line)
		if !caught {
			t.Errorf("without %s the table passes", m.Rule)
		}
	}
}
