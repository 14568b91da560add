//go:build linux

package nft

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
)

// The tests of this package run in a network namespace of their own, which is
// the host. Its sandboxes, its LAN, its tailnet and the internet behind its
// uplink are namespaces too, each held by a process that the test starts:
// nothing of them is left when it ends, however it ends, and nothing in them
// has a way out of the machine.
const (
	envInner = "AGENTLAB_NFT_TEST_HOST" // this process is in its own namespace
	envRole  = "AGENTLAB_NFT_TEST_ROLE" // this process is a namespace of the world
)

func TestMain(m *testing.M) {
	switch role := os.Getenv(envRole); {
	case role != "":
		os.Exit(play(role))
	case os.Getenv(envInner) != "":
		// That of this namespace; the workers of a fuzz test have it already.
		if err := syscall.Mount("sysfs", "/sys", "sysfs", 0, ""); err != nil && err != syscall.EBUSY {
			fmt.Println("mounting /sys:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	if _, err := findNFT(); err != nil {
		fmt.Println("rendering is tested alone:", err)
		os.Exit(m.Run())
	}
	os.Exit(inNamespace())
}

// inNamespace runs this very test again in a namespace of its own.
func inNamespace() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), envInner+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	runtime.LockOSThread() // Pdeathsig is about the thread that starts it
	err := cmd.Run()
	if _, ok := err.(*exec.ExitError); err != nil && !ok {
		fmt.Println("no network namespace, so rendering is tested alone:", err)
		os.Exit(0)
	}
	return cmd.ProcessState.ExitCode()
}

// world is the host of the tests with all that is around it.
type world struct {
	t        testing.TB
	internet *peer
	lan      *peer
	tailnet  *peer
	guests   [2]*peer
	stranger *peer // plugged in and no sandbox
	current  *Manager
}

// peer is a process in a namespace of its own. It reads commands by line.
type peer struct {
	t    testing.TB
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	mu   sync.Mutex
}

const (
	hostLAN4, hostLAN6 = "192.168.1.2/24", "2a10:50c0:1::2/64"
	lanHost4, lanHost6 = "192.168.1.50/24", "2a10:50c0:1::50/64"
	upstreamDNS        = "192.31.196.200:53"
)

// taps are the names of the ports of sandboxes.
var taps = [2]string{"tap101i0", "tap102i0"}

// newWorld builds it: the uplink is a bridge with a LAN host and the internet
// on it, as on Proxmox.
func newWorld(t testing.TB) *world {
	t.Helper()
	if os.Getenv(envInner) == "" {
		t.Skip("needs a network namespace of its own and the nft program")
	}
	w := &world{t: t}
	w.sh("ip link set lo up")
	w.sh("ip link add vmbr0 type bridge; ip link set vmbr0 up; ip addr add %s dev vmbr0; ip addr add %s dev vmbr0 nodad", hostLAN4, hostLAN6)
	w.sh("ip link add vmbr1 type bridge; ip link set vmbr1 up")
	w.internet = w.peer("outside", "inet0", "vmbr0", "192.168.1.1/24", "2a10:50c0:1::1/64")
	w.lan = w.peer("outside", "lan0", "vmbr0", lanHost4, lanHost6)
	w.tailnet = w.peer("outside", "tailscale0", "", "100.101.102.103/10", "fd7a:115c:a1e0::103/48")
	w.sh("ip addr add 100.64.0.1/10 dev tailscale0; ip addr add fd7a:115c:a1e0::1:1/48 dev tailscale0 nodad")
	w.sh("ip route add default via 192.168.1.1; ip -6 route add default via 2a10:50c0:1::1")
	for _, p := range []*peer{w.internet, w.lan, w.tailnet} {
		p.sh("ip route replace local default dev lo; ip -6 route add local ::/0 dev lo table 100; ip -6 rule add iif eth0 lookup 100")
	}
	// The internet knows the way to sandboxes, so that missing NAT would show.
	w.tailnet.sh("ip route add 10.77.0.0/16 via 100.64.0.1; ip -6 route add fd77:a91a:4d00::/64 via fd7a:115c:a1e0::1:1")
	for i := range w.guests {
		w.guests[i] = w.guest(i)
	}
	for _, p := range []*peer{w.internet, w.lan, w.tailnet, w.guests[0], w.guests[1]} {
		p.ask("serve", nil)
	}
	t.Cleanup(func() {
		for _, l := range []string{"vmbr0", "vmbr1"} {
			_ = exec.Command("ip", "link", "del", l).Run()
		}
	})
	return w
}

