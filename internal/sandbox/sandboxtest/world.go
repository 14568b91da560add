// Package sandboxtest runs the service of sandboxes with all its parts in tests, on the
// fake backend and in time of its own.
package sandboxtest

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

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/bootstrap"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/session"
	"github.com/agentlab-vm/agentlab/internal/snapshot"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/store/storetest"
	"github.com/agentlab-vm/agentlab/internal/warmpool"
	"github.com/agentlab-vm/agentlab/internal/workspace"
)

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
	Mu    sync.Mutex
	have  []string
	Build func(ctx context.Context, name string, progress func(string)) error
	Calls int

	Bytes   int64  // size of the disks
	Missing bool   // every image must be built
	Digest  string // of all images; "" is sha256-1
}

func (i *images) Check(name string) error {
	if !slices.Contains(i.have, name) {
		return agentlab.Errorf(agentlab.CodeNotFound, "there is no image %q", name).WithField("image")
	}
	return nil
}

func (i *images) DiskBytes(string) int64 { return i.Bytes }

func (i *images) Current(_ context.Context, name string) (string, error) {
	i.Mu.Lock()
	defer i.Mu.Unlock()
	if i.Missing || !slices.Contains(i.have, name) {
		return "", agentlab.Errorf(agentlab.CodeNotFound, "image %q is not built", name)
	}
	return name + "@" + cmp.Or(i.Digest, "sha256-1"), nil
}

func (i *images) Ensure(ctx context.Context, name string, progress func(string)) (string, error) {
	i.Mu.Lock()
	i.Calls++
	build := i.Build
	i.Mu.Unlock()
	if build != nil {
		if err := build(ctx, name, progress); err != nil {
			return "", err
		}
	}
	return name + "@" + cmp.Or(i.Digest, "sha256-1"), nil
}

// profiles are the profiles that exist.
type profiles struct {
	Mu   sync.Mutex
	List map[string]agentlab.Profile
}

func (p *profiles) Use(name string) (agentlab.Profile, error) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	prof, ok := p.List[name]
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
type host struct{ w *World }

func (h host) Room() error {
	if h.w.Full.Load() {
		return agentlab.Errorf(agentlab.CodeNoSpace, "the disk is full")
	}
	return nil
}

func (h host) Usable(string) error {
	if h.w.Broken.Load() {
		return agentlab.Errorf(agentlab.CodeUnavailable, "its program is missing")
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

func (q *queue) Close() error { return nil }

func (q *queue) Addr() net.Addr { return &net.UnixAddr{Name: "queue", Net: "unix"} }

// World is a machine with a database, on which services come and go.
type World struct {
	*testing.T
	Path     string
	Intents  string // directory; outlives the daemon
	Store    *store.Store
	Host     *fake.Host
	Driver   *fake.Driver
	Images   *images
	Limits   sandbox.Limits
	Quota    agentlab.SnapshotQuota
	Pool     []warmpool.Entry
	Profiles *profiles
	serve    serve
	Received sync.Map // UIDs of sandboxes that have received secrets; outlives the daemon

	Full   atomic.Bool      // the host's disk
	Broken atomic.Bool      // the backend cannot start sandboxes
	DBFull atomic.Bool      // so full that the database cannot be written
	Clock  func() time.Time // the daemon's; nil means time.Now
	Plain  bool             // the driver has nothing that a backend need not have
	Wrap   func(backend.Driver) backend.Driver

	Svc        *sandbox.Service
	Warm       *warmpool.Pool
	Snaps      *snapshot.Service
	Workspaces *workspace.Service
	Sessions   *session.Service
	stop       func()

	mu   sync.Mutex
	seen []agentlab.Event // every event that was committed
	next chan struct{}    // closed after the next commit
}

func newWorld(t *testing.T) *World { return NewWorldOn(t, fake.Config{BootDelay: 2 * time.Second}) }

// NewWorldOn returns a World on a new host with a configuration.
func NewWorldOn(t *testing.T, backend fake.Config) *World {
	t.Helper()
	host, err := fake.NewHost(backend)
	if err != nil {
		t.Fatal(err)
	}
	w := &World{
		T: t, Path: filepath.Join(t.TempDir(), "agentlab.db"), Intents: t.TempDir(), Host: host,
		Profiles: &profiles{List: map[string]agentlab.Profile{
			"plain":   {Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}, TTL: time.Hour},
			"secrets": {Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}, TTL: time.Hour, SecretsBundle: "default"},
			"long":    {Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}, TTL: 100 * 24 * time.Hour},
		}},
		next: make(chan struct{}), Images: &images{have: []string{"base", "agents"}},
		serve: func(ctx context.Context, _ int, l net.Listener) error {
			srv := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Minute}
			stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
			defer stop()
			return srv.Serve(l)
		},
	}
	t.Cleanup(func() {
		w.Kill()
		_ = host.Close()
	})
	storetest.Create(t, w.Path)
	w.Begin()
	return w
}

