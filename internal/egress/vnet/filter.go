package vnet

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"strconv"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"

	"github.com/agentlab-vm/agentlab/internal/egress"
)

const (
	etherHeader = 14
	arpSize     = 28
	ipv4Header  = 20

	typeIPv4 = 0x0800
	typeARP  = 0x0806

	protoICMP = 1
	protoTCP  = 6
	protoUDP  = 17
)

// The names of the filter's checks of frames, for the mutation test. They are
// not recorded.
const (
	frameGroup     = "frame.group"     // the sender's MAC is not a group address
	frameSource    = "frame.source"    // the sender's address is that of the guest
	frameOptions   = "frame.options"   // IPv4 without options
	frameExtension = "frame.extension" // IPv6 without extension headers
)

var broadcastMAC = []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// frameFilter decides which frames of the guest reach the TCP/IP stack:
// well-formed ARP for the gateway and IP from the guest's own addresses.
// Everything else is dropped.
type frameFilter struct {
	guest, gateway   netip.Addr
	guest6, gateway6 netip.Addr // zero means no IPv6
	mac              []byte     // of the gateway
}

// frameVerdict is the decision about a frame: it passes or is dropped. A drop
// is recorded if rule is not empty.
type frameVerdict struct {
	pass  bool
	rule  string
	proto egress.Proto
	dst   netip.AddrPort

	echo   *echo      // an echo request, to be decided on
	refuse []byte     // the packet for which the guest gets a "prohibited" error
	asks   netip.Addr // the sender of a request for the gateway's MAC, and its MAC
	card   [6]byte
}

// check decides on one frame of at least etherHeader bytes.
func (f *frameFilter) check(frame []byte) frameVerdict {
	dst, src, payload := frame[:6], frame[6:12], frame[etherHeader:]
	if src[0]&1 != 0 && !egress.Dropped(frameGroup) { // no device sends from a group address
		return frameVerdict{}
	}
	switch binary.BigEndian.Uint16(frame[12:14]) {
	case typeARP:
		return frameVerdict{pass: f.checkARP(dst, src, payload)}
	case typeIPv4:
		return f.checkIPv4(dst, payload)
	case typeIPv6:
		if !f.guest6.IsValid() {
			return frameVerdict{}
		}
		return f.checkIPv6(dst, src, payload)
	default:
		return frameVerdict{}
	}
}

func (f *frameFilter) addressedToUs(dst []byte) bool {
	return bytes.Equal(dst, f.mac) || bytes.Equal(dst, broadcastMAC)
}

func (f *frameFilter) checkARP(dst, src, p []byte) bool {
	const ethernetIPv4 = "\x00\x01\x08\x00\x06\x04"
	if !f.addressedToUs(dst) || len(p) < arpSize || string(p[:6]) != ethernetIPv4 {
		return false
	}
	op := binary.BigEndian.Uint16(p[6:8])
	senderIP, _ := netip.AddrFromSlice(p[14:18])
	targetIP, _ := netip.AddrFromSlice(p[24:28])
	return (op == 1 || op == 2) && bytes.Equal(p[8:14], src) && senderIP == f.guest && targetIP == f.gateway
}

func (f *frameFilter) checkIPv4(dstMAC, p []byte) frameVerdict {
	// All options are rejected: only source routes were ever used.
	if len(p) < ipv4Header || p[0] != 0x45 && !egress.Dropped(frameOptions) {
		return frameVerdict{}
	}
	total := int(binary.BigEndian.Uint16(p[2:4]))
	src, _ := netip.AddrFromSlice(p[12:16])
	dst, _ := netip.AddrFromSlice(p[16:20])
	if total < ipv4Header || total > len(p) || src != f.guest && !egress.Dropped(frameSource) || dst == f.guest {
		return frameVerdict{}
	}
	v := frameVerdict{dst: netip.AddrPortFrom(dst, 0)}
	switch p[9] {
	case protoTCP:
		v.proto = egress.TCP
	case protoUDP:
		v.proto = egress.UDP
	case protoICMP:
		v.proto = egress.ICMP
	default:
		v.proto, v.rule = protoName(p[9]), egress.RuleProtocol
		return v
	}
	if dst == f.gateway {
		v.pass = f.addressedToUs(dstMAC)
		return v
	}
	return f.checkOutbound(v, dstMAC, p, total)
}

