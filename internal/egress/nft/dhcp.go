package nft

import (
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

const (
	dhcpServer, dhcpClient = 67, 68
	// dhcpLease is the lease time that a sandbox gets. Its address is in fact
	// valid as long as the sandbox is bound; a renewal costs two packets.
	dhcpLease = time.Hour
	// dhcpRate limits the requests of one sandbox per second. The nftables
	// rules enforce it, because they know the sender; a request may contain
	// any MAC.
	dhcpRate, dhcpBurst = 5, 20
	// dhcpAnswers limits the answers to one sandbox, regardless of the
	// sender of the requests.
	dhcpAnswers = 100
)

// dhcpLeases is the state of the DHCP server for a sandbox.
type dhcpLeases struct {
	limit *rate.Limiter
	acked netip.Addr // acknowledged by this process; zero means none yet
}

// listenDHCP opens the server's socket, which receives only from the bridge.
func (m *Manager) listenDHCP(ctx context.Context) (net.PacketConn, error) {
	lc := m.onBridge()
	return lc.ListenPacket(ctx, "udp4", netip.AddrPortFrom(netip.IPv4Unspecified(), dhcpServer).String())
}

// serveDHCP answers the requests of sandboxes that use DHCP, each with the
// address that it is bound to. It stores no leases: a release or decline of a
// sandbox changes nothing.
func (m *Manager) serveDHCP(ctx context.Context, conn net.PacketConn) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	defer conn.Close()
	buf := make([]byte, 1500)
	for {
		n, _, err := conn.ReadFrom(buf)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			if !gate.Pause(ctx, err) {
				return err
			}
			continue
		}
		answer, to := m.answerDHCP(buf[:n])
		if answer == nil {
			continue
		}
		// The neighbour entry of the address is permanent: no other sandbox
		// receives the answer, and no ARP request is needed for a sandbox
		// without an address.
		if _, err := conn.WriteTo(answer.ToBytes(), &net.UDPAddr{IP: to.AsSlice(), Port: dhcpClient}); err != nil {
			m.log.Debug("a DHCP answer was not sent", "to", to, "err", err)
		}
	}
}

// answerDHCP returns the answer to a request and its destination: the address
// of the sandbox with the MAC in the request. nil means that there is no
// answer.
func (m *Manager) answerDHCP(wire []byte) (*dhcpv4.DHCPv4, netip.Addr) {
	q, err := dhcpv4.FromBytes(wire)
	// Relayed requests do not come from the bridge.
	if err != nil || q.OpCode != dhcpv4.OpcodeBootRequest || len(q.ClientHWAddr) != 6 || !q.GatewayIPAddr.IsUnspecified() {
		return nil, netip.Addr{}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	x := m.askerOf(q.ClientHWAddr)
	if x == nil || !x.dhcp.limit.AllowN(m.opts.Now(), 1) {
		return nil, netip.Addr{}
	}
	c := m.opts.Config
	kind := dhcpv4.MessageTypeOffer
	switch q.MessageType() {
	case dhcpv4.MessageTypeDiscover:
	case dhcpv4.MessageTypeRequest:
		kind = dhcpv4.MessageTypeAck
		if id := q.ServerIdentifier(); id != nil && !id.Equal(c.Gateway4.AsSlice()) {
			return nil, netip.Addr{} // it accepted the offer of another server
		}
		wants := q.RequestedIPAddress()
		if wants == nil || wants.IsUnspecified() {
			wants = q.ClientIPAddr
		}
		if !wants.Equal(x.IPv4.AsSlice()) {
			kind = dhcpv4.MessageTypeNak
		}
	case dhcpv4.MessageTypeInform:
		kind = dhcpv4.MessageTypeAck
	default: // release and decline
		return nil, netip.Addr{}
	}
	answer, err := m.dhcpReply(q, x, kind)
	if err != nil {
		m.log.Debug("a DHCP question has no answer", "vmid", x.VMID, "err", err)
		return nil, netip.Addr{}
	}
	if kind == dhcpv4.MessageTypeAck {
		x.dhcp.acked = x.IPv4
	}
	return answer, x.IPv4
}

// askerOf returns the sandbox with that MAC that uses DHCP. The caller holds
// mu.
func (m *Manager) askerOf(mac net.HardwareAddr) *member {
	for _, x := range m.members {
		if x.DHCP && x.MAC.String() == mac.String() {
			return x
		}
	}
	return nil
}

// dhcpReply returns an answer of that type.
func (m *Manager) dhcpReply(q *dhcpv4.DHCPv4, x *member, kind dhcpv4.MessageType) (*dhcpv4.DHCPv4, error) {
	c := m.opts.Config
	gw := net.IP(c.Gateway4.AsSlice())
	opts := []dhcpv4.Modifier{
		dhcpv4.WithMessageType(kind),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(gw)),
	}
	if kind == dhcpv4.MessageTypeNak {
		return dhcpv4.NewReplyFromRequest(q, opts...)
	}
	opts = append(opts,
		dhcpv4.WithServerIP(gw),
		dhcpv4.WithNetmask(net.CIDRMask(c.Subnet4.Bits(), 32)),
		dhcpv4.WithRouter(gw), dhcpv4.WithDNS(gw))
	if q.MessageType() != dhcpv4.MessageTypeInform { // the sender of an inform already has an address
		opts = append(opts, dhcpv4.WithYourIP(x.IPv4.AsSlice()), dhcpv4.WithLeaseTime(uint32(dhcpLease/time.Second)))
	}
	return dhcpv4.NewReplyFromRequest(q, opts...)
}

// Lease returns the address that the DHCP server has acknowledged to a MAC
// since this process started; zero if none.
func (m *Manager) Lease(mac net.HardwareAddr) netip.Addr {
	m.mu.Lock()
	defer m.mu.Unlock()
	if x := m.askerOf(mac); x != nil {
		return x.dhcp.acked
	}
	return netip.Addr{}
}

// askDHCP matches the request of a sandbox that has no address yet.
const askDHCP = "ether saddr @dhcp ip saddr 0.0.0.0 ip daddr 255.255.255.255 udp sport 68 udp dport 67"
