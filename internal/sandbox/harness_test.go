package sandbox_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/bootstrap"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/session"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/store/storetest"
	"github.com/agentlab-vm/agentlab/internal/workspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// db is the store as the service sees it.
type db struct {
	*store.Store
	full *atomic.Bool // no change can be written
}

func (d db) room() error {
	if d.full.Load() {
		return agentlab.Errorf(agentlab.CodeNoSpace, "no space left for the database")
	}
	return nil
}

func (d db) UpdateSandbox(ctx context.Context, vmid int, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error) {
	return d.Store.UpdateSandbox(ctx, vmid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		before := *sb
		evs, err := fn(sb)
		if err == nil && (len(evs) > 0 || !sb.Equal(before)) {
			err = d.room()
		}
		return evs, err
	})
}

func (d db) RevokeGrants(ctx context.Context, vmid int) error {
	return cmp.Or(d.room(), d.Store.RevokeGrants(ctx, vmid))
}

func (d db) AppendEvents(ctx context.Context, evs ...agentlab.Event) error {
	return cmp.Or(d.room(), d.Store.AppendEvents(ctx, evs...))
}

// images knows the names in have; build is called for each Ensure.
type images struct {
	mu    sync.Mutex
	have  []string
	build func(ctx context.Context, name string, progress func(string)) error
	calls int

	bytes   int64  // size of the disks
	missing bool   // every image must be built
	digest  string // of all images; "" is sha256-1
}

func (i *images) Check(name string) error {
	if !slices.Contains(i.have, name) {
		return agentlab.Errorf(agentlab.CodeNotFound, "there is no image %q", name).WithField("image")
	}
	return nil
}

func (i *images) DiskBytes(string) int64 { return i.bytes }

func (i *images) Current(_ context.Context, name string) (string, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.missing || !slices.Contains(i.have, name) {
		return "", agentlab.Errorf(agentlab.CodeNotFound, "image %q is not built", name)
	}
	return name + "@" + cmp.Or(i.digest, "sha256-1"), nil
}

func (i *images) Ensure(ctx context.Context, name string, progress func(string)) (string, error) {
	i.mu.Lock()
	i.calls++
	build := i.build
	i.mu.Unlock()
	if build != nil {
		if err := build(ctx, name, progress); err != nil {
			return "", err
		}
	}
	return name + "@" + cmp.Or(i.digest, "sha256-1"), nil
}

// profiles are the profiles that exist.
type profiles struct {
	mu   sync.Mutex
	list map[string]agentlab.Profile
}

func (p *profiles) Use(name string) (agentlab.Profile, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	prof, ok := p.list[name]
	if !ok {
		return prof, agentlab.Errorf(agentlab.CodeNotFound, "there is no profile %q", name).WithField("profile")
	}
	prof.Name, prof.YAML = name, "name: "+name+"\n"
	return prof, nil
}

// boot knows one secret of all guests, and which of them have received it.
type boot struct {
	*bootstrap.Service
	received *sync.Map // by UID
}

func (b boot) ReceivedSecrets(sb agentlab.Sandbox) (bool, error) {
	_, ok := b.received.Load(sb.UID)
	return ok, nil
}

func (b boot) Inherit(_ context.Context, from, to agentlab.Sandbox) (bool, error) {
	_, ok := b.received.Load(from.UID)
	if ok {
		b.received.Store(to.UID, true)
	}
	return ok, nil
}

func (boot) RedactFunc(context.Context, string) func(string) string {
	return func(text string) string { return strings.ReplaceAll(text, "hunter2", "[redacted]") }
}

// host is the machine, whose disk may be full.
type host struct{ w *world }

func (h host) Room() error {
	if h.w.full.Load() {
		return agentlab.Errorf(agentlab.CodeNoSpace, "the disk is full")
	}
	return nil
}

func (h host) Usable(string) error {
	if h.w.broken.Load() {
		return agentlab.Errorf(agentlab.CodeUnavailable, "QEMU is missing")
	}
	return nil
}

// serve answers guests.
type serve func(ctx context.Context, vmid int, l net.Listener) error

