package gate

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// leavesHost reports whether the kernel would route packets to a out of the
// host to one receiver. It would not for an address that is local only by a
// route ("ip route add local …", which no interface lists), nor for a
// broadcast address. An error is one that a dial would return too, or means
// that the kernel could not be asked.
//
// The local address of a connected socket is not sufficient: if the route has
// a preferred source, and always with IPv6, it is not the address dialled.
func leavesHost(a netip.Addr) (bool, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	// The kernel answers within the call. If it does not, the flow must
	// fail instead of waiting.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		return false, os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Sendto(fd, routeRequest(a), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return false, os.NewSyscallError("sendto", err)
	}
	reply := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, reply, 0)
	if err != nil {
		return false, os.NewSyscallError("recvfrom", err)
	}
	kind, err := routeKind(reply[:n])
	return kind == unix.RTN_UNICAST, err
}

// routeRequest returns the request for the route to a: a header, a struct
// rtmsg, and one attribute.
func routeRequest(a netip.Addr) []byte {
	ip, family := a.AsSlice(), byte(unix.AF_INET)
	if a.Is6() {
		family = unix.AF_INET6
	}
	const attr = unix.SizeofNlMsghdr + unix.SizeofRtMsg
	b := make([]byte, attr+unix.SizeofRtAttr+len(ip))
	ne := binary.NativeEndian
	ne.PutUint32(b, uint32(len(b)))
	ne.PutUint16(b[4:], unix.RTM_GETROUTE)
	ne.PutUint16(b[6:], unix.NLM_F_REQUEST)
	b[unix.SizeofNlMsghdr] = family
	b[unix.SizeofNlMsghdr+1] = byte(len(ip) * 8)
	ne.PutUint16(b[attr:], uint16(unix.SizeofRtAttr+len(ip)))
	ne.PutUint16(b[attr+2:], unix.RTA_DST)
	copy(b[attr+unix.SizeofRtAttr:], ip)
	return b
}

// routeKind returns rtm_type of the answer.
func routeKind(b []byte) (byte, error) {
	if len(b) >= unix.SizeofNlMsghdr+unix.SizeofRtMsg {
		switch ne := binary.NativeEndian; ne.Uint16(b[4:]) {
		case unix.RTM_NEWROUTE:
			return b[unix.SizeofNlMsghdr+7], nil
		case unix.NLMSG_ERROR:
			if errno := int32(ne.Uint32(b[unix.SizeofNlMsghdr:])); errno < 0 {
				return 0, os.NewSyscallError("route", unix.Errno(-errno))
			}
		}
	}
	return 0, errors.New("invalid answer of the kernel about a route")
}
