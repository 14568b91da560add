package netlab

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"os"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	Main()
	os.Exit(m.Run())
}

// A host with an uplink reaches names and services of the internet behind it,
// and nothing else.
func TestPeers(t *testing.T) {
	if !Inside(t) {
		return
	}
	Sh(t, "ip link add vmbr0 type bridge; ip addr add 192.168.1.2/24 dev vmbr0; ip link set vmbr0 up; ip route add default via 192.168.1.1")
	inet := NewPeer(t, "inet0", "vmbr0", "192.168.1.1/24")
	lan := NewPeer(t, "lan0", "vmbr0", "192.168.1.50/24")
	if err := lan.Net.ProbeWorld(); err != nil {
		t.Fatal(err)
	}
	inet.Net.HandleHTTP("web.example.com", 80, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) }))
	Resolver(t, netip.MustParseAddr("192.31.196.200"))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	resolver := net.Resolver{PreferGo: true}
	addrs, err := resolver.LookupHost(ctx, "web.example.com")
	if err != nil || len(addrs) != 1 {
		t.Fatal(addrs, err)
	}
	for _, target := range []string{addrs[0] + ":80", "192.168.1.50:80"} {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", target)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte("GET / HTTP/1.0\r\n\r\n"))
		if n, err := conn.Read(make([]byte, 100)); n == 0 {
			t.Errorf("%s: %v", target, err)
		}
		_ = conn.Close()
	}
	if flows := lan.Net.Outside().Flows; len(flows) != 1 || flows[0].Addr.String() != "192.168.1.50" {
		t.Errorf("the LAN saw %v", flows)
	}
}