func (s serve) Serve(ctx context.Context, vmid int, l net.Listener) error { return s(ctx, vmid, l) }

func (s serve) Handle(vmid int) (accept func(net.Conn), stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	l := &queue{conns: make(chan net.Conn, 16), done: ctx.Done()}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s(ctx, vmid, l)
	}()
	return func(c net.Conn) { l.conns <- c }, func() { cancel(); <-ended }
}

// queue is a listener for the connections of a channel.
type queue struct {
	conns chan net.Conn
	done  <-chan struct{}
}

func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.done:
		return nil, net.ErrClosed
	}
}

func (q *queue) Close() error   { return nil }
func (q *queue) Addr() net.Addr { return &net.UnixAddr{Name: "queue", Net: "unix"} }

// world is a machine with a database, on which services come and go.
type world struct {
	*testing.T
	path     string
	intents  string // directory; outlives the daemon
	store    *store.Store
	host     *fake.Host
	driver   *fake.Driver
	images   *images
	limits   sandbox.Limits
	pool     []sandbox.PoolEntry
	profiles *profiles
	serve    serve
	received sync.Map // UIDs of sandboxes that have received secrets; outlives the daemon

	full   atomic.Bool      // the host's disk
	broken atomic.Bool      // the backend cannot start sandboxes
	dbFull atomic.Bool      // so full that the database cannot be written
	clock  func() time.Time // the daemon's; nil means time.Now
	plain  bool             // the driver has nothing that a backend need not have
	wrap   func(backend.Driver) backend.Driver

	svc        *sandbox.Service
	workspaces *workspace.Service
	sessions   *session.Service
	stop       func()

	mu   sync.Mutex
	seen []agentlab.Event // every event that was committed
	next chan struct{}    // closed after the next commit
}

func newWorld(t *testing.T) *world { return newWorldOn(t, fake.Config{BootDelay: 2 * time.Second}) }

func newWorldOn(t *testing.T, backend fake.Config) *world {
	t.Helper()
	host, err := fake.NewHost(backend)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		T: t, path: filepath.Join(t.TempDir(), "agentlab.db"), intents: t.TempDir(), host: host,
		profiles: &profiles{list: map[string]agentlab.Profile{
			"plain":   {Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}, TTL: time.Hour},
			"secrets": {Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}, TTL: time.Hour, SecretsBundle: "default"},
			"long":    {Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}, TTL: 100 * 24 * time.Hour},
		}},
		next: make(chan struct{}), images: &images{have: []string{"base", "agents"}},
		serve: func(ctx context.Context, _ int, l net.Listener) error {
			srv := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Minute}
			stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
			defer stop()
			return srv.Serve(l)
		},
	}
	t.Cleanup(func() {
		w.kill()
		_ = host.Close()
	})
	storetest.Create(t, w.path)
	w.begin()
	return w
}

// begin starts the daemon's part: store, driver and service.
func (w *world) begin() {
	w.Helper()
	var err error
	w.store, err = store.Open(context.Background(), w.path, store.Options{OnCommit: func(c store.Commit) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.seen = append(w.seen, c.Events...)
		for _, e := range c.Events {
			switch {
			case w.svc == nil:
			case e.Kind == agentlab.EventWorkspaceLease:
				w.svc.LeaseChanged(e)
			case e.Kind == agentlab.EventWorkspaceState:
				w.svc.WorkspaceChanged(w.workspaces.Changed(e))
			}
		}
		close(w.next)
		w.next = make(chan struct{})
	}})
	if err != nil {
		w.Fatal(err)
	}
	w.driver = w.host.Open()
	w.workspaces = workspace.New(workspace.Config{Store: w.store, Fleet: fleet.Single(w.driver, nil), Clock: w.clock})
	w.svc = sandbox.New(sandbox.Config{
		Workspaces: w.workspaces,
		Store:      db{w.store, &w.dbFull}, IntentsDir: w.intents, Fleet: fleet.Single(w.offered(), w.images),
		Profiles:       w.profiles,
		DefaultProfile: "plain", DefaultImage: "base", Limits: w.limits, Pool: w.pool, Clock: w.clock, Host: host{w},
		Bootstrap: boot{bootstrap.New(bootstrap.Config{Store: w.store, Profiles: w.profiles, Backends: fleet.Single(w.driver, nil), Clock: w.clock}), &w.received},
	})
	w.workspaces.UseGuests(w.svc)
	w.sessions = session.New(session.Config{Store: w.store, Workspaces: w.workspaces, Sandboxes: w.svc, Profiles: w.profiles, Fleet: fleet.Single(w.driver, w.images), DefaultProfile: "plain"})
	if w.serve != nil {
		w.svc.ServeGuests(w.serve)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- w.svc.Run(ctx) }()
	go func() { done <- w.workspaces.Run(ctx) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := cmp.Or(<-done, <-done); err != nil && !errors.Is(err, context.Canceled) {
			w.Error(err)
		}
		_ = w.driver.Close()
		if err := w.store.Close(); err != nil {
			w.Error(err)
		}
	})
}

