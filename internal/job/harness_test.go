package job_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/snapshot"
	"github.com/agentlab-vm/agentlab/internal/warmpool"
	"github.com/agentlab-vm/agentlab/internal/workspace"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/bootstrap"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/guestplane/artifacts"
	exchange "github.com/agentlab-vm/agentlab/internal/guestplane/bootstrap"
	"github.com/agentlab-vm/agentlab/internal/guestplane/guesttest"
	"github.com/agentlab-vm/agentlab/internal/guestplane/report"
	"github.com/agentlab-vm/agentlab/internal/job"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/secret"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// jobDB is the store as the job service sees it.
type jobDB struct {
	*store.Store
	w *world
}

func (d jobDB) Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	if f := d.w.beforeSandbox.Swap(nil); f != nil {
		(*f)(vmid)
	}
	return d.Store.Sandbox(ctx, vmid)
}

// profiles are the profiles that exist.
type profiles struct {
	mu   sync.Mutex
	list map[string]agentlab.Profile
}

func (p *profiles) set(name string, prof agentlab.Profile) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list[name] = prof
}

func (p *profiles) remove(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.list, name)
}

// get returns a profile as it was set, or the zero value.
func (p *profiles) get(name string) agentlab.Profile {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.list[name]
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

func (p *profiles) Usable() []agentlab.Profile {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []agentlab.Profile
	for _, name := range slices.Sorted(maps.Keys(p.list)) {
		prof := p.list[name]
		prof.Name = name
		all = append(all, prof)
	}
	return all
}

// lossy loses answers after all was done for them.
type lossy struct {
	*bootstrap.Service
	jobs *job.Service // of the same daemon
	w    *world
}

func (l lossy) Exchange(ctx context.Context, vmid int, hash string) (guestapi.BootstrapResponse, error) {
	resp, err := l.Service.Exchange(ctx, vmid, hash)
	if err == nil && l.w.lose.Add(-1) >= 0 {
		l.jobs.Started(ctx, vmid) // as after an answer that is lost on the wire
		return guestapi.BootstrapResponse{}, agentlab.Errorf(agentlab.CodeUnavailable, "the answer is lost")
	}
	if seize := l.w.seize.Load(); err == nil && seize != nil {
		(*seize)(resp)
	}
	return resp, err
}

// slowVault tells when it has read what a job was given.
type slowVault struct {
	*secret.Vault
	w *world
}

func (v slowVault) Delivered(id string) ([]string, bool, error) {
	v.w.kept.Add(1)
	values, ok, err := v.Vault.Delivered(id)
	if hook := v.w.afterKept.Swap(nil); hook != nil {
		(*hook)()
	}
	return values, ok, err
}

// world is a machine with a state directory, on which daemons come and go.
type world struct {
	restarts int // how often the daemon was killed
	*testing.T
	dir        string
	host       *fake.Host
	profiles   *profiles
	max        int           // sandboxes
	setupBytes int64         // of the snapshots after setup; 0 means plenty
	salvage    time.Duration // how long sandboxes with unstored work are kept
	lose       atomic.Int32  // so many bootstrap answers are lost

	beforeSandbox atomic.Pointer[func(vmid int)]                   // called once, before jobs read a sandbox
	seize         atomic.Pointer[func(guestapi.BootstrapResponse)] // is shown the others

	kept      atomic.Int32           // how often it was read what a job was given
	afterKept atomic.Pointer[func()] // called once; see slowVault

	egress job.Egress // given to daemons that begin

	store      *store.Store
	sandboxes  *sandbox.Service
	snapshots  *snapshot.Service
	workspaces *workspace.Service
	jobs       *job.Service
	boot       *bootstrap.Service
	artifacts  *artifact.Service
	vault      *secret.Vault
	guests     *guestplane.Plane
	kill       func()

	mu   sync.Mutex
	seen []agentlab.Event
	next chan struct{} // closed after the next commit
}

func inWorld(t *testing.T, fn func(w *world)) {
	t.Helper()
	inWorldOn(t, fake.Config{}, fn)
}

// inWorldOn is inWorld with a host of its own kind.
func inWorldOn(t *testing.T, cfg fake.Config, fn func(w *world)) {
	t.Helper()
	cfg.BootDelay = 2 * time.Second
	synctest.Test(t, func(t *testing.T) {
		host, err := fake.NewHost(cfg)
		if err != nil {
			t.Fatal(err)
		}
		res := agentlab.Resources{Cores: 1, MemoryMB: 512}
		nat := agentlab.Network{Mode: agentlab.NetworkNAT}
		w := &world{T: t, dir: t.TempDir(), host: host, next: make(chan struct{}), profiles: &profiles{list: map[string]agentlab.Profile{
			"plain":   {Resources: res, Network: nat, TTL: time.Hour, Mode: "dangerous", UploadArtifacts: true, ClonePath: "/tmp/repo"},
			"secrets": {Resources: res, Network: nat, TTL: time.Hour, Mode: "dangerous", UploadArtifacts: true, SecretsBundle: "team"},
			"nowhere": {Resources: res, Network: nat, TTL: time.Hour, Mode: "dangerous", SecretsBundle: "missing"},
			"listed": {Resources: res, TTL: time.Hour, Mode: "dangerous", Network: agentlab.Network{
				Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "github.com"}, {Rule: "*.npmjs.org:443"}, {Rule: "8.8.8.8"}},
			}},
			"dark": {Resources: res, Network: agentlab.Network{Mode: agentlab.NetworkOff}, TTL: time.Hour, Mode: "dangerous"},
		}}}
		t.Cleanup(func() {
			w.kill()
			_ = host.Close()
		})
		storetest.Create(t, filepath.Join(w.dir, "agentlab.db"))
		w.begin()
		fn(w)
	})
}

