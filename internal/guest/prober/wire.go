package prober

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	etherHeader = 14
	arpPause    = 50 * time.Millisecond
	echoID      = 0xa91a
)

// wire sends whole Ethernet frames on the interface of the default route.
type wire struct {
	mu      sync.Mutex
	fd      int
	addr    unix.SockaddrLinklayer
	own     net.HardwareAddr
	gateway net.HardwareAddr
	opened  bool
	failed  error
}

func (w *wire) send(ctx context.Context, frame []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.opened {
		w.opened = true
		w.failed = w.open(ctx)
	}
	if w.failed != nil {
		return w.failed
	}
	if len(frame) < etherHeader {
		return errors.New("a frame has at least 14 bytes")
	}
	f := bytes.Clone(frame)
	none := make([]byte, 6)
	if bytes.Equal(f[:6], none) {
		copy(f[:6], w.gateway)
	}
	if bytes.Equal(f[6:12], none) {
		copy(f[6:12], w.own)
	}
	return os.NewSyscallError("send a frame", unix.Sendto(w.fd, f, 0, &w.addr))
}

func (w *wire) open(ctx context.Context) error {
	name, gateway, err := defaultRoute()
	if err != nil {
		return err
	}
	card, err := net.InterfaceByName(name)
	if err != nil {
		return err
	}
	if w.gateway, err = neighbour(ctx, gateway); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open a packet socket (needs root)", err)
	}
	w.fd, w.own = fd, card.HardwareAddr
	w.addr = unix.SockaddrLinklayer{Ifindex: card.Index, Halen: 6}
	return nil
}

func (w *wire) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.opened && w.failed == nil {
		_ = unix.Close(w.fd)
	}
}

// defaultRoute finds the interface and the gateway of the IPv4 default route.
func defaultRoute() (name string, gateway netip.Addr, err error) {
	data, err := os.ReadFile("/proc/net/route")
	if err != nil {
		return "", netip.Addr{}, err
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) < 8 || f[1] != "00000000" || f[7] != "00000000" {
			continue
		}
		b, err := hex.DecodeString(f[2])
		if err != nil || len(b) != 4 {
			continue
		}
		var a [4]byte // the kernel prints the address as a number in native byte order
		binary.NativeEndian.PutUint32(a[:], binary.BigEndian.Uint32(b))
		return f[0], netip.AddrFrom4(a), nil
	}
	return "", netip.Addr{}, errors.New("there is no default route, so no gateway to send frames to")
}

// neighbour makes the kernel resolve the MAC address of an address and returns
// it.
func neighbour(ctx context.Context, a netip.Addr) (net.HardwareAddr, error) {
	var d net.Dialer
	tick := time.NewTicker(arpPause)
	defer tick.Stop()
	for {
		if mac, ok := arpEntry(a); ok {
			return mac, nil
		}
		if c, err := d.DialContext(ctx, "udp", netip.AddrPortFrom(a, 9).String()); err == nil {
			_, _ = c.Write([]byte(probeText))
			_ = c.Close()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("the gateway %s does not answer ARP", a)
		}
	}
}

func arpEntry(a netip.Addr) (net.HardwareAddr, bool) {
	f, err := os.Open("/proc/net/arp")
	if err != nil {
		return nil, false
	}
	defer f.Close() //nolint:errcheck // it was only read
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		w := strings.Fields(lines.Text())
		if len(w) < 4 || w[0] != a.String() || w[2] == "0x0" {
			continue
		}
		if mac, err := net.ParseMAC(w[3]); err == nil {
			return mac, true
		}
	}
	return nil, false
}

// ping sends an ICMP echo and waits for its reply. It needs root.
func (p *prober) ping(ctx context.Context, a *attempt) error {
	target, err := netip.ParseAddr(a.host)
	if err != nil {
		return err
	}
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if target.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, a.host)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing is left in it
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	// The reply to an earlier probe of the same address may still arrive.
	var seq [2]byte
	_, _ = rand.Read(seq[:]) // never fails
	m := append([]byte{request, 0, 0, 0, echoID >> 8, echoID & 0xff, seq[0], seq[1]}, probeText...)
	if target.Is4() { // the kernel does it for IPv6
		binary.BigEndian.PutUint16(m[2:], checksum(m))
	}
	if _, err := conn.Write(m); err != nil {
		return err
	}
	buf := make([]byte, 2048)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return err
		}
		b := buf[:n]
		if target.Is4() && n >= 20 && b[0]>>4 == 4 { // the kernel gives the IPv4 header too
			b = b[min(n, int(b[0]&0x0f)*4):]
		}
		if len(b) >= 8 && b[0] == reply && binary.BigEndian.Uint16(b[4:]) == echoID && b[6] == seq[0] && b[7] == seq[1] {
			return a.received([]byte("echo reply"))
		}
	}
}

func checksum(b []byte) uint16 {
	var s uint32
	for ; len(b) > 1; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s) //nolint:gosec // folded above
}
