//go:build linux

package nft

import (
	"net"
	"net/netip"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// testConfig is a host as the seeds describe it.
func testConfig() Config {
	return Config{
		Bridge: "vmbr1", Subnet4: netip.MustParsePrefix("10.77.0.0/16"), Gateway4: netip.MustParseAddr("10.77.0.1"),
		Subnet6: netip.MustParsePrefix("fd77:a91a:4d00::/64"), Gateway6: netip.MustParseAddr("fd77:a91a:4d00::1"),
		Uplink: "vmbr0", Tailscale: "tailscale0", GuestPorts: []uint16{8844, 8846}, ProxyPort: 8847, LogGroup: 77,
	}
}

func rulesOf(texts ...string) []agentlab.NetworkRule {
	var out []agentlab.NetworkRule
	for _, t := range texts {
		out = append(out, agentlab.NetworkRule{Rule: t})
	}
	return out
}

func testPolicy(t testing.TB, n agentlab.Network) *egress.Policy {
	t.Helper()
	p, err := egress.New(n)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func testSandbox(n int, p *egress.Policy) Sandbox {
	return Sandbox{
		VMID: 1000 + n, MAC: net.HardwareAddr{2, 0, 0, 0, byte(n >> 8), byte(n)}, Policy: p,
		IPv4: netip.AddrFrom4([4]byte{10, 77, byte(n >> 8), byte(n)}),
		IPv6: netip.AddrFrom16([16]byte{0xfd, 0x77, 0xa9, 0x1a, 0x4d, 0, 14: byte(n >> 8), 15: byte(n)}),
	}
}

func mustAddr(s string) netip.Addr { return netip.MustParseAddr(s) }
