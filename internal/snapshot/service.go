// Package snapshot is the service for the snapshots of sandboxes: snapshots of users,
// sources of forks, and snapshots after setup.
//
// A request writes the row. The driver requires that the calls for a sandbox and its
// snapshots are made one after the other. So the step of the sandbox makes them (Step,
// Restore) as long as the sandbox exists. When it is DESTROYED, the sweep makes them.
package snapshot

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// Store is the part of the database that the service uses. Its semantics are those of
// package store.
type Store interface {
	AddSnapshot(ctx context.Context, snap agentlab.Snapshot, q agentlab.SnapshotQuota, evs ...agentlab.Event) (agentlab.Snapshot, error)
	UpdateSnapshot(ctx context.Context, uid string, q agentlab.SnapshotQuota, fn func(*agentlab.Snapshot) ([]agentlab.Event, error)) (agentlab.Snapshot, error)
	RemoveSnapshot(ctx context.Context, uid string, evs ...agentlab.Event) error
	Snapshot(ctx context.Context, uid string) (agentlab.Snapshot, error)
	Snapshots(ctx context.Context, f agentlab.SnapshotFilter) ([]agentlab.Snapshot, error)
	SandboxesFrom(ctx context.Context, snapshotUID string) ([]agentlab.Sandbox, error)
	AllocateFork(ctx context.Context, snap agentlab.Snapshot, list []agentlab.Sandbox, a agentlab.Allocation,
		created func(agentlab.Sandbox) agentlab.Event) ([]agentlab.Sandbox, error)
	AddFork(ctx context.Context, snap agentlab.Snapshot, jobID string, fn func(*agentlab.Job) ([]agentlab.Event, error)) error
	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	SandboxByUID(ctx context.Context, uid string) (agentlab.Sandbox, error)
	// Subscribe calls fn after each commit.
	Subscribe(fn func(agentlab.Commit))
}

// Profiles returns a profile, or an error with the reason why it cannot be used.
type Profiles interface {
	Use(name string) (agentlab.Profile, error)
}

// Bootstrap stores which guests have received secrets; *bootstrap.Service implements it.
type Bootstrap interface {
	ReceivedSecrets(sb agentlab.Sandbox) (bool, error)
	// Inherit makes the secrets that one guest has received those of another. It
	// reports whether there are any.
	Inherit(ctx context.Context, from, to agentlab.Sandbox) (bool, error)
}

// Pool is the warm pool, which gives way to forks; *warmpool.Pool implements it.
type Pool interface {
	Quiet(ctx context.Context)
	WithNumbers(ctx context.Context, on string, fn func(agentlab.Allocation) error) error
}

// Config is the configuration of a Service. All but Quota and SetupBytes are required.
type Config struct {
	Core      *sandbox.Core
	Store     Store
	Profiles  Profiles
	Bootstrap Bootstrap
	Pool      Pool

	Quota      agentlab.SnapshotQuota // of the snapshots that users save; default none
	SetupBytes int64                  // maximum size of the snapshots after setup; 0 means that there are none
}

// Service manages snapshots. Its methods may be called from any goroutine.
type Service struct {
	cfg   Config
	core  *sandbox.Core
	store Store
	fleet *fleet.Fleet
	log   *slog.Logger
	wake  chan struct{} // has a value if a sweep is due

	mu            sync.Mutex
	settled       map[int]bool            // by VMID: its snapshots need nothing from its step
	states        map[int]*state          // by VMID; few have one
	lostSnapshots map[string]lostSnapshot // by UID: snapshots without a row at the last audits; replaced, never changed
}

// state is the state in memory for a sandbox. It may be lost.
type state struct {
	waits     string // UID of a snapshot that waits, and why, as the last event has it
	syncedFor string // UID of the snapshot before which its guest last had to write its disks
	unsynced  string // why it has not; "" if it has
	restored  string // UID of the snapshot to which this process has restored it
}

// New returns a Service. Call Run to start it.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, core: cfg.Core, store: cfg.Store, fleet: cfg.Core.Fleet(), log: cfg.Core.Log(), wake: make(chan struct{}, 1), settled: map[int]bool{}, states: map[int]*state{}}
	cfg.Store.Subscribe(s.committed)
	return s
}

// committed forgets sandboxes that are DESTROYED, and begins a sweep when snapshots may no
// longer be needed.
func (s *Service) committed(c agentlab.Commit) {
	for _, sb := range c.Sandboxes {
		if sb.State == agentlab.SandboxDestroyed {
			s.mu.Lock()
			delete(s.settled, sb.VMID)
			delete(s.states, sb.VMID)
			s.mu.Unlock()
		}
		if sb.State == agentlab.SandboxDestroyed || sb.From.Snapshot != "" {
			s.wakeUp()
		}
	}
}

func (s *Service) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run sweeps, and compares the snapshots on the backends with the rows, until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, b := range s.fleet.All() {
		if b.Snapshots != nil {
			wg.Go(func() { s.auditLoop(ctx, b) })
		}
	}
	for ctx.Err() == nil {
		s.sweep(ctx)
		select {
		case <-time.After(s.core.Limits().AuditEvery):
		case <-s.wake:
		case <-ctx.Done():
		}
	}
	return nil
}

func (s *Service) auditLoop(ctx context.Context, b *fleet.Backend) {
	for ctx.Err() == nil {
		if err := s.audit(ctx, b); err != nil && ctx.Err() == nil {
			s.log.Warn("the snapshots on a backend could not be compared with the database", "backend", b.Name(), "err", err)
		}
		select {
		case <-time.After(auditEvery):
		case <-ctx.Done():
		}
	}
}

// withState calls fn with the state of a sandbox. It holds the lock during the call.
func (s *Service) withState(vmid int, fn func(*state)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.states[vmid] == nil {
		s.states[vmid] = &state{}
	}
	fn(s.states[vmid])
}

// HasMemory implements sandbox.Snapshots.
func (s *Service) HasMemory(ctx context.Context, uid string) bool {
	snap, err := s.store.Snapshot(ctx, uid)
	return err == nil && snap.Memory
}
