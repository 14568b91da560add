//go:build linux

package hostnet

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

// envAgent makes this program the agent of a node: the directory of its
// records.
const envAgent = "AGENTLAB_TEST_HOSTNET_AGENT"

func TestMain(m *testing.M) {
	netlab.Main()
	if dir := os.Getenv(envAgent); dir != "" {
		if err := ServeAgent(context.Background(), os.Stdin, os.Stdout, Config{Dir: dir}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(guard.Run(m))
}

// world is a host with a bridge and an uplink, in namespaces of the test.
type world struct {
	*testing.T
	internet *netlab.Peer
	dir      string
}

// site is an address of the internet.
const site = "192.31.196.20:8080"

func newWorld(t *testing.T) *world {
	t.Helper()
	netlab.Sh(t, "ip link add vmbr0 type bridge; ip addr add 192.168.1.2/24 dev vmbr0; ip link set vmbr0 up; ip route add default via 192.168.1.1")
	w := &world{T: t, internet: netlab.NewPeer(t, "inet0", "vmbr0", "192.168.1.1/24"), dir: t.TempDir()}
	if err := w.internet.Net.ProbeWorld(); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) bridge() {
	netlab.Sh(w, "ip link add vmbr1 type bridge; ip addr add 10.77.0.1/16 dev vmbr1; ip link set vmbr1 up")
}

func testNetwork() (nft.Config, error) {
	c := nft.Config{
		Bridge: "vmbr1", Subnet4: netip.MustParsePrefix("10.77.0.0/16"), Gateway4: netip.MustParseAddr("10.77.0.1"),
		Uplink: "vmbr0", GuestPorts: []uint16{8844, 8846}, ProxyPort: 8847, LogGroup: 77, DHCP: true,
	}
	return c, c.Validate()
}

// local is a process of the daemon, as far as the network knows.
func (w *world) local() *Local {
	l := New(Config{Network: testNetwork, Dir: filepath.Join(w.dir, "network"), Logger: slog.New(slog.NewTextHandler(w.Output(), nil))})
	l.Claim()
	w.Cleanup(func() {
		if err := l.Close(); err != nil {
			w.Error(err)
		}
	})
	return l
}

// restored is local on a new bridge without guests.
func (w *world) restored() *Local {
	w.Helper()
	w.bridge()
	l := w.local()
	must(w, l.Restore(w.Context(), nil))
	return l
}

// network is what a driver has of a node.
type network interface {
	Ready(ctx context.Context) error
	Put(ctx context.Context, g Guest) error
	Restore(ctx context.Context, guests []Guest) error
	Drop(ctx context.Context, id ID) error
	Listen(ctx context.Context, id ID) (net.Listener, error)
	Dial(ctx context.Context, to netip.AddrPort) (net.Conn, error)
	Lease(ctx context.Context, mac net.HardwareAddr) (netip.Addr, error)
	EgressLog(ctx context.Context, id ID, after int64, limit int) ([]agentlab.EgressRecord, error)
}

// remote is the same through an agent.
func (w *world) remote() *Remote {
	self, err := os.Executable()
	must(w, err)
	r := NewRemote(RemoteConfig{
		Network: testNetwork, Logger: slog.New(slog.NewTextHandler(w.Output(), nil)),
		Command: []string{"env", envAgent + "=" + filepath.Join(w.dir, "network"), self},
	})
	w.Cleanup(func() {
		if err := r.Close(); err != nil {
			w.Error(err)
		}
	})
	return r
}

// box is a sandbox: a namespace behind a port of the bridge.
type box struct {
	w   *world
	pid int
	Guest
}

func (w *world) box(n int, net agentlab.Network) *box {
	w.Helper()
	b := &box{w: w, Guest: Guest{
		ID: ID{VMID: 1000 + n, UID: agentlab.NewUID()}, MAC: []byte{0xbc, 0x24, 0x11, 0, 0, byte(n)},
		Port: fmt.Sprintf("tap%di0", 1000+n), IPv4: netip.AddrFrom4([4]byte{10, 77, 0, byte(n)}), Network: net,
	}}
	cmd := exec.Command("sleep", "infinity")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	b.pid = cmd.Process.Pid
	netlab.Sh(w, "ip link add %s type veth peer name eth0 netns %d; ip link set %s master vmbr1 up", b.Port, b.pid, b.Port)
	b.sh("ip link set lo up; ip link set eth0 address %s; ip link set eth0 up", b.MAC)
	return b
}

func (b *box) sh(format string, args ...any) {
	b.w.Helper()
	netlab.Sh(b.w, "nsenter -t %d -n sh -ec '%s'", b.pid, fmt.Sprintf(format, args...))
}

// static configures the address that the box is bound to.
func (b *box) static() *box {
	b.sh("ip addr add %s/16 dev eth0; ip route add default via 10.77.0.1", b.IPv4)
	return b
}

// in runs fn in the box.
func (b *box) in(fn func()) {
	b.w.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/net", b.pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			defer unix.Close(fd)
			err = unix.Setns(fd, unix.CLONE_NEWNET)
		}
		if err == nil {
			fn()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		b.w.Fatal(err)
	}
}

// What must be reached may take as long as a busy machine needs; whether
// something is shut has to be seen in a moment.
const (
	longEnough = guard.Patience
	moment     = time.Second
)

// dial connects from the box.
func (b *box) dial(target string) (net.Conn, error) {
	b.w.Helper()
	return b.dialWithin(longEnough, target)
}

func (b *box) dialWithin(limit time.Duration, target string) (conn net.Conn, err error) {
	b.w.Helper()
	b.in(func() { conn, err = net.DialTimeout("tcp", target, limit) })
	return conn, err
}

// reaches reports that the target answers.
func (b *box) reaches(target string) bool {
	b.w.Helper()
	conn, err := b.dial(target)
	if err != nil {
		return false
	}
	defer conn.Close()
	return answers(conn)
}

// shut reports that the target does not answer.
func (b *box) shut(target string) bool {
	b.w.Helper()
	conn, err := b.dialWithin(moment, target)
	if err != nil {
		return true
	}
	defer conn.Close()
	return !answersWithin(moment, conn)
}

func answers(conn net.Conn) bool { return answersWithin(longEnough, conn) }

func answersWithin(limit time.Duration, conn net.Conn) bool {
	_ = conn.SetDeadline(time.Now().Add(limit))
	_, _ = io.WriteString(conn, "hello\r\n\r\n")
	n, _ := conn.Read(make([]byte, 100))
	return n > 0
}

// greeter answers every connection with a word.
func (w *world) greeter(l network, b *box, word string) net.Listener {
	w.Helper()
	ln, err := l.Listen(w.Context(), b.ID)
	if err != nil {
		w.Fatal(err)
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, word+"\n")
			_ = c.Close()
		}
	}()
	return ln
}