// guest is a sandbox's namespace, ready to be used once it is let in.
func (w *world) guest(i int) *peer {
	s := testSandbox(2+i, nil)
	p := w.peer("guest", taps[i], "vmbr1", fmt.Sprintf("%s/16", s.IPv4), fmt.Sprintf("%s/64", s.IPv6))
	p.sh("ip link set eth0 address %s; ip route add default via 10.77.0.1; ip -6 route add default via fd77:a91a:4d00::1", s.MAC)
	return p
}

// sh runs commands in the host's namespace.
func (w *world) sh(format string, args ...any) {
	w.t.Helper()
	shell(w.t, "sh", "-ec", fmt.Sprintf(format, args...))
}

func shell(t testing.TB, args ...string) {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// peer starts a namespace and plugs it in: its eth0 is the other end of the
// host's interface of that name.
func (w *world) peer(role, ifname, bridge string, addrs ...string) *peer {
	w.t.Helper()
	p := &peer{t: w.t, name: ifname}
	p.cmd = exec.Command("/proc/self/exe")
	p.cmd.Env = append(os.Environ(), envRole+"="+role)
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		w.t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { // a role ends with its standard input
		_ = exec.Command("ip", "link", "del", ifname).Run()
		_ = p.in.Close()
		_ = p.cmd.Wait()
	})
	w.sh("ip link add %s type veth peer name eth0 netns %d; ip link set %s up", ifname, p.cmd.Process.Pid, ifname)
	if bridge != "" {
		w.sh("ip link set %s master %s", ifname, bridge)
	}
	p.sh("sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.eth0.accept_dad=0 net.ipv4.ping_group_range='0 2147483647'; ip link set lo up; ip link set eth0 up")
	for _, a := range addrs {
		nodad := ""
		if strings.Contains(a, ":") {
			nodad = "nodad"
		}
		p.sh("ip addr add %s dev eth0 %s", a, nodad)
	}
	return p
}

// sh runs commands in the peer's namespace.
func (p *peer) sh(format string, args ...any) {
	p.t.Helper()
	shell(p.t, "nsenter", "-t", fmt.Sprint(p.cmd.Process.Pid), "-n", "sh", "-ec", fmt.Sprintf(format, args...))
}

// order is one line to a peer.
type order struct {
	Do     string           `json:"do"`
	Probes []guestapi.Probe `json:"probes,omitempty"`
}

// ask sends an order and reads the answer into out.
func (p *peer) ask(do string, out any, probes ...guestapi.Probe) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := json.NewEncoder(p.in).Encode(order{do, probes}); err != nil {
		p.t.Fatalf("%s: %v", p.name, err)
	}
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		p.t.Fatalf("%s does not answer to %q: %v", p.name, do, err)
	}
	if out != nil {
		if err := json.Unmarshal(line, out); err != nil {
			p.t.Fatalf("%s: %v in %q", p.name, err, line)
		}
	}
}

// probe runs probes in a sandbox.
func (p *peer) probe(probes ...guestapi.Probe) []guestapi.ProbeResult {
	p.t.Helper()
	var out []guestapi.ProbeResult
	p.ask("probe", &out, probes...)
	return out
}

// outside is what arrived anywhere but at the first sandbox and the host.
func (w *world) outside() probe.Outside {
	w.t.Helper()
	var all probe.Outside
	for _, p := range []*peer{w.internet, w.lan, w.tailnet, w.guests[1]} {
		var one probe.Outside
		p.ask("report", &one)
		all.Flows, all.Names = append(all.Flows, one.Flows...), append(all.Names, one.Names...)
	}
	return all
}

func (w *world) forget() {
	for _, p := range []*peer{w.internet, w.lan, w.tailnet, w.guests[1]} {
		p.ask("forget", nil)
	}
}

// testResolver asks the internet's name server.
type testResolver struct{}

func (testResolver) Exchange(ctx context.Context, q *dns.Msg) (*dns.Msg, error) {
	answer, _, err := new(dns.Client).ExchangeContext(ctx, q, upstreamDNS)
	return answer, err
}

// manager runs a Manager until the test ends.
func (w *world) manager(o Options) *Manager {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	if o.Config.Bridge == "" {
		o.Config = testConfig()
	}
	if o.Resolver == nil {
		o.Resolver = testResolver{}
	}
	m, err := New(ctx, o)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := m.Apply(ctx); err != nil {
		w.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Errorf("the manager failed: %v", err)
		}
		m.Close()
	})
	w.awaitListen(m, ended)
	w.current = m
	return m
}

// awaitListen waits until the manager says that it serves.
func (w *world) awaitListen(m *Manager, ended chan error) {
	for {
		m.mu.Lock()
		up := m.serving && !m.broken
		m.mu.Unlock()
		if up {
			return
		}
		select {
		case err := <-ended:
			w.t.Fatal(err)
		default:
			runtime.Gosched()
		}
	}
}
