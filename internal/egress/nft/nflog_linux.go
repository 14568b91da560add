package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// Constants of linux/netfilter/nfnetlink_log.h.
const (
	nflogSubsystem = 4
	nflogPacket    = 0
	nflogConfig    = 1
	cfgCommand     = 1 // attribute: one byte
	cfgMode        = 2 // attribute: range in four bytes, mode in one
	commandBind    = 1
	modePacket     = 2
	attrPayload    = 9
	attrPrefix     = 10
	// headBytes of a packet are enough for its addresses and ports.
	headBytes = 128
)

// auditLog reads the kernel's log of decisions until ctx ends.
func (m *Manager) auditLog(ctx context.Context) error {
	fd, err := openLog(m.opts.Config.LogGroup)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "nflog")
	stop := context.AfterFunc(ctx, func() { _ = f.Close() })
	defer stop()
	defer f.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := f.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && lostMessages(err):
			m.log.Warn("too many network decisions; some are not recorded")
			continue
		case err != nil:
			return err
		}
		for msg := range messages(buf[:n]) {
			m.recordLogged(msg)
		}
	}
}

// lostMessages reports whether a socket lost messages but still works.
func lostMessages(err error) bool { return errors.Is(err, unix.ENOBUFS) }

func openLog(group uint16) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return -1, os.NewSyscallError("netlink socket", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return -1, os.NewSyscallError("netlink bind", err)
	}
	mode := binary.BigEndian.AppendUint32(nil, headBytes)
	for _, attr := range [][]byte{attribute(cfgCommand, []byte{commandBind}), attribute(cfgMode, append(mode, modePacket, 0))} {
		if err := unix.Sendto(fd, logRequest(group, attr), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return -1, os.NewSyscallError("netlink send", err)
		}
	}
	return fd, nil
}

func attribute(kind uint16, data []byte) []byte {
	ne := binary.NativeEndian
	out := ne.AppendUint16(nil, uint16(4+len(data)))
	out = append(ne.AppendUint16(out, kind), data...)
	return append(out, make([]byte, -len(data)&3)...)
}

func logRequest(group uint16, attr []byte) []byte {
	ne := binary.NativeEndian
	out := ne.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+4+len(attr)))
	out = ne.AppendUint16(out, nflogSubsystem<<8|nflogConfig)
	out = ne.AppendUint16(out, unix.NLM_F_REQUEST)
	out = append(out, make([]byte, 8)...)
	out = append(out, unix.AF_UNSPEC, 0) // then the group, in network order
	return append(binary.BigEndian.AppendUint16(out, group), attr...)
}

// logged is one packet that a rule logged.
type logged struct {
	prefix string
	packet []byte
}

// messages parses packets from data of the netlink socket. It skips incomplete
// ones.
func messages(b []byte) func(yield func(logged) bool) {
	return func(yield func(logged) bool) {
		ne := binary.NativeEndian
		for len(b) >= unix.SizeofNlMsghdr {
			size := int(ne.Uint32(b))
			if size < unix.SizeofNlMsghdr || size > len(b) {
				return
			}
			kind, body := ne.Uint16(b[4:]), b[unix.SizeofNlMsghdr:size]
			if kind == nflogSubsystem<<8|nflogPacket && len(body) > 4 && !yield(attributes(body[4:])) {
				return
			}
			b = b[min(len(b), (size+3)&^3):]
		}
	}
}

func attributes(b []byte) logged {
	var out logged
	for len(b) >= 4 {
		size, kind := int(binary.NativeEndian.Uint16(b)), binary.NativeEndian.Uint16(b[2:])
		if size < 4 || size > len(b) {
			break
		}
		switch data := b[4:size]; kind {
		case attrPrefix:
			out.prefix = strings.TrimRight(string(data), "\x00")
		case attrPayload:
			out.packet = data
		}
		b = b[min(len(b), (size+3)&^3):]
	}
	return out
}

// recordLogged writes an audit record of a logged packet.
func (m *Manager) recordLogged(l logged) {
	verb, rule, ok := strings.Cut(l.prefix, " ")
	src, flow, ok2 := packetFlow(l.packet)
	if !ok || !ok2 {
		return
	}
	x := m.sandboxAt(src)
	if x == nil {
		return
	}
	r := agentlab.EgressRecord{
		Proto: string(flow.Proto), Addr: flow.Dst.Addr().Unmap().String(), Port: int(flow.Dst.Port()),
		Allow: verb == "allow", Rule: rule,
	}
	m.mu.Lock()
	flow.Names = x.learned(flow.Dst.Addr(), m.opts.Now()).Names
	m.mu.Unlock()
	if len(flow.Names) > 0 {
		r.Name = strings.TrimSuffix(flow.Names[0], ".")
	}
	if inner, denied := egress.AlwaysDenied(flow.Dst.Addr()); denied && byRange(rule) {
		r.Rule = inner // the rule of the embedded address
	}
	if rule == rulePolicy {
		// The kernel's log has the decision, the policy has the rule. If
		// they differ, the record has the name of a kernel rule.
		if v := x.Policy.Decide(flow); v.Allow == r.Allow {
			r.Rule = v.Rule
		}
	}
	x.gate.Record(r)
}

// byRange reports whether a rule is one of the ranges that no policy can
// allow.
func byRange(rule string) bool {
	return slices.ContainsFunc(egress.Denials(), func(d egress.Denial) bool { return d.Rule == rule })
}

// packetFlow reads source and destination of an IP packet's first bytes.
func packetFlow(b []byte) (src netip.Addr, f egress.Flow, ok bool) {
	if len(b) == 0 {
		return src, f, false
	}
	var proto byte
	var dst netip.Addr
	switch {
	case b[0]>>4 == 4 && len(b) >= 20:
		src, dst, proto = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20])), b[9]
		b = b[min(len(b), int(b[0]&15)*4):]
	case b[0]>>4 == 6 && len(b) >= 40: // packets with extension headers are dropped before
		src, dst, proto = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40])), b[6]
		b = b[40:]
	default:
		return src, f, false
	}
	var port uint16
	switch proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		f.Proto = map[byte]egress.Proto{unix.IPPROTO_TCP: egress.TCP, unix.IPPROTO_UDP: egress.UDP}[proto]
		if len(b) >= 4 {
			port = binary.BigEndian.Uint16(b[2:])
		}
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		f.Proto = egress.ICMP
	default:
		f.Proto = egress.Proto(fmt.Sprintf("ip-%d", proto))
	}
	f.Dst = netip.AddrPortFrom(dst, port)
	return src, f, true
}
