package vnet

import (
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

const dnsPort = 53

// takeDNSPort creates the socket of the DNS server before the link is read, so
// that no question arrives too early.
func (n *Network) takeDNSPort(gateway netip.Addr) (net.PacketConn, error) {
	addr := tcpip.FullAddress{NIC: nicID, Addr: toStack(gateway), Port: dnsPort}
	proto := ipv4.ProtocolNumber
	if gateway.Is6() {
		proto = ipv6.ProtocolNumber
	}
	conn, err := gonet.DialUDP(n.stack, &addr, nil, proto)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "bind the DNS port: %w", err)
	}
	return conn, nil
}

// serveDNS answers questions on a socket until the Network ends.
func (n *Network) serveDNS(conn net.PacketConn) {
	s := gate.Server{Gate: func(net.Addr) *gate.Gate { return n.gate }}
	if err := s.ServePacket(n.ctx, conn); err != nil {
		n.log.Error("the DNS server ended", "err", err)
	}
}
