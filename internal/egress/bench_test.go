package egress_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// What a decision costs does not grow with the number of rules.
func BenchmarkDecide(b *testing.B) {
	for _, rules := range []int{10, 1_000, 100_000} {
		n := agentlab.Network{Mode: agentlab.NetworkAllowlist}
		for i := range rules / 2 {
			n.Allow = append(n.Allow, agentlab.NetworkRule{Rule: fmt.Sprintf("h%d.example.com", i)})
			n.Deny = append(n.Deny, agentlab.NetworkRule{Rule: netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 16), byte(i >> 8), byte(i)}), 32).String()})
		}
		p := compile(b, n)
		f := flow(egress.TCP, "8.8.8.8:443", fmt.Sprintf("h%d.example.com.", rules/2-1))
		b.Run(fmt.Sprintf("rules=%d", rules), func(b *testing.B) {
			for b.Loop() {
				if !p.Decide(f).NeedName {
					b.Fatal("not decided by its name")
				}
			}
		})
	}
}

func BenchmarkNew(b *testing.B) {
	n := agentlab.Network{Mode: agentlab.NetworkAllowlist}
	for i := range 1000 {
		n.Allow = append(n.Allow, agentlab.NetworkRule{Rule: fmt.Sprintf("h%d.example.com", i)})
	}
	for b.Loop() {
		compile(b, n)
	}
}
