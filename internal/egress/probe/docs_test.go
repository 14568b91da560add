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

var update = flag.Bool("update", false, "regenerate docs/probes.md")

const document = "../../../docs/probes.md"

const preface = `# The probe table

Generated from internal/egress/probe by 'make docs'. The list of what a sandbox can and cannot reach. Tests try each row from inside: in a real VM and from a namespace on the userspace network, in namespaces against nftables, and by 'agentlab verify' on a live backend. In tests every address of a fake internet answers, forbidden ones too, so a leak produces a response; the tests also inspect received packets.

The expected result under each policy: **reach** (the target answers), **block** (no response, and nothing arrives outside), **closed** (block, and no connection is accepted), – (not tried). rule: the policy rule that denies the request; the record must name it, and without the rule the row fails ('make mutation'). A row with the rule "–" is not recorded: a malformed or spoofed packet is dropped.

The policies: *nat*; *ports*, nat with ports 80 and 443 only; *allowlist*; *layer*, the allowlist restricted further by a repository; *private*, an allowlist with private destinations that the operator allowed; *off*. The first four also deny one name and one address.

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
		if err := os.WriteFile(document, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(document)
	if err != nil || string(have) != b.String() {
		t.Errorf("docs/probes.md is not the table as it is: run 'make docs' (%v)", err)
	}
}
