// Package sandbox manages sandboxes: it stores what is requested of them and
// brings them to that state.
//
// A call that changes something writes its intent (row and event, in one
// transaction) and returns. One wakeable loop runs a step for each sandbox
// that needs one, never two at once for the same sandbox; steps are
// idempotent, so after a crash the loop of the next process continues from the
// rows. No work depends on a request's context.
//
// # Life cycle of a sandbox
//
// REQUESTED → PROVISIONING (image, disk, VM) → BOOTING (started, waiting for
// the guest) → READY (the guest has its identity). After a temporary error
// (busy, unavailable, unknown_outcome) a step is retried with growing pauses
// until Limits.ProvisionTimeout. After any other error, when a guest does not
// answer within Limits.BootTimeout, and when a VM stops without a request, the
// sandbox becomes FAILED. A failed sandbox of a job is destroyed, unless
// keepalive is set; a failed sandbox that a user created stays FAILED, with
// its VM off, until it is destroyed or its lease ends.
//
// Every lease ends. Then a sandbox becomes TIMEOUT, is stopped (its guest is
// asked to power off first) and destroyed. A sandbox with keepalive is stopped
// and kept for Limits.KeepaliveGrace, during which its lease can be renewed,
// and then destroyed. The lease of a sandbox starts when its image is
// available.
//
// A sandbox of the warm pool (pool.go) waits in state POOLED until it is handed out,
// and becomes BOOTING then.
package sandbox

