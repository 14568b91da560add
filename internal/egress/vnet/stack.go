package vnet

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/link/qdisc/fifo"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/agentlab-vm/agentlab"
)

const (
	nicID = 1
	// The other end is a socket on this machine, so the windows need not be
	// large. They limit the memory of a guest that does not read: a flow has
	// at most one send and one receive buffer.
	bufferMin     = 4 << 10
	bufferDefault = 64 << 10
	bufferMax     = 256 << 10
	// maxHandshakes limits the connection requests that are being decided on
	// and dialled. It is above every flow limit of a policy.
	maxHandshakes = 1024
	// queuePackets is how many packets may wait for the link.
	queuePackets = 512
)

// pair has the addresses of both ends of the link in one address family.
type pair struct{ guest, gateway netip.Addr }

func (n *Network) pairs() []pair {
	out := []pair{{n.cfg.Guest, n.cfg.Gateway}}
	if !n.cfg.NoIPv6 {
		out = append(out, pair{n.cfg.Guest6, n.cfg.Gateway6})
	}
	return out
}

// buildStack creates the TCP/IP stack: one device that accepts packets for
// every address (promiscuous) and answers from every address (spoofing), and
// one route, to the guest.
func (n *Network) buildStack() error {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{arp.NewProtocol, ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocolCUBIC, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	n.stack = s
	eth := ethernet.New(n.link)
	fail := func(what string, err tcpip.Error) error {
		s.Destroy()
		return agentlab.Errorf(agentlab.CodeInternal, "%s: %s", what, err)
	}
	opts := stack.NICOptions{QDisc: fifo.New(eth, 1, queuePackets)}
	if err := s.CreateNICWithOptions(nicID, eth, opts); err != nil {
		return fail("create the network card", err)
	}
	routes := make([]tcpip.Route, 0, 2)
	for _, pair := range n.pairs() {
		proto := ipv4.ProtocolNumber
		if pair.gateway.Is6() {
			proto = ipv6.ProtocolNumber
		}
		addr := tcpip.ProtocolAddress{Protocol: proto, AddressWithPrefix: toStack(pair.gateway).WithPrefix()}
		if err := s.AddProtocolAddress(nicID, addr, stack.AddressProperties{}); err != nil {
			return fail("set the gateway's address", err)
		}
		routes = append(routes, tcpip.Route{Destination: toStack(pair.guest).WithPrefix().Subnet(), NIC: nicID})
	}
	if err := s.SetPromiscuousMode(nicID, true); err != nil {
		return fail("set promiscuous mode", err)
	}
	if err := s.SetSpoofing(nicID, true); err != nil {
		return fail("set spoofing", err)
	}
	s.SetRouteTable(routes)
	if err := setOptions(s); err != nil {
		return fail("set an option", err)
	}
	forward := tcp.NewForwarder(s, bufferDefault, maxHandshakes, n.handleTCP)
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, forward.HandlePacket)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, n.handleUDP)
	return nil
}

func setOptions(s *stack.Stack) tcpip.Error {
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: bufferMin, Default: bufferDefault, Max: bufferMax}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: bufferMin, Default: bufferDefault, Max: bufferMax}
	sack := tcpip.TCPSACKEnabled(true)
	moderate := tcpip.TCPModerateReceiveBufferOption(true)
	// This side may close first. A closed flow must not use memory for the
	// usual minute; otherwise a guest that opens and closes flows could
	// exhaust the memory.
	timeWait := tcpip.TCPTimeWaitTimeoutOption(timeWait)
	synRetries := tcpip.TCPSynRetriesOption(4)
	options := []tcpip.SettableTransportProtocolOption{&receive, &send, &sack, &moderate, &timeWait, &synRetries}
	for _, o := range options {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return err
		}
	}
	return nil
}

// DialGuest opens a TCP connection from the gateway to a port in the guest.
// The error has agentlab.CodeUnavailable if the guest refuses or does not
// answer before ctx ends. The connection ends with the Network.
func (n *Network) DialGuest(ctx context.Context, port uint16) (net.Conn, error) {
	if !n.enter() {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox's network is down")
	}
	defer n.wg.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.ctx, cancel)()
	from := tcpip.FullAddress{NIC: nicID, Addr: toStack(n.cfg.Gateway)}
	to := tcpip.FullAddress{NIC: nicID, Addr: toStack(n.cfg.Guest), Port: port}
	conn, err := gonet.DialTCPWithBind(ctx, n.stack, from, to, ipv4.ProtocolNumber)
	if err == nil {
		return conn, nil
	}
	if n.ctx.Err() != nil {
		err = errors.New("the sandbox's network is down")
	}
	return nil, agentlab.Errorf(agentlab.CodeUnavailable, "dial port %d of the guest: %w", port, err)
}

func toStack(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

func fromStack(a tcpip.Address, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return netip.AddrPortFrom(addr, port)
}
