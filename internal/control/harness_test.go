//go:build linux

package control_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == runnerArg {
		os.Exit(runAsRunner(os.Args[2]))
	}
	goleak.VerifyTestMain(m)
}

// kernel records what an identity asks of it.
type kernel struct {
	mu       sync.Mutex
	entropy  [][]byte
	now      time.Time
	hostname string
	networks []guestapi.Network
	bootIDs  []string
	grown    []int64
	syncs    int
	rebooted chan string
	kvm      agentlab.NestedState
	kvmGroup int
}

func (k *kernel) SetTime(t time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.now = t
	return nil
}

func (k *kernel) AddEntropy(p []byte) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.entropy = append(k.entropy, p)
	return nil
}

func (k *kernel) SetHostname(name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.hostname = name
	return nil
}

func (k *kernel) Uptime() time.Duration { return 12340 * time.Millisecond }

func (k *kernel) Hostname() (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.hostname, nil
}

func (k *kernel) ConfigureNetwork(n guestapi.Network, _ time.Duration) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.networks = append(k.networks, n)
	return nil
}

func (k *kernel) SetBootID(file, kernel string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	b, err := os.ReadFile(file)
	k.bootIDs = append(k.bootIDs, string(b))
	_ = os.Remove(kernel)
	return errors.Join(err, os.MkdirAll(filepath.Dir(kernel), 0o755), os.Symlink(file, kernel))
}

func (k *kernel) GrowRoot(least int64, _ time.Duration) (int64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.grown = append(k.grown, least)
	return max(least, 20<<30), nil
}

func (k *kernel) LoadKVM() agentlab.NestedState { return k.kvm }

func (k *kernel) ShareKVM(gid int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kvmGroup = gid
	return nil
}

func (k *kernel) Sync() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.syncs++
}

func (k *kernel) Reboot(action string) error {
	k.rebooted <- action
	return nil
}

// guest is a control server in this process, below its own root directory,
// reached over a link as in a virtual machine.
type guest struct {
	*control.Client
	root   string
	me     *user.User
	kernel *kernel
	cfg    guestd.Config
	server *guestd.Server
	link   *link.HostLink
	stop   func()
}

func newGuest(t *testing.T, change func(*guestd.Config)) *guest {
	t.Helper()
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	g := &guest{root: t.TempDir(), me: me, kernel: &kernel{rebooted: make(chan string, 1)}}
	home := filepath.Join(g.root, "home")
	g.put(t, "home/.keep", "")
	g.put(t, "etc/passwd", me.Username+":x:"+me.Uid+":"+me.Gid+"::"+home+":/bin/sh\n")
	g.put(t, "etc/environment", "FROM_ETC=\"yes\"\n# a comment\n")
	g.put(t, "etc/machine-id", "")
	g.put(t, "etc/hosts", "127.0.0.1 localhost\n127.0.1.1 old\n::1 ip6-localhost")
	g.cfg = guestd.Config{Root: g.root, Kernel: g.kernel, User: me.Username, Runner: []string{"/bin/true"}, Backoff: time.Millisecond}
	if change != nil {
		change(&g.cfg)
	}
	g.start(t)
	t.Cleanup(func() { g.stop() })
	return g
}

// start begins a server and a link to it; stop ends both.
func (g *guest) start(t *testing.T) {
	t.Helper()
	a, b := net.Pipe()
	gl := link.Guest(b)
	g.server = guestd.New(g.cfg)
	served := make(chan error, 1)
	go func() { served <- g.server.Serve(gl) }()
	g.link = link.Host(context.Background(), a)
	if err := g.link.WaitUp(guard.Context(t)); err != nil {
		t.Fatal(err)
	}
	g.Client = control.New(g.link.Dial)
	g.stop = func() {
		_ = g.link.Close()
		_ = g.server.Close()
		_ = gl.Close()
		<-served
	}
}

func (g *guest) put(t *testing.T, name, content string) {
	t.Helper()
	name = filepath.Join(g.root, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	// Whole: the guest may read it at any time.
	tmp := name + ".new"
	if err := os.WriteFile(tmp, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, name); err != nil {
		t.Fatal(err)
	}
}

func (g *guest) file(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(g.root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// proc is the client's side of a command or terminal.
type proc struct {
	conn net.Conn
	w    *stream.Writer

	mu       sync.Mutex
	out, err strings.Builder
	exit     *stream.ExitStatus
	ended    chan struct{} // the connection is at its end
}

func follow(t *testing.T, conn net.Conn) *proc {
	t.Helper()
	p := &proc{conn: conn, w: stream.NewWriter(conn), ended: make(chan struct{})}
	t.Cleanup(func() { _ = conn.Close(); _ = conn.SetDeadline(time.Unix(1, 0)); <-p.ended })
	go func() {
		defer close(p.ended)
		r := stream.NewReader(conn)
		for {
			typ, b, err := r.Next()
			if err != nil {
				return
			}
			p.mu.Lock()
			switch typ {
			case stream.Stdout:
				p.out.Write(b)
			case stream.Stderr:
				p.err.Write(b)
			case stream.Exit:
				p.exit = parseExit(b)
			}
			p.mu.Unlock()
		}
	}()
	return p
}

func (g *guest) exec(t *testing.T, req guestapi.ExecRequest) *proc {
	t.Helper()
	conn, err := g.Exec(guard.Context(t), req)
	if err != nil {
		t.Fatal(err)
	}
	return follow(t, conn)
}

func (g *guest) sh(t *testing.T, script string) *proc {
	t.Helper()
	return g.exec(t, guestapi.ExecRequest{Command: []string{"sh", "-c", script}})
}

// result waits for the exit.
func (p *proc) result(t *testing.T) (stdout, stderr string, st stream.ExitStatus) {
	t.Helper()
	select {
	case <-p.ended:
	case <-guard.Context(t).Done():
		t.Fatal("the command does not end")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exit == nil {
		t.Fatalf("no exit status; output %q, errors %q", p.out.String(), p.err.String())
	}
	return p.out.String(), p.err.String(), *p.exit
}

// shows waits until the output holds text.
func (p *proc) shows(t *testing.T, text string) {
	t.Helper()
	guard.Until(t, "output "+text, func() bool { return strings.Contains(p.output(), text) })
}

func (p *proc) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

func (p *proc) send(t *testing.T, typ stream.Type, text string) {
	t.Helper()
	if err := p.w.Frame(typ, []byte(text)); err != nil {
		t.Fatal(err)
	}
}

// hostile answers each connection with what say writes.
func hostile(t *testing.T, say func(net.Conn)) *control.Client {
	var mu sync.Mutex
	var conns []net.Conn
	var wg sync.WaitGroup
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range conns {
			_ = c.Close()
		}
		wg.Wait()
	})
	return control.New(func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		mu.Lock()
		conns = append(conns, a, b)
		mu.Unlock()
		wg.Add(2)
		go func() { defer wg.Done(); _, _ = io.Copy(io.Discard, b) }()
		go func() { defer wg.Done(); say(b); _ = b.Close() }()
		return a, nil
	})
}
