package prober

import (
	"bufio"
	"bytes"
	"context"
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
	defer f.Close()
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