// greeting returns what the server for guests sends to the box; "" if there is
// no answer.
func (b *box) greeting(port int) string {
	b.w.Helper()
	return b.greetingWithin(longEnough, port)
}

func (b *box) greetingWithin(limit time.Duration, port int) string {
	b.w.Helper()
	conn, err := b.dialWithin(limit, fmt.Sprintf("10.77.0.1:%d", port))
	if err != nil {
		return ""
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(limit))
	line, _ := bufio.NewReader(conn).ReadString('\n')
	return line
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var (
	all  = agentlab.Network{Mode: agentlab.NetworkNAT}
	none = agentlab.Network{Mode: agentlab.NetworkOff}
)

// Each guest reaches its own server and is reached; no guest is confused with
// another.
func TestGuestPlane(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	w.bridge()
	guestPlane(w, w.local())
}

// The same on another machine, which is this one, through an agent.
func TestGuestPlaneOfAnotherNode(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	w.bridge()
	guestPlane(w, w.remote())
}

func guestPlane(w *world, l network) {
	t, ctx := w.T, w.Context()
	a, b, stranger := w.box(2, all).static(), w.box(3, all).static(), w.box(4, all).static()
	ln := w.greeter(l, a, "alpha") // before it is on the network, as the service does
	w.greeter(l, b, "beta")
	if err := l.Put(ctx, a.Guest); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Fatalf("before Restore: %v", err)
	}
	must(t, l.Restore(ctx, nil))
	must(t, l.Ready(ctx))
	must(t, l.Put(ctx, a.Guest))
	must(t, l.Put(ctx, b.Guest))
	for _, port := range []int{8844, 8846} {
		if x, y := a.greeting(port), b.greeting(port); x != "alpha\n" || y != "beta\n" {
			t.Errorf("port %d: %q and %q", port, x, y)
		}
	}
	if got := stranger.greetingWithin(moment, 8844); got != "" {
		t.Errorf("who is no sandbox hears %q", got)
	}
	a.sh("ip addr add %s/16 dev eth0; ip route replace default via 10.77.0.1 src %s; ip addr del %s/16 dev eth0", b.IPv4, b.IPv4, a.IPv4)
	if got := a.greetingWithin(moment, 8844); got != "" {
		t.Errorf("with the address of another a sandbox hears %q", got)
	}
	a.sh("ip addr flush dev eth0; ip addr add %s/16 dev eth0; ip route replace default via 10.77.0.1", a.IPv4)

	again := w.greeter(l, a, "gamma") // the last opener wins
	if _, err := ln.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the first listener: %v", err)
	}
	if got := a.greeting(8844); got != "gamma\n" {
		t.Errorf("after it was opened again: %q", got)
	}
	_ = again.Close()
	if got := a.greetingWithin(moment, 8844); got != "" {
		t.Errorf("closed: %q", got)
	}

	// A guest that keeps many connections open does not block others.
	if _, err := l.Listen(ctx, a.ID); err != nil {
		t.Fatal(err)
	}
	for range 3 * maxPending {
		if conn, err := a.dialWithin(moment, "10.77.0.1:8844"); err == nil {
			defer conn.Close()
		}
	}
	if got := b.greeting(8844); got != "beta\n" {
		t.Errorf("beside a hoarder: %q", got)
	}

	// We reach guests, and a guest's claims do not redirect us to anything
	// else.
	var echo net.Listener
	b.in(func() { echo, _ = net.Listen("tcp", ":8845") })
	defer echo.Close()
	go func() {
		if c, err := echo.Accept(); err == nil {
			_, _ = io.WriteString(c, "control")
			_ = c.Close()
		}
	}()
	conn, err := l.Dial(ctx, netip.AddrPortFrom(b.IPv4, 8845))
	must(t, err)
	if got, _ := io.ReadAll(conn); string(got) != "control" {
		t.Errorf("the guest says %q", got)
	}
	for _, to := range []string{"192.168.1.1:80", "10.77.0.4:8845", "10.77.0.1:8844", "127.0.0.1:22"} {
		if _, err := l.Dial(ctx, netip.MustParseAddrPort(to)); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("%s: %v", to, err)
		}
	}

	must(t, l.Drop(ctx, b.ID))
	must(t, l.Drop(ctx, b.ID))
	if b.greetingWithin(moment, 8844) != "" || !b.shut(site) {
		t.Error("a sandbox that was dropped has a network")
	}
	if _, err := l.Dial(ctx, netip.AddrPortFrom(b.IPv4, 8845)); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a sandbox that was dropped is dialled: %v", err)
	}
}

