package nft

import (
	"context"
	"encoding/binary"
	"os"

	"golang.org/x/sys/unix"
)

// tablesRemoved tells of tables of any owner that go, as they go: a program
// that flushes all rules opens what ours close. It is a hint: what it misses
// is seen by looking every few seconds.
func tablesRemoved(ctx context.Context) (<-chan struct{}, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, os.NewSyscallError("netlink socket", err)
	}
	f := os.NewFile(uintptr(fd), "nftables events")
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)}); err != nil {
		_ = f.Close()
		return nil, os.NewSyscallError("netlink bind", err)
	}
	out := make(chan struct{}, 1)
	stop := context.AfterFunc(ctx, func() { _ = f.Close() })
	go func() {
		defer stop()
		defer f.Close() //nolint:errcheck // only read from
		buf := make([]byte, 64<<10)
		for {
			n, err := f.Read(buf)
			if ctx.Err() != nil {
				return
			}
			if err == nil && !removesTable(buf[:n]) {
				continue
			}
			select {
			case out <- struct{}{}: // also when events were lost
			default:
			}
			if err != nil && !overrun(err) {
				return
			}
		}
	}()
	return out, nil
}

// removesTable tells whether one of the messages is of a table that goes.
func removesTable(b []byte) bool {
	ne := binary.NativeEndian
	for len(b) >= unix.SizeofNlMsghdr {
		size := int(ne.Uint32(b))
		if size < unix.SizeofNlMsghdr || size > len(b) {
			return false
		}
		if ne.Uint16(b[4:]) == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_DELTABLE {
			return true
		}
		b = b[min(len(b), (size+3)&^3):]
	}
	return false
}
