package netlab

import (
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab/test/guard"
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
	ctx := guard.Context(t)
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

// Processes that a test left behind end with it.
func TestNothingRemainsAfterClose(t *testing.T) {
	if !IsInside(t) {
		mark := filepath.Join(t.TempDir(), "mark")
		t.Setenv("NETLAB_TEST_MARK", mark)
		if Inside(t) {
			return
		}
		if held, err := os.ReadFile(mark); err != nil || len(held) == 0 {
			t.Fatalf("the test did not run: %v", err)
		}
		f, err := os.OpenFile(mark, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			t.Errorf("a process is left that holds the file: %v", err)
		}
		return
	}
	Inside(t)
	cmd := exec.Command("setsid", "flock", os.Getenv("NETLAB_TEST_MARK"), "sh", "-c", "echo held > $NETLAB_TEST_MARK; sleep 600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for {
		if held, err := os.ReadFile(os.Getenv("NETLAB_TEST_MARK")); err == nil && len(held) > 0 {
			return
		}
		runtime.Gosched()
	}
}