// begin starts a daemon without its API.
func (w *world) begin() {
	w.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	fatal := func(err error) {
		if err != nil {
			cancel()
			w.Fatal(err)
		}
	}
	var err error
	// What a request of a guest calls is not read from w: it may outlast its daemon.
	var boot *bootstrap.Service
	var jobs *job.Service
	w.store, err = store.Open(ctx, filepath.Join(w.dir, "agentlab.db"), store.Options{})
	fatal(err)
	w.artifacts, err = artifact.New(artifact.Config{Dir: w.dir, Store: w.store})
	fatal(err)
	w.vault = secret.NewVault(filepath.Join(w.dir, "secrets"))
	driver := w.host.Open()
	boot = bootstrap.New(bootstrap.Config{Store: w.store, Profiles: w.profiles, Secrets: slowVault{w.vault, w}, Backends: fleet.Single(driver, nil)})
	w.boot = boot
	backends := fleet.Single(driver, fake.Images{})
	w.guests = guestplane.New(guestplane.Config{Store: w.store, Redactors: boot})
	core := sandbox.NewCore(sandbox.Config{
		Guests: w.guests, Jobs: job.Work{Store: w.store, Artifacts: w.artifacts, Profiles: w.profiles},
		Store: w.store, Sessions: w.store, Fleet: backends, Profiles: w.profiles,
		DefaultProfile: "plain", DefaultImage: "base", Limits: sandbox.Limits{MaxSandboxes: w.max, Salvage: w.salvage, SalvageBytes: 100 << 30},
		Bootstrap: w.boot, Artifacts: w.artifacts,
	})
	pool := warmpool.New(core, w.store)
	w.snapshots = snapshot.New(snapshot.Config{
		Core: core, Store: w.store, Profiles: w.profiles, Bootstrap: w.boot, Pool: pool, SetupBytes: cmp.Or(w.setupBytes, 1<<40),
	})
	w.workspaces = workspace.New(workspace.Config{Core: core, Store: w.store, Leases: w.store, Fleet: backends})
	w.sandboxes = sandbox.New(core, sandbox.Parts{Pool: pool, Snapshots: w.snapshots, Workspaces: w.workspaces})
	jobs = job.New(job.Config{
		Store: jobDB{w.store, w}, Sandboxes: w.sandboxes, Snapshots: w.snapshots, Profiles: w.profiles, Secrets: w.vault, Bootstrap: w.boot, Artifacts: w.artifacts,
		Egress: w.egress, DefaultProfile: "plain", DefaultAgent: "shell", ShellImage: "base", AgentsImage: "agents",
	})
	w.store.Subscribe(func(c agentlab.Commit) { // the last one: the services have seen what wakes a test
		w.mu.Lock()
		defer w.mu.Unlock()
		w.seen = append(w.seen, c.Events...)
		close(w.next)
		w.next = make(chan struct{})
	})
	w.jobs = jobs
	w.guests.Add(guesttest.Unlimited(exchange.Service(lossy{boot, jobs, w}, jobs)), report.Service(jobs), artifacts.Service(w.artifacts))
	var wg sync.WaitGroup
	for _, run := range []func(context.Context) error{w.sandboxes.Run, w.snapshots.Run, w.jobs.Run} {
		wg.Go(func() {
			if err := run(ctx); err != nil {
				w.Error(err)
			}
		})
	}
	w.kill = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		if err := errors.Join(driver.Close(), w.artifacts.Close(), w.store.Close()); err != nil {
			w.Error(err)
		}
	})
}

