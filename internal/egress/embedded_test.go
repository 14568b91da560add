package egress_test

import (
	"net/netip"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// A deny rule about IPv4 holds for every way to write its addresses in IPv6.
func TestDenyRulesSeeThroughEmbeddings(t *testing.T) {
	t.Parallel()
	p, err := egress.New(agentlab.Network{
		Mode: agentlab.NetworkNAT, Deny: []agentlab.NetworkRule{{Rule: "192.31.196.0/24"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{"192.31.196.1", "::ffff:192.31.196.1", "64:ff9b::192.31.196.1", "2620:4f:8000::5efe:192.31.196.1"} {
		v := p.Decide(egress.Flow{Proto: egress.TCP, Dst: netip.AddrPortFrom(netip.MustParseAddr(a), 443)})
		if v.Allow || v.Rule != "deny:192.31.196.0/24" {
			t.Errorf("%s: %+v", a, v)
		}
	}
}