// Records are kept for each guest over processes, and go with it.
func TestEgressLog(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	ctx := t.Context()
	l := w.restored()
	b := w.box(2, none).static()
	must(t, l.Put(ctx, b.Guest))
	awaitRecord := func(l *Local, after int64, port string) agentlab.EgressRecord {
		t.Helper()
		for {
			if !b.shut("192.31.196.20:" + port) {
				t.Fatal("the policy lets it through")
			}
			recs, err := l.EgressLog(ctx, b.ID, after, 100)
			must(t, err)
			for _, r := range recs {
				if fmt.Sprint(r.Port) == port {
					return r
				}
			}
		}
	}
	first := awaitRecord(l, 0, "8080")
	if first.Allow || first.Rule != "mode.off" || first.Addr != "192.31.196.20" || first.VMID != 1002 {
		t.Errorf("record %+v", first)
	}
	must(t, l.Close())

	l = w.local()
	must(t, l.Restore(ctx, []Guest{b.Guest}))
	if second := awaitRecord(l, first.Seq, "443"); second.Seq <= first.Seq {
		t.Errorf("record %d after %d", second.Seq, first.Seq)
	}
	if recs, err := l.EgressLog(ctx, ID{VMID: 1002, UID: agentlab.NewUID()}, 0, 10); err != nil || len(recs) > 0 {
		t.Errorf("of a sandbox that never was: %v, %v", recs, err)
	}
	if _, err := l.EgressLog(ctx, ID{VMID: 1002, UID: "../../x"}, 0, 10); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("a mark that leads elsewhere: %v", err)
	}
	must(t, l.Drop(ctx, b.ID))
	if left, err := os.ReadDir(filepath.Join(w.dir, "network")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// The daemon dies and comes again: flows of running sandboxes go on, at no
// time is one cut, and who is gone meanwhile is off.
func TestRestart(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	ctx := t.Context()
	l := w.restored()
	a, gone := w.box(2, all).static(), w.box(3, all).static()
	must(t, l.Put(ctx, a.Guest))
	must(t, l.Put(ctx, gone.Guest))
	conn, err := a.dial(site)
	must(t, err)
	defer conn.Close()
	must(t, l.Close())
	if !a.reaches(site) {
		t.Error("without a daemon an address is not reached any more")
	}

	l = w.local()
	if _, err := l.Apply(ctx); err != nil { // by hand, before the driver exists
		t.Fatal(err)
	}
	if !a.reaches(site) {
		t.Error("a sandbox was shut out before its driver had told of it")
	}
	if err := l.Ready(ctx); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("before Restore: %v", err)
	}
	bad := a.Guest // no longer fits
	bad.ID, bad.IPv4 = ID{VMID: 1009, UID: agentlab.NewUID()}, netip.MustParseAddr("10.99.0.2")
	must(t, l.Restore(ctx, []Guest{bad, a.Guest}))
	must(t, l.Ready(ctx))
	if !answers(conn) {
		t.Error("a flow was cut by the change of process")
	}
	if !gone.shut(site) {
		t.Error("a sandbox that is gone has a network")
	}
	if err := l.Put(ctx, bad); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("an address of another network: %v", err)
	}
}

