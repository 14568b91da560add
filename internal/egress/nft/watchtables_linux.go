package nft

import (
	"context"
	"encoding/binary"
	"os"

	"golang.org/x/sys/unix"
)

// tablesRemoved returns a channel that signals the removal of tables of any
// owner: a program that flushes all rules also removes AgentLab's. It is only
// a hint: a check every few seconds finds what it misses.
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
		defer f.Close()
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
			case out <- struct{}{}: // also after lost events
			default:
			}
			if err != nil && !lostMessages(err) {
				return
			}
		}
	}()
	return out, nil
}

// removesTable reports whether one of the messages is about the removal of a
// table.
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
