package vnet_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

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