// If the rules cannot be applied or read back, no sandbox gets a network.
func TestFailsClosed(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	ctx := t.Context()
	l := w.local()
	if err := errors.Join(l.Ready(ctx), l.Restore(ctx, nil)); agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" {
		t.Fatalf("there is no bridge: %v", err)
	}
	if _, err := l.Apply(ctx); err != nil { // makes it
		t.Fatal(err)
	}
	must(t, l.Restore(ctx, nil))
	a := w.box(2, all).static()
	must(t, l.Put(ctx, a.Guest))

	// A rule that another program removes is noticed, and restored before
	// the rules are reported as in force.
	seen := false
	for i := 0; i < 10 && !seen; i++ { // who watches the bridge may load the rules again before we look
		netlab.Sh(t, "nft delete element inet agentlab always4 '{ 10.0.0.0/8 }'")
		seen = agentlab.CodeOf(l.Ready(ctx)) == agentlab.CodeUnavailable
	}
	if !seen {
		t.Error("a missing rule was never seen")
	}
	must(t, l.Put(ctx, a.Guest))
	netlab.Sh(t, "nft list map inet agentlab always4 | grep -q 10.0.0.0/8")

	// An error leaves the guest without a network, also one that had one.
	wrong := a.Guest
	wrong.Network = agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "no rule at all"}}}
	if err := l.Put(ctx, wrong); err == nil || !a.shut(site) {
		t.Errorf("a policy that is none: %v", err)
	}
	must(t, l.Put(ctx, a.Guest))
	if !a.reaches(site) {
		t.Error("not reached")
	}
	late, cancel := context.WithCancel(ctx)
	cancel()
	if err := l.Put(late, a.Guest); err == nil || !a.shut(site) {
		t.Errorf("nothing was read back: %v", err)
	}
	twin := w.box(3, all)
	twin.IPv4 = a.IPv4
	must(t, l.Put(ctx, a.Guest))
	if err := l.Put(ctx, twin.Guest); agentlab.CodeOf(err) != agentlab.CodeInvalid || !a.reaches(site) {
		t.Errorf("an address twice: %v", err)
	}

	// Another program uses one of our ports.
	must(t, l.Close())
	blocker, err := net.Listen("tcp", "10.77.0.1:8846")
	must(t, err)
	l = w.local()
	must(t, l.Restore(ctx, []Guest{a.Guest}))
	if err := l.Ready(ctx); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("with the port taken: %v", err)
	}
	_ = blocker.Close()
}

// Many at once: each is in force when its Put returns.
func TestManyAtOnce(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	ctx := t.Context()
	l := w.restored()
	began := time.Now()
	var wg sync.WaitGroup
	for n := range 20 {
		wg.Go(func() {
			g := Guest{
				ID: ID{VMID: 2000 + n, UID: agentlab.NewUID()}, MAC: []byte{0xbc, 0x24, 0x11, 1, 0, byte(n)},
				Port: fmt.Sprintf("tap%di0", 2000+n), IPv4: netip.AddrFrom4([4]byte{10, 77, 1, byte(n)}), Network: all,
			}
			if err := l.Put(ctx, g); err != nil {
				t.Error(err)
			}
			if err := getElement("bound4", fmt.Sprintf("{ %s . %s }", g.MAC, g.IPv4)); err != nil {
				t.Errorf("%s is not in the kernel: %v", g.IPv4, err)
			}
		})
	}
	wg.Wait()
	t.Logf("20 guests in %v", time.Since(began))
}

// getElement looks an element up in the kernel. The kernel interrupts a reader
// when another transaction is committed meanwhile, which says nothing about the
// element: nft is run again.
func getElement(set, element string) error {
	for {
		out, err := exec.Command("nft", "get", "element", "inet", "agentlab", set, element).CombinedOutput()
		if err == nil {
			return nil
		}
		if !strings.Contains(string(out), "Interrupted system call") {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
}

// TestServingContinues: what ends the service of the bridge ends it for a moment
// only.
func TestServingContinues(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	runs := 0
	l := New(Config{})
	l.keepServing(ctx, func(context.Context) error {
		if runs++; runs == 3 {
			cancel()
		}
		return errors.New("the port is taken")
	}, 0)
	if runs != 3 {
		t.Errorf("%d runs", runs)
	}
}