// offered is the driver as the service sees it.
func (w *world) offered() backend.Driver {
	if w.plain {
		return struct{ backend.Driver }{w.driver}
	}
	if w.wrap != nil {
		return w.wrap(w.driver)
	}
	return w.driver
}

// kill ends the daemon's part; VMs continue to run.
func (w *world) kill() { w.stop() }

// restart is kill and begin.
func (w *world) restart() {
	w.Helper()
	w.kill()
	w.svc = nil
	w.begin()
}

func (w *world) create(r agentlab.SandboxRequest) agentlab.Sandbox {
	w.Helper()
	sb, err := w.svc.Create(context.Background(), r)
	if err != nil {
		w.Fatal(err)
	}
	return sb
}

func (w *world) get(vmid int) agentlab.Sandbox {
	w.Helper()
	sb, err := w.store.Sandbox(context.Background(), vmid)
	if err != nil {
		w.Fatal(err)
	}
	return sb
}

// until lets time pass until the sandbox is in one of the states.
func (w *world) until(vmid int, states ...agentlab.SandboxState) agentlab.Sandbox {
	w.Helper()
	return w.untilIt(vmid, func(sb agentlab.Sandbox) bool { return slices.Contains(states, sb.State) })
}

func (w *world) untilIt(vmid int, cond func(agentlab.Sandbox) bool) (sb agentlab.Sandbox) {
	w.Helper()
	w.pass(func() bool { sb = w.get(vmid); return cond(sb) }, func() string {
		return fmt.Sprintf("sandbox %d is %s (desired %s, reason %q)", vmid, sb.State, sb.Desired, sb.Reason)
	})
	return sb
}

// pass lets time pass, at most two hours, until done holds. is says what is instead.
func (w *world) pass(done func() bool, is func() string) {
	w.Helper()
	for begin := time.Now(); ; {
		w.mu.Lock()
		next := w.next // before the look, or its event could be missed
		w.mu.Unlock()
		if done() {
			return
		}
		if time.Since(begin) > 2*time.Hour {
			w.Fatalf("%s after two hours", is())
		}
		select { // in the bubble's time, so nothing really waits
		case <-next:
		case <-time.After(time.Minute):
		}
	}
}

func (w *world) power(sb agentlab.Sandbox) backend.PowerState {
	w.Helper()
	d := w.host.Open()
	in, err := d.Inspect(context.Background(), backend.RefOf(sb))
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return ""
	}
	if err != nil {
		w.Fatal(err)
	}
	return in.Power
}

func (w *world) events(kind string) []agentlab.Event {
	w.Helper()
	list, err := w.store.Events(context.Background(), agentlab.EventFilter{Kinds: []string{kind}})
	if err != nil {
		w.Fatal(err)
	}
	return list
}

// inWorld runs a test in a bubble of its own time.
func inWorld(t *testing.T, fn func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { fn(newWorld(t)) })
}

func wantCode(t *testing.T, err error, code agentlab.Code) {
	t.Helper()
	if agentlab.CodeOf(err) != code {
		t.Fatalf("got %v (code %q), want code %q", err, agentlab.CodeOf(err), code)
	}
}
