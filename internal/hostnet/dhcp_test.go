//go:build linux

package hostnet

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/test/netlab"
)

const (
	// answered is how many times a guest asks that must have an answer. It waits for
	// one second, then twice as long each time: for a minute in all.
	answered = 6
	// refused is how many times a guest asks that must not have an answer.
	refused = 1
)

// lease asks for an address at most tries times, as the first thing that a guest does.
func (b *box) lease(mac net.HardwareAddr, tries int) (got *nclient4.Lease, err error) {
	b.w.Helper()
	var c *nclient4.Client
	b.in(func() {
		c, err = nclient4.New("eth0", nclient4.WithHWAddr(mac), nclient4.WithTimeout(time.Second), nclient4.WithRetry(tries))
	})
	if err != nil {
		b.w.Fatal(err)
	}
	defer c.Close()
	return c.Request(b.w.Context())
}

// A guest that may use DHCP gets its own address, and uses it; no other guest
// gets one.
func TestDHCP(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	ctx := t.Context()
	l := w.restored()
	must(t, l.Ready(ctx))
	asks, static, stranger := w.box(2, all), w.box(3, all), w.box(4, all)
	asks.DHCP = true
	must(t, l.Put(ctx, asks.Guest))
	must(t, l.Put(ctx, static.Guest))
	if a, err := l.Lease(ctx, asks.MAC); err != nil || a.IsValid() {
		t.Errorf("before it asked: %v, %v", a, err)
	}
	got, err := asks.lease(asks.MAC, answered)
	if err != nil {
		t.Fatal(err)
	}
	if ip := got.ACK.YourIPAddr.String(); ip != "10.77.0.2" {
		t.Errorf("the address is %s", ip)
	}
	if a, err := l.Lease(ctx, asks.MAC); err != nil || a != asks.IPv4 {
		t.Errorf("the lease is %v, %v", a, err)
	}
	asks.static()
	if !asks.reaches(site) {
		t.Error("with its address a guest reaches nothing")
	}
	for name, b := range map[string]*box{"bound to an address and not to ask": static, "no sandbox": stranger} {
		if other, err := b.lease(b.MAC, refused); err == nil {
			t.Errorf("who is %s got %v", name, other.ACK.YourIPAddr)
		}
	}
	// With the MAC of another, a question does not come through.
	if other, err := static.lease(asks.MAC, refused); err == nil {
		t.Errorf("with another's MAC: %v", other.ACK.YourIPAddr)
	}
	// A guest that renews asks the server by its address, from its own.
	asks.in(func() {
		conn, err := net.DialUDP("udp4", &net.UDPAddr{IP: asks.IPv4.AsSlice(), Port: 68}, &net.UDPAddr{IP: net.IPv4(10, 77, 0, 1), Port: 67})
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		q, _ := dhcpv4.NewRenewFromAck(got.ACK)
		_, _ = conn.Write(q.ToBytes())
		_ = conn.SetDeadline(time.Now().Add(longEnough))
		buf := make([]byte, 1500)
		n, err := conn.Read(buf)
		if err != nil {
			t.Errorf("a renewal has no answer: %v", err)
			return
		}
		if a, err := dhcpv4.FromBytes(buf[:n]); err != nil || a.MessageType() != dhcpv4.MessageTypeAck {
			t.Errorf("a renewal: %v, %v", a, err)
		}
	})
}

// A guest that sends endless requests in the name of another does not delay
// answers to others: each has its own limit.
func TestDHCPForAnother(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	ctx := t.Context()
	l := w.restored()
	must(t, l.Ready(ctx))
	victim, attacker := w.box(2, all), w.box(3, all)
	victim.DHCP, attacker.DHCP = true, true
	must(t, l.Put(ctx, victim.Guest))
	must(t, l.Put(ctx, attacker.Guest))
	q, err := dhcpv4.NewDiscovery(victim.MAC)
	must(t, err)
	stop, flooding, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	attacker.in(func() {
		lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1)
				_ = unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "eth0")
			})
		}}
		conn, err := lc.ListenPacket(ctx, "udp4", "0.0.0.0:68")
		if err != nil {
			t.Error(err)
			return
		}
		go func() {
			defer close(ended)
			defer conn.Close()
			for n := 0; !isClosed(stop); n++ {
				if _, err := conn.WriteTo(q.ToBytes(), &net.UDPAddr{IP: net.IPv4bcast, Port: 67}); err != nil {
					t.Error(err)
					return
				}
				if n == 2000 {
					close(flooding)
				}
			}
		}()
	})
	select {
	case <-flooding:
	case <-ended:
		t.FailNow()
	}
	_, err = victim.lease(victim.MAC, answered)
	close(stop)
	<-ended
	if err != nil {
		t.Errorf("while another asks in its name, a guest has no answer: %v", err)
	}
}
