//go:build mutation

package egress_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// TestDroppedRules: in a build for the mutation check, a rule that the file
// names denies nothing, and the others still do.
func TestDroppedRules(t *testing.T) {
	file := filepath.Join(t.TempDir(), "drop")
	egress.DropRuleFile = file
	drop := func(rule string) {
		if err := os.WriteFile(file, []byte(rule+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := egress.New(agentlab.Network{Mode: agentlab.NetworkNAT}); err != nil {
			t.Fatal(err)
		}
	}
	defer func() { drop("") }()
	list := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("a.example"), Deny: rulesOf("9.9.9.9")}
	nat := agentlab.Network{Mode: agentlab.NetworkNAT, Ports: []string{"443"}, Deny: rulesOf("a.example")}
	layered := agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{list}}
	for _, c := range []struct {
		rule string
		n    agentlab.Network
		f    egress.Flow
	}{
		{egress.RulePrivate, nat, flow(egress.TCP, "10.0.0.1:443")},
		{egress.RuleMetadata, nat, flow(egress.TCP, "169.254.169.254:443")},
		{egress.RuleForeignDNS, agentlab.Network{Mode: agentlab.NetworkNAT}, flow(egress.UDP, "8.8.8.8:53")},
		{egress.RulePorts, nat, flow(egress.TCP, "8.8.8.8:25")},
		{egress.RuleNameUnread, agentlab.Network{Mode: agentlab.NetworkNAT, Deny: rulesOf("a.example")}, flow(egress.UDP, "8.8.8.8:443")},
		{"deny:a.example", nat, flow(egress.DNS, "", "a.example.")},
		{egress.RuleAllowlist, list, flow(egress.TCP, "8.8.8.8:443")},
		{egress.RuleOff, agentlab.Network{Mode: agentlab.NetworkOff}, flow(egress.TCP, "8.8.8.8:443")},
		{"layer." + egress.RuleAllowlist, layered, flow(egress.TCP, "8.8.8.8:443")},
	} {
		drop("")
		if v := compile(t, c.n).Decide(c.f); v.Allow || v.Rule != c.rule {
			t.Errorf("%s: before: %+v", c.rule, v)
		}
		drop("always.broadcast")
		if compile(t, c.n).Decide(c.f).Allow {
			t.Errorf("%s goes with another", c.rule)
		}
		drop(c.rule)
		if v := compile(t, c.n).Decide(c.f); !v.Allow {
			t.Errorf("%s: after: %+v", c.rule, v)
		}
	}
	f := flow(egress.TCP, "8.8.8.8:443", "a.example.")
	for rule, shown := range map[string]string{egress.RuleNameMissing: "", egress.RuleNameMismatch: "b.example"} {
		drop(rule)
		if v := compile(t, list).DecideName(f, shown); !v.Allow {
			t.Errorf("%s: %+v", rule, v)
		}
	}
	drop("always.*")
	if _, denied := egress.AlwaysDenied(netip.MustParseAddr("127.0.0.1")); denied {
		t.Error("always.* drops nothing")
	}
	drop(egress.RuleRebinding)
	if _, withheld := egress.FilterAnswer([]netip.Addr{netip.MustParseAddr("10.0.0.1")}); len(withheld) > 0 {
		t.Error("always.rebinding drops nothing")
	}
}
