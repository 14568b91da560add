package nft

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// onBridge returns a configuration for sockets that only receive from the
// bridge, and that may be opened before the bridge has its address.
func (m *Manager) onBridge() net.ListenConfig {
	return net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		ctlErr := c.Control(func(fd uintptr) {
			err = errors.Join(
				unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, m.opts.Config.Bridge),
				unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1))
		})
		return errors.Join(ctlErr, err)
	}}
}

// originalDst returns the address that a redirected connection was dialled to.
// For a connection that was not redirected it is the proxy's own address,
// which no policy allows.
func originalDst(conn net.Conn) (netip.AddrPort, error) {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return netip.AddrPort{}, errors.New("not a socket")
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	const soOriginalDst = 80 // for both families; not in package unix
	var out netip.AddrPort
	var getErr error
	local, err := netip.ParseAddrPort(conn.LocalAddr().String())
	if err != nil {
		return netip.AddrPort{}, err
	}
	err = raw.Control(func(fd uintptr) {
		if local.Addr().Unmap().Is4() {
			// A struct sockaddr_in fits into the structure of this
			// call.
			var r *unix.IPv6Mreq
			if r, getErr = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, soOriginalDst); getErr == nil {
				b := r.Multiaddr
				out = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), uint16(b[2])<<8|uint16(b[3]))
			}
			return
		}
		var r *unix.IPv6MTUInfo
		if r, getErr = unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, soOriginalDst); getErr == nil {
			out = netip.AddrPortFrom(netip.AddrFrom16(r.Addr.Addr), r.Addr.Port>>8|r.Addr.Port<<8)
		}
	})
	return out, errors.Join(err, getErr)
}

// watch updates the rules after changes of the bridge's ports, of the host's
// addresses and of AgentLab's tables. It fails if the bridge was replaced:
// sockets stay bound to the bridge on which they were opened.
func (m *Manager) watch(ctx context.Context, bridge int) error {
	links, addrs := make(chan netlink.LinkUpdate, 64), make(chan netlink.AddrUpdate, 64)
	if err := netlink.LinkSubscribe(links, ctx.Done()); err != nil {
		return err
	}
	if err := netlink.AddrSubscribe(addrs, ctx.Done()); err != nil {
		return err
	}
	removed, err := tablesRemoved(ctx)
	if err != nil {
		return err
	}
	tick := time.NewTicker(cmp.Or(m.opts.every, reconcileEvery))
	defer tick.Stop()
	for round := 1; ; round++ {
		compare := round%compareEvery == 0
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-links:
			if !ok {
				links = nil
			}
		case _, ok := <-addrs:
			if !ok {
				addrs = nil
			}
		case <-removed: // the current tables may be another program's
			compare = true
		case <-tick.C:
		}
		if err := m.reconcile(ctx, compare); err != nil && ctx.Err() == nil {
			m.log.Error("the host's network rules could not be restored", "err", err)
		}
		if now := bridgeIndex(m.opts.Config.Bridge); now != 0 && now != bridge {
			return fmt.Errorf("%s was created again", m.opts.Config.Bridge)
		}
	}
}
