package fakenet

import (
	"context"
	"net"
	"net/netip"
	"strconv"
)

// DialPrivate implements gate.PrivateDialer.
func (n *Net) DialPrivate(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	return n.DialContext(ctx, "tcp", to.String())
}

// DialHost implements gate.PrivateDialer.
func (n *Net) DialHost(ctx context.Context, port uint16) (net.Conn, error) {
	return n.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
}