import (
	"context"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Store is the part of the database that the service uses. Its semantics are
// those of package store.
type Store interface {
	AllocateSandbox(ctx context.Context, sb agentlab.Sandbox, a agentlab.Allocation, evs ...agentlab.Event) (agentlab.Sandbox, error)
	UpdateSandbox(ctx context.Context, vmid int, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error)
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	SandboxByName(ctx context.Context, name string) (agentlab.Sandbox, error)
	SandboxByUID(ctx context.Context, uid string) (agentlab.Sandbox, error)
	Session(ctx context.Context, id string) (agentlab.Session, error)
	SessionByName(ctx context.Context, name string) (agentlab.Session, error)
	Sessions(ctx context.Context) ([]agentlab.Session, error)
	SessionHistory(ctx context.Context, id string) ([]agentlab.SessionSandbox, error)
	Sandboxes(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
	// Subscribe calls fn after each commit.
	Subscribe(fn func(agentlab.Commit))
	Job(ctx context.Context, id string) (agentlab.Job, error)
	PutProfile(ctx context.Context, name, yaml string) (sum string, err error)
	RevokeGrants(ctx context.Context, vmid int) error
	HandOutSandbox(ctx context.Context, vmid int, sb agentlab.Sandbox, maxLive int, evs ...agentlab.Event) (agentlab.Sandbox, error)
	DeleteSandbox(ctx context.Context, vmid int) error

	AddSnapshot(ctx context.Context, snap agentlab.Snapshot, q agentlab.SnapshotQuota, evs ...agentlab.Event) (agentlab.Snapshot, error)
	UpdateSnapshot(ctx context.Context, uid string, q agentlab.SnapshotQuota, fn func(*agentlab.Snapshot) ([]agentlab.Event, error)) (agentlab.Snapshot, error)
	RemoveSnapshot(ctx context.Context, uid string, evs ...agentlab.Event) error
	Snapshot(ctx context.Context, uid string) (agentlab.Snapshot, error)
	Snapshots(ctx context.Context, f agentlab.SnapshotFilter) ([]agentlab.Snapshot, error)
	SandboxesFrom(ctx context.Context, snapshotUID string) ([]agentlab.Sandbox, error)
	AllocateFork(ctx context.Context, snap agentlab.Snapshot, list []agentlab.Sandbox, a agentlab.Allocation,
		created func(agentlab.Sandbox) agentlab.Event) ([]agentlab.Sandbox, error)
	Workspace(ctx context.Context, id string) (agentlab.Workspace, error)
	UpdateWorkspace(ctx context.Context, id string, q agentlab.WorkspaceQuota, fn func(*agentlab.Workspace) ([]agentlab.Event, error)) (agentlab.Workspace, error)
	WorkspaceBusy(ctx context.Context, v agentlab.Workspace) (why string, err error)
	WorkspaceLease(ctx context.Context, uid string) (l agentlab.WorkspaceLease, ok bool, err error)
	WorkspaceLeases(ctx context.Context, workspaceID string) ([]agentlab.WorkspaceLease, error)
	UpdateWorkspaceLease(ctx context.Context, nonce string, fn func(*agentlab.WorkspaceLease) []agentlab.Event) (agentlab.WorkspaceLease, error)
	AttachWorkspace(ctx context.Context, vmid int, use agentlab.WorkspaceUse, session string, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error)
	ReleaseWorkspace(ctx context.Context, nonce string) error
	AddFork(ctx context.Context, snap agentlab.Snapshot, jobID string, fn func(*agentlab.Job) ([]agentlab.Event, error)) error
}

// DiskSizer is implemented by Images that know the sizes of the disks in them.
type DiskSizer interface {
	// DiskBytes returns the size of the disk of an image, in bytes; 0 if that is
	// not known, because the image is not built.
	DiskBytes(name string) int64
}

// Profiles returns a profile, or an error with the reason why it cannot be used.
type Profiles interface {
	Use(name string) (agentlab.Profile, error)
}

// Bootstrap delivers jobs and secrets to guests, and stores which secrets they
// have; *bootstrap.Service implements it.
type Bootstrap interface {
	Document(ctx context.Context, sb agentlab.Sandbox) (*guestapi.Bootstrap, error)
	Sent(uid string)
	Reissue(ctx context.Context, sb agentlab.Sandbox, health func(context.Context) (guestapi.Health, error)) (*guestapi.Bootstrap, time.Duration, error)
	ReceivedSecrets(sb agentlab.Sandbox) (bool, error)
	Inherit(ctx context.Context, from, to agentlab.Sandbox) (bool, error)
	RedactFunc(ctx context.Context, id string) func(text string) string
	Redactor(ctx context.Context, jobID string) (*redact.Redactor, error)
}

// Secrets has the secrets bundles; *secret.Vault implements it.
type Secrets interface {
	Exists(ctx context.Context, bundle string) error // code not_found if it does not
}

// Artifacts stores files of jobs; *artifact.Service implements it.
type Artifacts interface {
	Put(ctx context.Context, jobID, path string, r io.Reader) (agentlab.Artifact, error)
}

// Audit records the network use of sandboxes; *audit.Service implements it.
type Audit interface {
	// Drain stores the rest of the record of a sandbox whose VM is off, before
	// it is destroyed. It is bounded in time.
	Drain(ctx context.Context, sb agentlab.Sandbox) error
}

// Host is the machine on which sandboxes run.
type Host interface {
	Room() error // code no_space while its disk is too full to start a sandbox
	// Usable returns code unavailable while the backend with that name cannot start
	// sandboxes.
	Usable(backend string) error
}

// Guests serves guests; *guestserver.Server implements it.
type Guests interface {
	// Serve serves the guest of one sandbox on l until ctx ends or l fails,
	// and closes l.
	Serve(ctx context.Context, vmid int, l net.Listener) error
	// Handle returns a function that serves one connection of the guest and does
	// not block, and one that closes its connections and refuses more.
	Handle(vmid int) (accept func(net.Conn), stop func())
}

// Jobs knows the jobs of sandboxes; *job.Service implements it.
type Jobs interface {
	// Unshipped reports whether a job has, or may have, work that is not stored and
	// is lost with the disk of its sandbox.
	Unshipped(ctx context.Context, jobID string) (bool, error)
	// Salvaging reports whether another job, which has not ended, extracts the work
	// of a job from the disk of its sandbox.
	Salvaging(ctx context.Context, jobID string) (bool, error)
}

// Limits are the limits on sandboxes and on the work for them. Zero means the
// default.
type Limits struct {
	VMIDFirst, VMIDLast int           // range of numbers; default 1000 to 999999
	MaxSandboxes        int           // that may exist at once; 0 means no maximum
	MaxTTL              time.Duration // longest lease; default agentlab.MaxTTL
	DefaultTTL          time.Duration // if neither request nor profile has one; default 3 h, at most MaxTTL

	ImageTimeout     time.Duration // for building a missing image; default 1 h
	ProvisionTimeout time.Duration // for Create and Start with all attempts; default 5 min
	BootTimeout      time.Duration // from Start until the guest answers; default 180 s
	StopGrace        time.Duration // for the guest to power off, if the request sets none; default 30 s
	KeepaliveGrace   time.Duration // from the end of a keepalive lease to destruction; default 24 h

	NetworkTimeout time.Duration // for applying a changed network policy, else the sandbox fails; default 1 min

	Snapshots agentlab.SnapshotQuota // of the snapshots that users save; default none

	SetupBytes int64 // maximum size of the snapshots after setup; 0 means that there are none

	// Salvage is how long a sandbox is kept whose job ended with work that is not
	// stored; 0 means that none is kept. SalvageBytes is the maximum size of the disks
	// of all of them.
	Salvage      time.Duration
	SalvageBytes int64

	ParallelBoots int           // VMs that boot at the same time, and copies of guests that have not answered; default 4
	Workers       int           // steps at the same time; default 32
	AuditEvery    time.Duration // how often the backend is compared with the rows; default 5 s
}

func (l Limits) withDefaults() Limits {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	count := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	count(&l.VMIDFirst, 1000)
	count(&l.VMIDLast, 999999)
	def(&l.MaxTTL, agentlab.MaxTTL)
	def(&l.DefaultTTL, min(3*time.Hour, l.MaxTTL))
	def(&l.ImageTimeout, time.Hour)
	def(&l.ProvisionTimeout, 5*time.Minute)
	def(&l.BootTimeout, 180*time.Second)
	def(&l.StopGrace, 30*time.Second)
	def(&l.KeepaliveGrace, 24*time.Hour)
	def(&l.NetworkTimeout, time.Minute)
	count(&l.ParallelBoots, 4)
	count(&l.Workers, 32)
	def(&l.AuditEvery, 5*time.Second)
	return l
}

// Config is the configuration of a Service.
type Config struct {
	Store    Store
	Fleet    *fleet.Fleet
	Profiles Profiles

	Workspaces Workspaces

	Secrets Secrets // nil means that secrets bundles are not checked

	Bootstrap Bootstrap
	Artifacts Artifacts // stores console logs; nil: they are not stored
	Audit     Audit     // nil means that network use is not recorded
	Host      Host      // nil means that there is always space

	DefaultProfile string // of sandboxes without a profile in the request
	DefaultImage   string // if neither request nor profile names one
	Limits         Limits
	Pool           []PoolEntry // sandboxes that wait for users

	// IntentsDir stores requests to destroy a sandbox when the database has no
	// disk space for them. With "" they are lost if the process ends before it
	// has destroyed the sandbox.
	IntentsDir string

	Clock  func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Service manages sandboxes. Its methods may be called from any goroutine,
// also before Run; then requests wait for Run.
type Service struct {
	cfg       Config
	lim       Limits
	log       *slog.Logger
	clock     func() time.Time
	loop      *reconcile.Loop[int]
	boots     slots
	copySlots slots
	orphans   lock.Keyed[string] // by UID; held during a destruction
	images    imageBuilds
	guests    Guests // nil means that guests are not served
	jobs      Jobs   // nil means that no sandbox is kept
	intents   destroyIntents

	sweeping sync.Mutex // held by sweepSnapshots
	pool     pool

	mu           sync.Mutex
	states       map[int]*runtimeState
	knownOrphans map[string]fleet.Instance // by UID: orphans that were reported by an event
	run          context.Context           // of Run; nil before

	lostSnapshots map[string]lostSnapshot // by UID: those that the last audit found without a row; never changed

	wg sync.WaitGroup // what Run waits for in addition to the loop
}

// runtimeState is the service's state in memory for an existing sandbox. It may
// be lost: a new process starts with an empty one.
type runtimeState struct {
	uid     string
	handle  string                // as last seen
	backend string                // where it is; it may be none of the daemon's
	state   agentlab.SandboxState // as last seen

	lease          time.Time      // its end, as sent to the backend (backend.Power)
	leaseEnd       time.Time      // its end, as last seen
	warned         time.Duration  // the last warning about leaseEnd, one of leaseWarnings; 0: none
	terminals      int            // attached terminals
	blank          bool           // this process started its VM, and sent its guest nothing
	isCopy         bool           // it continues the guest of a snapshot
	hurry          bool           // another copy of its snapshot did not answer
	inspected      bool           // this process has found its VM in the expected state
	needsInspect   bool           // the audit found a difference: inspect the VM again
	tried          time.Time      // first attempt to power it on in its current state
	running        time.Time      // when this process first found the VM of a BOOTING sandbox running
	looked         time.Time      // when the VM of a BOOTING sandbox was last inspected
	grace          *time.Duration // requested by Stop; nil means the default
	image          *imageResult   // result of an image build that it waited for
	listener       *guestListener
	save           bool          // its console log must be saved
	retry          *retryState   // of steps that failed; nil if the last one did not
	destroyPending bool          // it must be destroyed, but the row could not be changed: the disk was full
	paused         string        // why its guest's CPUs are paused; "" if they are not
	snapshotsDone  bool          // its snapshots need nothing from its step
	saveWaits      string        // UID of a snapshot that waits, and why, as the last event has it
	syncedFor      string        // UID of the snapshot before which its guest last had to write its disks
	unsynced       string        // why it has not; "" if it has
	restored       string        // UID of the snapshot to which this process has restored it
	awaited        string        // ID of the workspace that its step waits for
	mounted        string        // ID of the workspace that its guest has mounted, as far as this process knows
	reboots        *rate.Limiter // of its guest by itself
	off            bool          // this process has powered off its VM to destroy it

	asking    bool      // its step waits for an answer of the guest, or saves it
	newPolicy bool      // its network policy has changed since its step read the row
	silent    int       // consecutive deliveries that the guest did not answer
	askAt     time.Time // when the next delivery may begin

	netSince   time.Time     // since when a network policy cannot be applied; zero if there is none
	netTrouble string        // why not
	changed    chan struct{} // closed at the next change of its row or of netTrouble; nil when no call waits
}

// New returns a Service. Call Run to start it.
func New(cfg Config) *Service {
	s := &Service{
		cfg: cfg, lim: cfg.Limits.withDefaults(), log: cfg.Logger, clock: cfg.Clock, intents: destroyIntents{cfg.IntentsDir},
		states: map[int]*runtimeState{}, knownOrphans: map[string]fleet.Instance{},
		pool: newPool(),
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	s.boots.limit, s.copySlots.limit = s.lim.ParallelBoots, s.lim.ParallelBoots
	s.loop = reconcile.New(reconcile.Config[int]{Step: s.step, Failed: reconcile.LogFailed[int](s.log, "sandbox", "vmid"), Workers: s.lim.Workers})
	cfg.Store.Subscribe(s.committed)
	return s
}

// ServeGuests sets the server for guests. It must be called before Run. It is
// not in Config because that server calls the job service, and the job service
// calls this one.
func (s *Service) ServeGuests(g Guests) { s.guests = g }

// KeepWork sets the service of the jobs, for which sandboxes with unstored work are
// kept. It must be called before Run; without it none is kept.
func (s *Service) KeepWork(j Jobs) { s.jobs = j }

// Run runs the steps of sandboxes until ctx ends, and returns when all steps
// have ended. VMs keep running. It may be called once.
func (s *Service) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	rows, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{})
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	s.mu.Lock()
	s.run = ctx
	s.mu.Unlock()
	for _, sb := range rows {
		s.track(sb)
		s.loop.Wake(sb.VMID)
	}
	s.readIntents(rows)
	s.logElsewhere(rows)
	s.spawn(s.boundSalvage) // an earlier process may have ended before that, or had another limit
	for _, b := range s.cfg.Fleet.All() {
		s.wg.Go(func() { s.auditLoop(ctx, b) })
	}
	s.wg.Go(func() { s.poolLoop(ctx) })
	// Guests are cut off first, while the steps end, so that their calls are over
	// before the store closes.
	defer context.AfterFunc(ctx, s.closeListeners)()
	s.loop.Run(ctx)
	cancel()
	s.mu.Lock()
	s.run = ended // no new work begins
	s.mu.Unlock()
	s.closeListeners()
	s.wg.Wait()
	return nil
}

// ended is the context of a Run that is over.
var ended = func() context.Context { //nolint:gochecknoglobals // a constant
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// spawn runs fn with the context of Run, which waits for it. It returns false
// if Run is not running.
func (s *Service) spawn(fn func(ctx context.Context)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil || s.run.Err() != nil {
		return false
	}
	ctx := s.run
	s.wg.Go(func() { fn(ctx) })
	return true
}

// track returns the state of a sandbox, updated from its row.
func (s *Service) track(sb agentlab.Sandbox) *runtimeState {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.states[sb.VMID]
	if m == nil || m.uid != sb.UID {
		m = &runtimeState{uid: sb.UID, backend: s.on(sb).Name()}
		s.states[sb.VMID] = m
		s.loop.Assign(sb.VMID, m.backend)
	}
	m.handle = sb.Handle
	if m.state != sb.State {
		m.state, m.inspected = sb.State, false
		m.tried, m.running, m.retry = time.Time{}, time.Time{}, nil
		m.silent, m.askAt = 0, time.Time{}
		if !sb.State.HasVM() {
			m.mounted = ""
		}
		if sb.State == agentlab.SandboxStopped {
			m.grace = nil
		}
	}
	return m
}

// forget deletes the memory of a sandbox that is destroyed.
func (s *Service) forget(vmid int) {
	s.releaseSlots(vmid)
	s.mu.Lock()
	m := s.states[vmid]
	delete(s.states, vmid)
	s.loop.Forget(vmid)
	s.mu.Unlock()
	if m != nil {
		m.listener.close()
	}
}

// withState calls fn with the state of a sandbox, if there is one. It holds
// the lock during the call.
func (s *Service) withState(vmid int, fn func(*runtimeState)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.states[vmid]; m != nil {
		fn(m)
	}
}

// Wake runs the step of a sandbox that another component changed.
func (s *Service) Wake(vmid int) { s.loop.Wake(vmid) }

// Queue returns what the loop of the sandboxes has to do now.
func (s *Service) Queue() reconcile.Stats { return s.loop.Stats() }

// update changes a row and wakes the calls that wait for a change of it.
func (s *Service) update(ctx context.Context, vmid int, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error) {
	var before agentlab.Sandbox
	sb, err := s.cfg.Store.UpdateSandbox(ctx, vmid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		before = *sb
		evs, err := fn(sb)
		if sb.State != before.State || sb.Desired != before.Desired {
			sb.Waiting = "" // it was about the previous state
		}
		sb.OnDisk = sb.OnDisk && sb.State == agentlab.SandboxSuspended
		if sb.Pooled() {
			evs = nil // no user knows it yet
		}
		return evs, err
	})
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	s.track(sb)
	s.withState(vmid, (*runtimeState).notifyWaiters)
	if sb.State != before.State && (sb.State == agentlab.SandboxDestroyed || sb.From.Snapshot != "") {
		s.spawn(s.sweepSnapshots) // some may no longer be needed
	}
	if sb.Salvage && !before.Salvage {
		s.spawn(s.boundSalvage)
	}
	return sb, nil
}
