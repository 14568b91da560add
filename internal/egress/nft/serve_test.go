//go:build linux

package nft

import (
	"errors"
	"net"
	"testing"
)

// failing is a listener that fails for good.
type failing struct{ net.Listener }

func (failing) Accept() (net.Conn, error) { return nil, errors.New("failed") }

// When the proxy ends its port is free, so that it can be started again.
func TestFailedProxyFreesItsPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &Manager{}
	if err := m.serveProxy(t.Context(), failing{l}); err == nil {
		t.Error("no error")
	}
	if l, err = net.Listen("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}
