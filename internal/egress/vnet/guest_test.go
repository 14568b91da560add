package vnet_test

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
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
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestMain(m *testing.M) {
	if flows := os.Getenv(childEnv); flows != "" {
		childProcess(flows)
		return
	}
	goleak.VerifyTestMain(m)
}

var (
	guestMAC = net.HardwareAddr{0x52, 0x54, 0, 0x12, 0x34, 0x56}
	patience = guard.Patience
)

// lab is a Network, a guest on its link and a fake internet behind it.
type lab struct {
	*vnet.Network
	net   *fakenet.Net
	guest *guest
	audit *auditLog
	ended chan error // of Run
}

type labOption func(*vnet.Config)

// newLab starts a lab. Everything ends with the test, and leaks nothing.
func newLab(t testing.TB, options ...labOption) *lab {
	t.Helper()
	internet := fakenet.New()
	t.Cleanup(internet.Close)
	internet.Echo("echo.test")
	internet.Discard("echo.test")
	internet.Web("www.test")
	ours, theirs := linkPair(t)
	audit := &auditLog{changed: make(chan struct{}, 1)}
	cfg := vnet.Config{
		Link:   ours,
		Policy: policy(t, agentlab.NetworkNAT),
		Dialer: internet,
		Audit:  audit.add,
	}
	for _, o := range options {
		o(&cfg)
	}
	mtu := cfg.MTU
	if mtu == 0 {
		mtu = vnet.DefaultMTU
	}
	n, err := vnet.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{Network: n, net: internet, audit: audit, ended: make(chan error, 1)}
	go func() { l.ended <- n.Run(context.Background()) }()
	t.Cleanup(n.Close)
	l.guest = newGuest(t, theirs, mtu)
	return l
}

func policy(t testing.TB, mode string) *egress.Policy {
	t.Helper()
	p, err := egress.New(agentlab.Network{Mode: mode})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// linkPair is what lies between QEMU and the shim: a unix stream socket.
func linkPair(t testing.TB) (a, b net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	out := [2]net.Conn{}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "link")
		if out[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		t.Cleanup(func() { _ = out[i].Close() })
	}
	return out[0], out[1]
}

// guest is a whole guest network stack on the far end of the link, and a way
// to send frames that no honest stack would.
type guest struct {
	*stack.Stack
	link net.Conn
	seen chan []byte
}

