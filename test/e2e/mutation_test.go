//go:build mutation

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
	"github.com/agentlab-vm/agentlab/test/testdaemon"
)

// buildFlags are for the programs under test.
var buildFlags = []string{"-tags", "mutation"}

// In one real VM: each rule of the network policy, taken out of force alone,
// is missed by a row of the probe table.
func TestMutationInVM(t *testing.T) { newProbeLab(t).mutate() }

// The same in an instance of Lima.
func TestMutationInLima(t *testing.T) {
	l, n := newNetLab(t)
	l.withLima()
	newProbeLabIn(t, l, n, "--image", "base").mutate()
}

// mutate tries the table without each rule.
func (p *probeLab) mutate() {
	file := filepath.Join(p.home, testdaemon.DropRule)
	variants := slices.DeleteFunc(probetest.Reference(), func(v probetest.Variant) bool { return len(v.Network.Layers) > 0 })
	for _, v := range variants { // else a mutant would be caught by what fails anyway
		for _, o := range probetest.Failures(p.table(v, 15)) {
			p.Fatalf("%s: %s fails with all rules in force: %s", v.Name, o.Check.ID, o.Detail)
		}
	}
	mutants, err := probetest.Mutants(variants, probeEnv)
	if err != nil {
		p.Fatal(err)
	}
	for _, m := range mutants {
		if !strings.HasPrefix(m.Rule, os.Getenv("AGENTLAB_TEST_MUTANTS")) {
			continue // to look at a few by hand
		}
		var r probe.Report
		if m.Excused == "" && len(m.Rows) > 0 {
			if err := os.WriteFile(file, []byte(m.Rule), 0o600); err != nil {
				p.Fatal(err)
			}
			r = p.table(m.Variant, 4, m.Rows...)
		}
		line, caught := m.Line(r)
		fmt.Println(line)
		if !caught {
			p.Errorf("without %s the table passes", m.Rule)
		}
	}
	p.ok("sandbox", "destroy", probed)
}
