package connlimit

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestConnectionLimit(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ll := New(l, 3, 2)
	accepted := make(chan net.Conn, 8)
	go func() {
		defer close(accepted)
		for {
			c, err := ll.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	dial := func() net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	dial()
	dial()
	one, two := <-accepted, <-accepted
	third := dial()
	_ = third.SetReadDeadline(time.Now().Add(guard.Patience))
	if _, err := third.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the third of one address: %v", err)
	}
	_, _ = one.Close(), one.Close() // a second close gives no second place
	dial()
	three := <-accepted
	_, _ = two.Close(), three.Close()
	_ = l.Close()
	for range accepted {
		t.Error("another connection was accepted")
	}
	if ll.open != 0 || len(ll.byHost) != 0 {
		t.Errorf("%d connections are counted, %v", ll.open, ll.byHost)
	}
}

// One network of IPv6, which one host can have all for itself, counts as one
// address; every IPv4 address is its own.
func TestConnectionsOfOneNetwork(t *testing.T) {
	l := New(nil, 100, 2)
	for _, test := range []struct {
		from string
		ok   bool
	}{
		{"[2001:db8:1:2::1]:1", true}, {"[2001:db8:1:2::2]:1", true}, {"[2001:db8:1:2:ffff::3]:1", false},
		{"[2001:db8:1:3::1]:1", true}, {"192.0.2.1:1", true}, {"192.0.2.1:2", true}, {"[::ffff:192.0.2.1]:3", false},
		{"192.0.2.2:1", true}, {"[fe80::1%eth0]:1", true}, {"[fe80::2%eth0]:1", true}, {"[fe80::3%eth0]:1", false},
	} {
		if got := l.acquire(Host(netip.MustParseAddrPort(test.from).Addr())); got != test.ok {
			t.Errorf("%s: %v", test.from, got)
		}
	}
}