func newGuest(t testing.TB, link net.Conn, mtu int) *guest {
	t.Helper()
	card := vnet.NewCard(link, mtu, guestMAC)
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{arp.NewProtocol, ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocolCUBIC, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	eth := ethernet.New(card.Endpoint())
	must := func(err tcpip.Error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(s.CreateNICWithOptions(1, eth, stack.NICOptions{QDisc: fifo.New(eth, 1, 2048)}))
	must(s.AddProtocolAddress(1, tcpip.ProtocolAddress{
		Protocol:          ipv4.ProtocolNumber,
		AddressWithPrefix: tcpip.AddrFrom4(vnet.DefaultGuest.As4()).WithPrefix(),
	}, stack.AddressProperties{}))
	must(s.AddProtocolAddress(1, tcpip.ProtocolAddress{
		Protocol:          ipv6.ProtocolNumber,
		AddressWithPrefix: tcpip.AddrFrom16(vnet.DefaultGuest6.As16()).WithPrefix(),
	}, stack.AddressProperties{}))
	lan6 := tcpip.AddressWithPrefix{Address: tcpip.AddrFrom16(vnet.DefaultGuest6.As16()), PrefixLen: 64}.Subnet()
	everywhere6 := tcpip.AddressWithPrefix{Address: tcpip.AddrFrom16([16]byte{})}.Subnet()
	lan, _ := tcpip.NewSubnet(tcpip.AddrFrom4([4]byte{10, 77, 0, 0}), tcpip.MaskFrom("\xff\xff\xff\x00"))
	everywhere, _ := tcpip.NewSubnet(tcpip.AddrFrom4([4]byte{}), tcpip.MaskFrom("\x00\x00\x00\x00"))
	s.SetRouteTable([]tcpip.Route{
		{Destination: lan, NIC: 1},
		{Destination: lan6, NIC: 1},
		{Destination: everywhere6, NIC: 1, Gateway: tcpip.AddrFrom16(vnet.DefaultGateway6.As16())},
		{Destination: everywhere, NIC: 1, Gateway: tcpip.AddrFrom4(vnet.DefaultGateway.As4())},
	})
	g := &guest{Stack: s, link: link, seen: make(chan []byte, 64)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = card.Receive(func(f []byte) {
			select {
			case g.seen <- slices.Clone(f):
			default:
			}
		})
	}()
	t.Cleanup(func() {
		card.Shut()
		<-done
		s.Destroy()
	})
	return g
}

func (g *guest) tcp(ctx context.Context, at netip.AddrPort) (*gonet.TCPConn, error) {
	return gonet.DialContextTCP(ctx, g.Stack, full(at), family(at))
}

func (g *guest) mustTCP(t testing.TB, at netip.AddrPort) *gonet.TCPConn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := g.tcp(ctx, at)
	if err != nil {
		t.Fatalf("connect to %s: %v", at, err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

func (g *guest) udp(t testing.TB, at netip.AddrPort) *gonet.UDPConn {
	t.Helper()
	to := full(at)
	c, err := gonet.DialUDP(g.Stack, nil, &to, family(at))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

func full(at netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: 1, Addr: tcpip.AddrFromSlice(at.Addr().AsSlice()), Port: at.Port()}
}

func family(at netip.AddrPort) tcpip.NetworkProtocolNumber {
	if at.Addr().Is6() {
		return ipv6.ProtocolNumber
	}
	return ipv4.ProtocolNumber
}

// echo6 is an address of AS112 for tests of IPv6.
var echo6 = netip.MustParseAddr("2620:4f:8000::7")

// send puts one raw frame on the link.
func (g *guest) send(t testing.TB, frame []byte) {
	t.Helper()
	if _, err := g.link.Write(framed(frame)); err != nil {
		t.Fatal(err)
	}
}

func framed(frame []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)
}

// sees waits for a frame from the Network for which f answers true.
func (g *guest) sees(t testing.TB, what string, f func(frame []byte) bool) {
	t.Helper()
	limit := time.After(patience)
	for {
		select {
		case frame := <-g.seen:
			if f(frame) {
				return
			}
		case <-limit:
			t.Fatalf("the guest never sees %s", what)
		}
	}
}

// decision is an audit record with an address that can be compared.
type decision struct {
	Time           time.Time
	Proto          egress.Proto
	Name           string
	Addr           netip.AddrPort
	Allow          bool
	Rule, Error    string
	Count, Dropped int
}

// auditLog collects decisions.
type auditLog struct {
	mu      sync.Mutex
	all     []decision
	changed chan struct{}
}

func (a *auditLog) add(r agentlab.EgressRecord) {
	d := decision{Time: r.Time, Proto: egress.Proto(r.Proto), Name: r.Name, Allow: r.Allow, Rule: r.Rule, Error: r.Error, Count: r.Count, Dropped: r.Dropped}
	if addr, err := netip.ParseAddr(r.Addr); err == nil {
		d.Addr = netip.AddrPortFrom(addr, uint16(r.Port))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, d)
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

func (a *auditLog) find(f func(decision) bool) (decision, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, d := range a.all {
		if f(d) {
			return d, true
		}
	}
	return decision{}, false
}

// wait returns the first decision for which f answers true.
func (a *auditLog) wait(t testing.TB, what string, f func(decision) bool) decision {
	t.Helper()
	limit := time.After(patience)
	for {
		if d, ok := a.find(f); ok {
			return d
		}
		select {
		case <-a.changed:
		case <-limit:
			t.Fatalf("no decision is recorded for %s", what)
		}
	}
}

// eventually polls a condition that has no channel to wait on.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	limit := time.After(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("it never happens that %s", what)
		}
	}
}

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

func gateway(port uint16) netip.AddrPort { return at(vnet.DefaultGateway, port) }