// checkOutbound decides on a packet to an address other than the gateway. TCP
// and UDP pass, and are later denied or become a flow; the stack drops some
// addresses before that, and those are recorded here.
func (f *frameFilter) checkOutbound(v frameVerdict, dstMAC, p []byte, total int) frameVerdict {
	dst := v.dst.Addr()
	if v.proto != egress.ICMP && total >= ipv4Header+4 && binary.BigEndian.Uint16(p[6:8])&0x1fff == 0 {
		v.dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(p[ipv4Header+2:ipv4Header+4]))
	}
	rule, denied := egress.AlwaysDenied(dst)
	switch {
	case rule == egress.RuleMulticast, rule == egress.RuleBroadcast:
		v.rule = rule
	case rule == egress.RuleUnspecified, rule == egress.RuleLoopback, v.proto == egress.ICMP && denied:
		v.rule, v.refuse = rule, p[:total]
	case !f.addressedToUs(dstMAC):
	case v.proto == egress.ICMP:
		whole := binary.BigEndian.Uint16(p[6:8])&0x3fff == 0
		if whole && checksum.Checksum(p[ipv4Header:total], 0) == 0xffff {
			v.echo = parseEcho(dst, p[:total], ipv4Header)
		}
		if v.echo == nil {
			v.rule = egress.RuleProtocol
		}
	default:
		v.pass = true
	}
	return v
}

func protoName(number byte) egress.Proto { return egress.Proto("ip-" + strconv.Itoa(int(number))) }

// filter returns the frame filter, connected to the stack and the audit. The
// result must be used by one goroutine only.
func (n *Network) filter() func(frame []byte) bool {
	f := &frameFilter{guest: n.cfg.Guest, gateway: n.cfg.Gateway, mac: n.cfg.MAC}
	if !n.cfg.NoIPv6 {
		f.guest6, f.gateway6 = n.cfg.Guest6, n.cfg.Gateway6
	}
	var card [6]byte
	return func(frame []byte) bool {
		v := f.check(frame)
		if v.rule != "" {
			n.deny(v.proto, v.dst, v.rule)
		}
		if src := [6]byte(frame[6:12]); (v.pass || v.echo != nil || v.refuse != nil) && v.dst.IsValid() && src != card {
			// The guest's packets contain its MAC, so the stack need not ask
			// for it. Otherwise the stack would send a request with any
			// address that it answers for as source.
			card = src
			n.learn(card)
		}
		switch {
		case v.echo != nil:
			n.handleEcho(v.echo)
		case v.refuse != nil:
			n.unreachable(v.dst.Addr(), v.refuse, true)
		case v.asks.IsValid():
			n.advertise(v.asks, v.card)
		}
		return v.pass
	}
}

// afterHold returns a filter that drops every frame before Config.Hold is closed.
func (n *Network) afterHold(pass func(frame []byte) bool) func(frame []byte) bool {
	if n.cfg.Hold == nil {
		return pass
	}
	return func(frame []byte) bool {
		select {
		case <-n.cfg.Hold:
			return pass(frame)
		default:
			return false
		}
	}
}

func (n *Network) learn(card [6]byte) {
	n.guestCard.Store(&card)
	err := n.stack.AddStaticNeighbor(nicID, ipv4.ProtocolNumber, toStack(n.cfg.Guest), tcpip.LinkAddress(card[:]))
	if err == nil && !n.cfg.NoIPv6 {
		err = n.stack.AddStaticNeighbor(nicID, ipv6.ProtocolNumber, toStack(n.cfg.Guest6), tcpip.LinkAddress(card[:]))
	}
	if err != nil {
		n.log.Error("cannot detect the guest's network card", "err", err.String())
	}
}
