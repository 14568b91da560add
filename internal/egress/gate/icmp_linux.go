package gate

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
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
