package gate

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

const (
	icmpHeader   = 8
	echoRequest4 = 8
	echoRequest6 = 128
	echoReply4   = 0
	echoReply6   = 129
)

// dialICMP opens an unprivileged ICMP socket, on which the kernel allows echo
// requests and nothing else, to a checked address.
func (h *HostDialer) dialICMP(ctx context.Context, a netip.Addr) (net.Conn, error) {
	a = a.Unmap()
	if err := h.check(ctx, a); err != nil {
		return nil, err
	}
	family, proto := unix.AF_INET, unix.IPPROTO_ICMP
	var to unix.Sockaddr = &unix.SockaddrInet4{Addr: [4]byte(a.AsSlice()[:4])}
	if a.Is6() {
		family, proto = unix.AF_INET6, unix.IPPROTO_ICMPV6
		to = &unix.SockaddrInet6{Addr: a.As16()}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the host does not let this user send pings: %w", err).
			WithHint("set the sysctl net.ipv4.ping_group_range so that it includes the user's group")
	}
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "icmp")
	defer closeQuietly(f)
	if err := unix.Connect(fd, to); err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return &icmpConn{Conn: conn, ipv6: a.Is6()}, nil
}

// icmpConn adds headers to the data of echo requests. The kernel sets
// identifier and checksum, and returns only replies to this socket.
type icmpConn struct {
	net.Conn
	ipv6 bool
	seq  uint16
}

// Write sends one echo request.
func (c *icmpConn) Write(p []byte) (int, error) {
	b := make([]byte, icmpHeader, icmpHeader+len(p))
	b[0] = echoRequest4
	if c.ipv6 {
		b[0] = echoRequest6
	}
	c.seq++
	binary.BigEndian.PutUint16(b[6:], c.seq)
	n, err := c.Conn.Write(append(b, p...))
	return max(n-icmpHeader, 0), err
}

// Read reads the data of one echo reply.
func (c *icmpConn) Read(p []byte) (int, error) {
	b := make([]byte, icmpHeader+len(p))
	for {
		n, err := c.Conn.Read(b)
		if err != nil {
			return 0, err
		}
		if n >= icmpHeader && (b[0] == echoReply4 && !c.ipv6 || b[0] == echoReply6 && c.ipv6) {
			return copy(p, b[icmpHeader:n]), nil
		}
	}
}
