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
// A sandbox of the warm pool waits in state POOLED until it is handed out, and becomes
// BOOTING then.
//
// # Parts
//
// The warm pool, the snapshots and the workspaces are parts of the service in packages of
// their own. A part uses the Core, and the step of a sandbox calls the parts through the
// interfaces of Parts.
package sandbox

import (
	"context"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/lock"
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
	Sandboxes(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
	PutProfile(ctx context.Context, name, yaml string) (sum string, err error)
	RevokeGrants(ctx context.Context, vmid int) error
	SandboxesFrom(ctx context.Context, snapshotUID string) ([]agentlab.Sandbox, error)
	AttachWorkspace(ctx context.Context, vmid int, use agentlab.WorkspaceUse, session string, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error)
}

// Sessions are the rows of sessions, whose names mean their current sandboxes.
type Sessions interface {
	Session(ctx context.Context, id string) (agentlab.Session, error)
	SessionByName(ctx context.Context, name string) (agentlab.Session, error)
	Sessions(ctx context.Context) ([]agentlab.Session, error)
	SessionHistory(ctx context.Context, id string) ([]agentlab.SessionSandbox, error)
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

// Guests serves guests; *guestplane.Plane implements it.
type Guests interface {
	// Serve serves the guest of one sandbox on l until ctx ends or l fails,
	// and closes l.
	Serve(ctx context.Context, vmid int, l net.Listener) error
	// Handle returns a function that serves one connection of the guest and does
	// not block, and one that closes its connections and refuses more.
	Handle(vmid int) (accept func(net.Conn), stop func())
}

// Jobs knows the jobs of sandboxes; job.Work implements it.
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

// Pool is the warm pool: sandboxes that wait for users (agentlab.Sandbox.Pooled);
// *warmpool.Pool implements it.
type Pool interface {
	// HandOut makes a sandbox of the pool the planned sandbox sb. ok is false if none
	// fits. Codes: exists, limit.
	HandOut(ctx context.Context, sb agentlab.Sandbox) (made agentlab.Sandbox, ok bool, err error)
	// WithNumbers calls fn with the numbers and addresses that new sandboxes on a
	// backend may get, and once more after the pool has given way if they are not enough.
	WithNumbers(ctx context.Context, on string, fn func(agentlab.Allocation) error) error
	// Quiet delays the pool, and destroys the sandbox that is being made for it: a
	// request comes first.
	Quiet(ctx context.Context)
	// GiveWay delays the pool before the VM of sb is started, and destroys it if the
	// host lacks memory or disk space for sb. It does not wait for that.
	GiveWay(ctx context.Context, sb agentlab.Sandbox)
	// Drop destroys a sandbox of the pool, unless it was handed out.
	Drop(ctx context.Context, vmid int, why string)
	// Ready makes a sandbox of the pool whose VM runs POOLED, when its guest has booted.
	// An error means that the guest does not answer, or still boots.
	Ready(ctx context.Context, sb agentlab.Sandbox) error
	// Removed deletes the row of a destroyed sandbox of the pool, so that its number is
	// free again.
	Removed(ctx context.Context, vmid int) error
}

// Snapshots are the snapshots of sandboxes; *snapshot.Service implements it.
type Snapshots interface {
	// Origin returns the snapshot SANDBOX/NAME from which a sandbox is requested. Codes:
	// invalid, not_found, conflict, unsupported.
	Origin(ctx context.Context, from string) (agentlab.Snapshot, error)
	// ForkOrigin returns the snapshot with a UID, saved for attempts, from which a sandbox
	// is requested, and the layers of the network policy that the new sandbox needs.
	ForkOrigin(ctx context.Context, uid string) (agentlab.Snapshot, []agentlab.Network, error)
	// OriginReady reports whether the snapshot that a sandbox is created from can be
	// used. If not, it will be later, or refusal has the reason why it never will.
	OriginReady(ctx context.Context, sb agentlab.Sandbox) (ready bool, refusal, err error)
	// HasMemory reports whether a snapshot has the memory of its guest.
	HasMemory(ctx context.Context, uid string) bool
	// Step saves and deletes the snapshots of a sandbox that wait for it. It returns an
	// error only if ctx ends.
	Step(ctx context.Context, sb agentlab.Sandbox) error
	// Restore runs the next action of a sandbox that is being restored to a snapshot.
	Restore(ctx context.Context, sb agentlab.Sandbox) error
}

// Workspaces are the workspaces of sandboxes; *workspace.Service implements it.
type Workspaces interface {
	// Select returns the workspace that a request wants, and if it must be created
	// also its row, which is not stored yet. Codes: not_found, exists, invalid, limit,
	// conflict, unsupported.
	Select(ctx context.Context, sel agentlab.WorkspaceSelection) (agentlab.WorkspaceUse, error)
	// Await ends the step of a REQUESTED sandbox until its workspace can be attached. The
	// backend has nothing of the sandbox until then.
	Await(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, done bool, err error)
	// AttachVolume attaches the workspace of a sandbox that is about to start.
	AttachVolume(ctx context.Context, sb agentlab.Sandbox) error
	// Mount makes the guest of a sandbox mount its workspace.
	Mount(ctx context.Context, sb agentlab.Sandbox) error
	// Supervise attaches the workspace that a running sandbox got, if it has it not yet.
	// again is when to call it again, 0 for not before the next step.
	Supervise(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, err error)
	// StepRelease detaches the workspace of a sandbox if that was requested. settled
	// means that the row has changed.
	StepRelease(ctx context.Context, sb agentlab.Sandbox) (settled bool, err error)
	// UnmountLast makes the guest of a sandbox that is destroyed write its workspace.
	UnmountLast(ctx context.Context, sb agentlab.Sandbox) error
	// Return ends the lease of a sandbox whose VM is off and that does not run again by
	// itself.
	Return(ctx context.Context, sb agentlab.Sandbox) error
	// AcquiredAt returns when a sandbox got the lease of its workspace; zero if it has
	// none.
	AcquiredAt(ctx context.Context, sb agentlab.Sandbox) (time.Time, error)
}

// Permanent is an error of a step that does not end by itself.
type Permanent struct{ Err error }

// Error implements error.
func (e Permanent) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e Permanent) Unwrap() error { return e.Err }

// Config is the configuration of a Core.
type Config struct {
	Store    Store
	Sessions Sessions
	Fleet    *fleet.Fleet
	Profiles Profiles

	Secrets Secrets // nil means that secrets bundles are not checked

	Bootstrap Bootstrap
	Artifacts Artifacts // stores console logs; nil: they are not stored
	Audit     Audit     // nil means that network use is not recorded
	Host      Host      // nil means that there is always space
	Guests    Guests    // nil means that guests are not served
	Jobs      Jobs      // nil means that no sandbox is kept for unstored work

	DefaultProfile string // of sandboxes without a profile in the request
	DefaultImage   string // if neither request nor profile names one
	Limits         Limits

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
	*Core

	orphans    lock.Keyed[string] // by UID; held during a destruction
	images     imageBuilds
	intents    destroyIntents
	pool       Pool
	snaps      Snapshots
	workspaces Workspaces

	knownOrphans map[string]fleet.Instance // by UID: orphans that were reported by an event
}

// Parts are the parts of the service that other packages have. All are required.
type Parts struct {
	Pool       Pool
	Snapshots  Snapshots
	Workspaces Workspaces
}

// New returns the Service of a Core. Call Run to start it.
func New(c *Core, parts Parts) *Service {
	s := &Service{Core: c, intents: destroyIntents{c.cfg.IntentsDir}, knownOrphans: map[string]fleet.Instance{}, pool: parts.Pool, snaps: parts.Snapshots, workspaces: parts.Workspaces}
	c.step = s.step
	return s
}

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