// Begin starts the daemon's part: store, driver and service.
func (w *World) Begin() {
	w.Helper()
	var err error
	w.Store, err = store.Open(context.Background(), w.Path, store.Options{})
	if err != nil {
		w.Fatal(err)
	}
	w.Store.Subscribe(func(c agentlab.Commit) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.seen = append(w.seen, c.Events...)
		close(w.next)
		w.next = make(chan struct{})
	})
	w.Driver = w.Host.Open()
	backends := fleet.Single(w.offered(), w.Images)
	received := boot{bootstrap.New(bootstrap.Config{Store: w.Store, Profiles: w.Profiles, Backends: fleet.Single(w.Driver, nil), Clock: w.Clock}), &w.Received}
	var guests sandbox.Guests
	if w.serve != nil {
		guests = w.serve
	}
	core := sandbox.NewCore(sandbox.Config{
		Guests: guests,
		Store:  db{w.Store, &w.DBFull}, Sessions: w.Store, IntentsDir: w.Intents, Fleet: backends,
		Profiles:       w.Profiles,
		DefaultProfile: "plain", DefaultImage: "base", Limits: w.Limits, Clock: w.Clock, Host: host{w},
		Bootstrap: received,
	})
	w.Workspaces = workspace.New(workspace.Config{Core: core, Store: db{w.Store, &w.DBFull}, Leases: w.Store, Fleet: fleet.Single(w.Driver, nil), Clock: w.Clock})
	w.Warm = warmpool.New(core, w.Store, w.Pool...)
	w.Snaps = snapshot.New(snapshot.Config{
		Core: core, Store: db{w.Store, &w.DBFull}, Profiles: w.Profiles, Bootstrap: received, Pool: w.Warm, Quota: w.Quota,
	})
	w.Svc = sandbox.New(core, sandbox.Parts{Pool: w.Warm, Snapshots: w.Snaps, Workspaces: w.Workspaces})
	w.Sessions = session.New(session.Config{Store: w.Store, Workspaces: w.Workspaces, Sandboxes: w.Svc, Profiles: w.Profiles, Fleet: fleet.Single(w.Driver, w.Images), DefaultProfile: "plain"})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 4)
	for _, run := range []func(context.Context) error{w.Svc.Run, w.Warm.Run, w.Snaps.Run, w.Workspaces.Run} {
		go func() { done <- run(ctx) }()
	}
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := cmp.Or(<-done, <-done, <-done, <-done); err != nil && !errors.Is(err, context.Canceled) {
			w.Error(err)
		}
		_ = w.Driver.Close()
		if err := w.Store.Close(); err != nil {
			w.Error(err)
		}
	})
}

// offered is the driver as the service sees it.
func (w *World) offered() backend.Driver {
	if w.Plain {
		return struct{ backend.Driver }{w.Driver}
	}
	if w.Wrap != nil {
		return w.Wrap(w.Driver)
	}
	return w.Driver
}

// Kill ends the daemon's part; VMs continue to run.
func (w *World) Kill() { w.stop() }

// Restart is kill and begin.
func (w *World) Restart() {
	w.Helper()
	w.Kill()
	w.Svc = nil
	w.Begin()
}

// Create requests a sandbox.
func (w *World) Create(r agentlab.SandboxRequest) agentlab.Sandbox {
	w.Helper()
	sb, err := w.Svc.Create(context.Background(), r)
	if err != nil {
		w.Fatal(err)
	}
	return sb
}

// Get returns the row of a sandbox.
func (w *World) Get(vmid int) agentlab.Sandbox {
	w.Helper()
	sb, err := w.Store.Sandbox(context.Background(), vmid)
	if err != nil {
		w.Fatal(err)
	}
	return sb
}

// Until lets time pass until the sandbox is in one of the states.
func (w *World) Until(vmid int, states ...agentlab.SandboxState) agentlab.Sandbox {
	w.Helper()
	return w.UntilIt(vmid, func(sb agentlab.Sandbox) bool { return slices.Contains(states, sb.State) })
}

// UntilIt lets time pass until the row of a sandbox meets a condition.
func (w *World) UntilIt(vmid int, cond func(agentlab.Sandbox) bool) (sb agentlab.Sandbox) {
	w.Helper()
	w.Pass(func() bool { sb = w.Get(vmid); return cond(sb) }, func() string {
		return fmt.Sprintf("sandbox %d is %s (desired %s, reason %q)", vmid, sb.State, sb.Desired, sb.Reason)
	})
	return sb
}

// Pass lets time pass, at most two hours, until done holds. is says what is instead.
func (w *World) Pass(done func() bool, is func() string) {
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

// Power returns the power state of the VM of a sandbox; "" if there is none.
func (w *World) Power(sb agentlab.Sandbox) backend.PowerState {
	w.Helper()
	d := w.Host.Open()
	in, err := d.Inspect(context.Background(), backend.RefOf(sb))
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return ""
	}
	if err != nil {
		w.Fatal(err)
	}
	return in.Power
}

// Events returns the stored events of a kind; "" is all.
func (w *World) Events(kind string) []agentlab.Event {
	w.Helper()
	list, err := w.Store.Events(context.Background(), agentlab.EventFilter{Kinds: []string{kind}})
	if err != nil {
		w.Fatal(err)
	}
	return list
}

// InWorld runs a test in a bubble of its own time.
func InWorld(t *testing.T, fn func(w *World)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { fn(newWorld(t)) })
}

// WantCode fails the test unless an error has a code.
func WantCode(t *testing.T, err error, code agentlab.Code) {
	t.Helper()
	if agentlab.CodeOf(err) != code {
		t.Fatalf("got %v (code %q), want code %q", err, agentlab.CodeOf(err), code)
	}
}
