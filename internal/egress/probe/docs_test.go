package probe_test

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
)

var update = flag.Bool("update", false, "write docs/probes.md anew")

const document = "../../../docs/probes.md"

const preface = `# The probe table

Generated from internal/egress/probe by 'make docs'. One list of what a sandbox may and may not reach, tried from inside: in a real VM and from a namespace on the userspace network, in namespaces against nftables, and by 'agentlab verify' on a live backend. In tests every address of a fake internet answers, forbidden ones too, so that a leak is seen as an answer; and what arrives there is looked at.

What a row wants under each policy: **reach** (the target answers), **block** (nothing comes back, and nothing arrives outside), **closed** (block, and not even a connection is accepted), – (not asked). The rule is what guards the row: it must be what the denial is recorded under, and without it the row fails ('make mutation'). Under "–" nothing is recorded: a malformed or spoofed packet is dropped.

The policies: *nat*; *ports*, nat with ports 80 and 443 only; *allowlist*; *layer*, the allowlist narrowed by a repository; *private*, an allowlist beside which the operator opened private destinations; *off*. The first four also deny one name and one address.

| row | shows | rule | nat | ports | allowlist | layer | private | off |
|---|---|---|---|---|---|---|---|---|
`

// The page lists the table as it is.
func TestDocument(t *testing.T) {
	var ids []string
	rows := map[string]probe.Check{}
	wants := map[string][]string{}
	for i, v := range probetest.Reference() {
		e := env(v)
		e.Host, e.Cards = nil, true
		last := ""
		for _, c := range probe.Table(e) {
			if _, known := rows[c.ID]; !known {
				rows[c.ID] = c
				wants[c.ID] = slices.Repeat([]string{"–"}, len(probetest.Reference()))
				ids = slices.Insert(ids, slices.Index(ids, last)+1, c.ID)
			}
			wants[c.ID][i] = string(c.Want)
			last = c.ID
		}
	}
	var b strings.Builder
	b.WriteString(preface)
	for _, id := range ids {
		rule := "–"
		if r := rows[id].Rule; r != "" {
			rule = "`" + r + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", id, rows[id].Shows, rule, strings.Join(wants[id], " | "))
	}
	if *update {
		if err := os.WriteFile(document, []byte(b.String()), 0o644); err != nil { //nolint:gosec // a page of the documentation
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(document)
	if err != nil || string(have) != b.String() {
		t.Errorf("docs/probes.md is not the table as it is: run 'make docs' (%v)", err)
	}
}
