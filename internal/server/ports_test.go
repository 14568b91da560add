package server

import (
	"net/netip"

	"github.com/agentlab-vm/agentlab/internal/devproxy"
)

type stubPorts struct{ *stub }

func (s stubPorts) Ports(vmid int) []devproxy.Port {
	_ = s.called("ports.list")
	return []devproxy.Port{{VMID: 1000 + vmid, Sandbox: "play", Port: 3000, HostPort: 3000, URL: "http://play.sandbox.localhost:3000/", Program: "node"}}
}

func (s stubPorts) DNS() netip.AddrPort {
	_ = s.called("dns.get")
	return netip.AddrPort{}
}

func (s stubPorts) SetDNS(bool) (netip.AddrPort, error) {
	return netip.MustParseAddrPort("127.0.0.1:8853"), s.called("dns.set")
}
