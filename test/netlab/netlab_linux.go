package netlab

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/net/ipv4"

	"github.com/agentlab-vm/agentlab/test/fakenet"
)

const (
	envInside = "AGENTLAB_TEST_NETLAB_INSIDE" // this process is in the test's own namespaces
	envPeer   = "AGENTLAB_TEST_NETLAB_PEER"   // this process is a peer: the socket of its fakenet
)

// ports are where a peer answers over TCP, at every address.
var ports = []int{22, 53, 80, 443, 2222, 4000, 8006, 8080}

// Main becomes a peer when this process was started as one; otherwise it
// returns at once. A TestMain calls it first.
func Main() {
	if socket := os.Getenv(envPeer); socket != "" {
		if err := play(socket); err != nil {
			fmt.Fprintln(os.Stderr, "netlab:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// IsInside reports whether this process is in namespaces of the test.
func IsInside(t *testing.T) bool { return os.Getenv(envInside) == t.Name() }

// Inside returns true in namespaces of the test's own. Outside it runs this
// one test there, in another process, and returns false when that has ended:
// the test returns at once then.
func Inside(t *testing.T) bool {
	t.Helper()
	if IsInside(t) {
		shell(t, "sh", "-ec", "mount -t proc proc /proc; mount -t sysfs sysfs /sys; ip link set lo up; sysctl -qw net.ipv4.ping_group_range='0 2147483647'")
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes namespaces, bridges and taps")
	}
	pattern := "^" + t.Name() + "$"
	if f := flag.Lookup("test.run"); f != nil { // subtests that were asked for
		if _, sub, ok := strings.Cut(f.Value.String(), "/"); ok {
			pattern += "/" + sub
		}
	}
	args := []string{"-test.run", pattern, "-test.v", "-test.count=1"}
	// The limit of this process ends the other one too, which dies with it.
	cmd := exec.Command("/proc/self/exe", append(args, "-test.timeout=0")...)
	cmd.Env = append(os.Environ(), envInside+"="+t.Name())
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWPID, Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is about the thread that starts it
	defer runtime.UnlockOSThread()
	if err := cmd.Run(); err != nil {
		t.Errorf("in its namespaces: %v", err)
	}
	return false
}

// Sh runs commands in the test's own namespaces.
func Sh(t testing.TB, format string, args ...any) {
	t.Helper()
	shell(t, "sh", "-ec", fmt.Sprintf(format, args...))
}

func shell(t testing.TB, args ...string) {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// Resolver makes addr the host's name server for this test.
func Resolver(t testing.TB, addr netip.Addr) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("nameserver "+addr.String()+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount(file, "/etc/resolv.conf", "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount("/etc/resolv.conf", syscall.MNT_DETACH) })
}

// Peer is a machine on a bridge of the host: whatever arrives there, for
// whichever address, goes to its fakenet.
type Peer struct {
	Net *fakenet.Net
}

// NewPeer plugs a machine with these addresses into a bridge; ifname is the
// host's end of its cable.
func NewPeer(t testing.TB, ifname, bridge string, addrs ...string) *Peer {
	t.Helper()
	dir, err := os.MkdirTemp("", "netlab-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &Peer{Net: fakenet.New()}
	t.Cleanup(p.Net.Close)
	socket := filepath.Join(dir, "net.sock")
	if err := p.Net.ServeUnix(socket); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), envPeer+"="+socket)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	in, err := cmd.StdinPipe() // it ends with this
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	pid := cmd.Process.Pid
	Sh(t, "ip link add %s type veth peer name eth0 netns %d; ip link set %s master %s up", ifname, pid, ifname, bridge)
	peer := "ip link set lo up; ip link set eth0 up; ip route add local default dev lo"
	for _, a := range addrs {
		peer += "; ip addr add " + a + " dev eth0"
	}
	shell(t, "nsenter", "-t", fmt.Sprint(pid), "-n", "sh", "-ec", peer)
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		t.Fatalf("the peer %s does not serve: %v", ifname, err)
	}
	return p
}

// play serves until standard input ends.
func play(socket string) error {
	dialer := fakenet.UnixDialer{Path: socket}
	for _, port := range ports {
		l, err := net.Listen("tcp4", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		go accept(l, dialer)
	}
	pc, err := net.ListenPacket("udp4", ":53")
	if err != nil {
		return err
	}
	conn := ipv4.NewPacketConn(pc)
	if err := conn.SetControlMessage(ipv4.FlagDst, true); err != nil {
		return err
	}
	go datagrams(conn, dialer)
	if _, err := os.Stdout.Write([]byte{'\n'}); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func accept(l net.Listener, dialer fakenet.UnixDialer) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = conn.Close() }()
			// Every address is this machine's, so that of the connection is
			// the one that was dialled.
			far, err := dialer.DialContext(context.Background(), "tcp", conn.LocalAddr().String())
			if err != nil {
				return
			}
			defer func() { _ = far.Close() }()
			go func() {
				_, _ = io.Copy(far, conn)
				if h, ok := far.(interface{ CloseWrite() error }); ok {
					_ = h.CloseWrite()
				}
			}()
			_, _ = io.Copy(conn, far)
		}()
	}
}

func datagrams(conn *ipv4.PacketConn, dialer fakenet.UnixDialer) {
	buf := make([]byte, 64<<10)
	for {
		n, cm, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		question := append([]byte(nil), buf[:n]...)
		go func() {
			far, err := dialer.DialContext(context.Background(), "udp", net.JoinHostPort(cm.Dst.String(), "53"))
			if err != nil {
				return
			}
			defer func() { _ = far.Close() }()
			if _, err := far.Write(question); err != nil {
				return
			}
			answer := make([]byte, 64<<10)
			if n, err := far.Read(answer); err == nil {
				_, _ = conn.WriteTo(answer[:n], &ipv4.ControlMessage{Src: cm.Dst}, from)
			}
		}()
	}
}