func (w *world) restart() {
	w.Helper()
	w.restarts++
	w.kill()
	w.begin()
}

// run makes a job of a task.
func (w *world) run(r agentlab.JobRequest) agentlab.Job {
	w.Helper()
	j, err := w.jobs.Create(context.Background(), r)
	if err != nil {
		w.Fatal(err)
	}
	return j
}

func (w *world) job(id string) agentlab.Job {
	w.Helper()
	j, err := w.store.Job(context.Background(), id)
	if err != nil {
		w.Fatal(err)
	}
	return j
}

func (w *world) eventually(what string, cond func() bool) {
	w.Helper()
	for begin := time.Now(); ; {
		w.mu.Lock()
		next := w.next
		w.mu.Unlock()
		if cond() {
			return
		}
		if time.Since(begin) > 4*time.Hour {
			w.Fatalf("not after four hours: %s", what)
		}
		select { // in the bubble's time, so nothing really waits
		case <-next:
		case <-time.After(time.Minute):
		}
	}
}

// final waits for the end of a job and, unless it keeps it, of its sandbox.
func (w *world) final(id string) agentlab.Job {
	w.Helper()
	w.eventually(id+" is final", func() bool { return w.job(id).Status.Final() })
	j := w.job(id)
	if !j.Keepalive {
		w.gone(id)
	}
	return j
}

// gone waits until the sandbox of a job is destroyed.
func (w *world) gone(id string) {
	w.Helper()
	ctx := context.Background()
	w.eventually("the sandbox of "+id+" is destroyed", func() bool {
		all, err := w.sandboxes.List(ctx, agentlab.SandboxFilter{})
		if err != nil {
			w.Fatal(err)
		}
		for _, sb := range all {
			if sb.JobID == id {
				return false
			}
		}
		return true
	})
	left, err := w.host.Open().List(ctx)
	if err != nil {
		w.Fatal(err)
	}
	for _, in := range left {
		if in.Name == id {
			w.Errorf("the backend still has %+v", in)
		}
	}
}

func (w *world) phase(id, phase string) {
	w.Helper()
	w.eventually(id+" is in phase "+phase, func() bool { return w.job(id).Phase == phase })
}

func (w *world) sandbox(id string) agentlab.Sandbox {
	w.Helper()
	w.eventually(id+" has a sandbox", func() bool { return w.job(id).SandboxVMID != 0 })
	sb, err := w.store.Sandbox(context.Background(), w.job(id).SandboxVMID)
	if err != nil {
		w.Fatal(err)
	}
	return sb
}

func (w *world) ref(id string) backend.Ref {
	sb := w.sandbox(id)
	return backend.RefOf(sb)
}

func (w *world) log(id string) string {
	w.Helper()
	rc, err := w.artifacts.Log(context.Background(), id, 0, false)
	if errors.Is(err, os.ErrNotExist) {
		return ""
	}
	if err != nil {
		w.Fatal(err)
	}
	defer rc.Close()
	text, err := io.ReadAll(rc)
	if err != nil {
		w.Fatal(err)
	}
	return string(text)
}

// events returns the messages of the events of a job. It reads the database: a change that
// can be read there may not be in seen yet.
func (w *world) events(kind, jobID string) (out []string) {
	w.Helper()
	list, err := w.store.Events(context.Background(), agentlab.EventFilter{Kinds: []string{kind}, JobIDs: []string{jobID}})
	if err != nil {
		w.Fatal(err)
	}
	for _, e := range list {
		out = append(out, strings.ReplaceAll(e.Message, jobID, "J"))
	}
	return out
}

// leaks looks for a text in everything that a daemon keeps.
func (w *world) leaks(secrets ...string) {
	w.Helper()
	err := filepath.WalkDir(w.dir, func(p string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		data, err := os.ReadFile(p)
		for _, s := range secrets {
			if bytes.Contains(data, []byte(s)) {
				w.Errorf("%s holds the secret %q", p, s)
			}
		}
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
}

func wantCode(t *testing.T, err error, code agentlab.Code) {
	t.Helper()
	if agentlab.CodeOf(err) != code {
		t.Fatalf("got %v (code %q), want code %q", err, agentlab.CodeOf(err), code)
	}
}
