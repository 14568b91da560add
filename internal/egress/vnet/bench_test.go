package vnet_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// The figures include the guest's stack, which runs in the same process.
func BenchmarkThroughput(b *testing.B) {
	for _, mtu := range []int{1500, 8178, 9000, 16370, 65520} {
		for _, up := range []bool{true, false} {
			name := fmt.Sprintf("mtu=%d/to-guest", mtu)
			if up {
				name = fmt.Sprintf("mtu=%d/from-guest", mtu)
			}
			b.Run(name, func(b *testing.B) { benchmarkThroughput(b, mtu, up) })
		}
	}
}

func benchmarkThroughput(b *testing.B, mtu int, up bool) {
	l := newLab(b, func(c *vnet.Config) { c.MTU = mtu })
	const block = 64 << 10
	source := l.net.HandleTCP("bulk.test", 1, func(c net.Conn) {
		buf := make([]byte, block)
		for {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	})
	b.SetBytes(block)
	buf := make([]byte, block)
	if up {
		c := mustDial(b, l, at(l.net.Host("echo.test"), 9).String())
		b.ResetTimer()
		for range b.N {
			if _, err := c.Write(buf); err != nil {
				b.Fatal(err)
			}
		}
		_ = c.CloseWrite()
		_, _ = io.ReadAll(c) // the count, so that all has arrived
	} else {
		c := mustDial(b, l, source.String())
		b.ResetTimer()
		for range b.N {
			if _, err := io.ReadFull(c, buf); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.StopTimer()
}

func mustDial(b *testing.B, l *lab, addr string) *gonet.TCPConn {
	b.Helper()
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		b.Fatal(err)
	}
	c, err := l.guest.tcp(context.Background(), a.AddrPort())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	return c
}

// BenchmarkConnect is one connection, one byte there and back, and its close.
func BenchmarkConnect(b *testing.B) {
	l := newLab(b)
	echo := at(l.net.Host("echo.test"), 7)
	var one [1]byte
	for range b.N {
		c, err := l.guest.tcp(context.Background(), echo)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := c.Write(one[:]); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(c, one[:]); err != nil {
			b.Fatal(err)
		}
		_ = c.Close()
	}
}

const idleEnv = "VNET_TEST_IDLE"

// idleProcess is a shim's network and nothing else: it starts, reports its
// own memory and ends. The link is its standard input.
func idleProcess() {
	p, err := egress.New(agentlab.Network{Mode: agentlab.NetworkNAT})
	if err != nil {
		panic(err)
	}
	link, err := net.FileConn(os.Stdin)
	if err != nil {
		panic(err)
	}
	n, err := vnet.New(vnet.Config{Link: link, Policy: p})
	if err != nil {
		panic(err)
	}
	go func() {
		debug.FreeOSMemory()
		status, _ := os.ReadFile("/proc/self/status")
		for line := range strings.Lines(string(status)) {
			if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				fmt.Println(strings.Fields(rest)[0])
			}
		}
		n.Close()
	}()
	_ = n.Run(context.Background())
}

func TestIdleMemory(t *testing.T) {
	t.Parallel()
	ours, _ := linkPair(t)
	f, err := ours.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), idleEnv+"=1")
	cmd.Stdin = f
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	kb, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("an idle network takes %d kB", kb)
	if raceEnabled {
		return // the detector's shadow memory is not ours
	}
	if kb > 20<<10 {
		t.Errorf("an idle network takes %d kB, which leaves a shim no room in 25 MB", kb)
	}
}
