package netguest

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/prober"
)

// envConfig makes a test's own program the guest.
const envConfig = "AGENTLAB_TEST_NETGUEST"

const card = "eth0"

// Guest is a running guest.
type Guest struct {
	// Link carries the card's Ethernet frames, each after its length as four
	// bytes in big-endian order.
	Link net.Conn

	mu  sync.Mutex
	in  io.WriteCloser
	out *bufio.Reader
}

// Main becomes the guest when this process was started as one; otherwise it
// returns at once. A TestMain calls it first.
func Main() {
	text := os.Getenv(envConfig)
	if text == "" {
		return
	}
	if err := guest(text); err != nil {
		fmt.Fprintln(os.Stderr, "netguest:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Start starts a guest for the length of the test. Where the machine allows
// neither namespaces nor tap devices the test is skipped, with the reason.
func Start(t testing.TB, cfg Config) *Guest {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "link")
	near := os.NewFile(uintptr(fds[0]), "link")
	link, err := net.FileConn(near)
	_ = near.Close()
	if err != nil {
		t.Fatal(err)
	}
	text, _ := json.Marshal(cfg)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), envConfig+"="+string(text))
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	in, errIn := cmd.StdinPipe()
	out, errOut := cmd.StdoutPipe()
	if err := errors.Join(errIn, errOut); err != nil {
		t.Fatal(err)
	}
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		t.Skipf("no network namespace can be made here: %v", err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = link.Close()
		_ = cmd.Wait()
	})
	g := &Guest{Link: link, in: in, out: bufio.NewReader(out)}
	switch line, err := g.out.ReadString('\n'); {
	case err != nil:
		t.Fatal("the guest did not start")
	case line != "ready\n":
		t.Skipf("no guest can be made here: %s", line)
	}
	return g
}

// Exec runs probes in the guest. It is a probe.Exec.
func (g *Guest) Exec(_ context.Context, probes []guestapi.Probe) ([]guestapi.ProbeResult, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := json.NewEncoder(g.in).Encode(probes); err != nil {
		return nil, err
	}
	line, err := g.out.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	var results []guestapi.ProbeResult
	return results, json.Unmarshal(line, &results)
}

// guest is the life of the guest's process.
func guest(text string) error {
	var cfg Config
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return err
	}
	tap, err := openTap()
	if err == nil {
		err = setUp(cfg)
	}
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		return nil
	}
	link := os.NewFile(3, "link")
	go fromCard(link, tap)
	go toCard(tap, link)
	fmt.Fprintln(os.Stdout, "ready")
	requests := json.NewDecoder(os.Stdin)
	for {
		var probes []guestapi.Probe
		if err := requests.Decode(&probes); err != nil {
			return nil //nolint:nilerr // the test is over
		}
		results := []guestapi.ProbeResult{}
		dns := net.JoinHostPort(cfg.Gateway.String(), "53")
		for r := range prober.Run(context.Background(), probes, dns) {
			results = append(results, r)
		}
		if err := json.NewEncoder(os.Stdout).Encode(results); err != nil {
			return err
		}
	}
}

func openTap() (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	var req struct {
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(req.name[:], card)
	req.flags = unix.IFF_TAP | unix.IFF_NO_PI
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return nil, fmt.Errorf("make a tap device: %w", errno)
	}
	return os.NewFile(uintptr(fd), "tap"), nil
}

func setUp(cfg Config) error {
	steps := [][]string{
		{"link", "set", "lo", "up"},
		{"link", "set", card, "mtu", strconv.Itoa(cfg.MTU), "up"},
		{"addr", "add", cfg.Address.String(), "dev", card},
		{"route", "add", "default", "via", cfg.Gateway.String()},
	}
	if cfg.Address6.IsValid() {
		steps = append(steps,
			[]string{"-6", "addr", "add", cfg.Address6.String(), "dev", card, "nodad"},
			[]string{"-6", "route", "add", "default", "via", cfg.Gateway6.String()})
	} else if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+card+"/disable_ipv6", []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, args := range steps {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %v: %w: %s", args, err, out)
		}
	}
	return nil
}

func fromCard(link io.Writer, tap io.Reader) {
	buf := make([]byte, 4+(64<<10))
	for {
		n, err := tap.Read(buf[4:])
		if err != nil {
			return
		}
		binary.BigEndian.PutUint32(buf, uint32(n))
		if _, err := link.Write(buf[:4+n]); err != nil {
			return
		}
	}
}

func toCard(tap io.Writer, link io.Reader) {
	buf := make([]byte, 64<<10)
	for {
		if _, err := io.ReadFull(link, buf[:4]); err != nil {
			return
		}
		size := binary.BigEndian.Uint32(buf)
		if size > uint32(len(buf)) {
			return
		}
		if _, err := io.ReadFull(link, buf[:size]); err != nil {
			return
		}
		_, _ = tap.Write(buf[:size]) // a card that is down takes nothing
	}
}
