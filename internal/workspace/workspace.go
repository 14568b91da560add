// Package workspace is the service for workspaces: disks that outlive the sandboxes
// that use them.
//
// A request writes what is wanted to the row. A step per workspace then calls the
// driver and writes the result; every step may run again. A volume that no row
// describes is never changed, and one that is missing makes its workspace FAILED.
package workspace

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// Store is what the service needs of the database. The semantics are those of
// package store.
type Store interface {
	AddWorkspace(ctx context.Context, v agentlab.Workspace, q agentlab.WorkspaceQuota, evs ...agentlab.Event) (agentlab.Workspace, error)
	UpdateWorkspace(ctx context.Context, id string, q agentlab.WorkspaceQuota, fn func(*agentlab.Workspace) ([]agentlab.Event, error)) (agentlab.Workspace, error)
	ReplaceWorkspace(ctx context.Context, id, by, holder string, trash, moved func(*agentlab.Workspace) []agentlab.Event) (agentlab.Workspace, error)
	RemoveWorkspace(ctx context.Context, id string, evs ...agentlab.Event) error
	Workspace(ctx context.Context, id string) (agentlab.Workspace, error)
	Workspaces(ctx context.Context) ([]agentlab.Workspace, error)

	AddWorkspaceSnapshot(ctx context.Context, n agentlab.WorkspaceSnapshot, evs ...agentlab.Event) (agentlab.WorkspaceSnapshot, error)
	UpdateWorkspaceSnapshot(ctx context.Context, uid string, fn func(*agentlab.WorkspaceSnapshot) ([]agentlab.Event, error)) (agentlab.WorkspaceSnapshot, error)
	RemoveWorkspaceSnapshot(ctx context.Context, uid string, evs ...agentlab.Event) error
	WorkspaceSnapshots(ctx context.Context, workspaceID string) ([]agentlab.WorkspaceSnapshot, error)

	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
	// Subscribe calls fn after each commit.
	Subscribe(fn func(agentlab.Commit))
}

// Leases are the leases of workspaces, and the sandboxes that have them.
type Leases interface {
	WorkspaceLease(ctx context.Context, uid string) (l agentlab.WorkspaceLease, ok bool, err error)
	WorkspaceLeases(ctx context.Context, workspaceID string) ([]agentlab.WorkspaceLease, error)
	UpdateWorkspaceLease(ctx context.Context, nonce string, fn func(*agentlab.WorkspaceLease) []agentlab.Event) (agentlab.WorkspaceLease, error)
	AttachWorkspace(ctx context.Context, vmid int, use agentlab.WorkspaceUse, session string, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error)
	ReleaseWorkspace(ctx context.Context, nonce string) error
	WorkspaceBusy(ctx context.Context, v agentlab.Workspace) (why string, err error)
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Job(ctx context.Context, id string) (agentlab.Job, error)
}

// Limits bound workspaces. Zero means no maximum, or the default.
type Limits struct {
	Quota  agentlab.WorkspaceQuota
	SizeGB int // of one workspace, in GiB

	AuditEvery time.Duration // between two comparisons with the backend; default 5 minutes
}

// Metrics observes the calls of the service; *metrics.Set implements it.
type Metrics interface {
	// Checked observes one call of Check: how long it took, and its error.
	Checked(took time.Duration, err error)
}

// Config is the configuration of a Service. Store, Leases and Fleet are required.
type Config struct {
	Core   *sandbox.Core // nil means that there are no guests
	Store  Store
	Leases Leases
	Fleet  *fleet.Fleet
	Limits Limits

	Metrics Metrics // nil means none

	Clock  func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Service manages workspaces. Its methods are safe for concurrent use.
type Service struct {
	cfg   Config
	log   *slog.Logger
	clock func() time.Time
	loop  *reconcile.Loop[string] // by ID

	core *sandbox.Core

	mu       sync.Mutex
	attached map[int]*attachState     // by VMID
	waiting  map[string]agentlab.Code // why a step is tried again, as the row has it
	begun    map[string]time.Time     // since when the current step is tried
	audited  map[string]audited       // the results of the last audits, by the name of the backend
}

// workers is the number of steps at the same time on one backend: some copy whole disks.
const workers = 4

// New returns a Service. Call Run to start it.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, core: cfg.Core, attached: map[int]*attachState{}, log: cfg.Logger, clock: cfg.Clock, waiting: map[string]agentlab.Code{}, begun: map[string]time.Time{}, audited: map[string]audited{}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	if s.cfg.Limits.AuditEvery <= 0 {
		s.cfg.Limits.AuditEvery = 5 * time.Minute
	}
	s.loop = reconcile.New(reconcile.Config[string]{Step: s.step, Failed: reconcile.LogFailed[string](s.log, "workspace", "workspace"), Workers: workers})
	cfg.Store.Subscribe(s.committed)
	return s
}

// Run runs the steps of workspaces until ctx ends, and returns when all steps have
// ended. It may be called once.
func (s *Service) Run(ctx context.Context) error {
	rows, err := s.cfg.Store.Workspaces(ctx)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	for _, v := range rows {
		if s.reachable(v) != nil {
			s.log.Warn("a workspace of another backend is not managed", "workspace", v.ID, "backend", v.Backend)
		}
		s.loop.Wake(v.ID)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, b := range s.having() {
		wg.Go(func() { s.auditLoop(ctx, b) })
	}
	s.loop.Run(ctx)
	return nil
}

// Queue returns what the loop of the workspaces has to do now.
func (s *Service) Queue() reconcile.Stats { return s.loop.Stats() }

// volumes returns the volumes of the backend of a workspace, or an error with code
// unsupported, or conflict if the daemon does not have the backend.
func (s *Service) volumes(v agentlab.Workspace) (backend.Volumes, error) {
	return s.cfg.Fleet.Of(v.Backend).NeedVolumes()
}

// having returns the backends that have volumes.
func (s *Service) having() []*fleet.Backend {
	return slices.DeleteFunc(s.cfg.Fleet.All(), func(b *fleet.Backend) bool { return b.Volumes == nil })
}

// reachable returns an error with code conflict if the daemon does not have the backend of a
// workspace.
func (s *Service) reachable(v agentlab.Workspace) error {
	if err := s.cfg.Fleet.Of(v.Backend).Missing(); err != nil {
		return agentlab.Errorf(agentlab.CodeConflict, "workspace %s cannot be used: %w", v.Name, err)
	}
	return nil
}

// getReachable is Get for a workspace of a backend that the daemon has. Codes: not_found,
// conflict, unsupported.
func (s *Service) getReachable(ctx context.Context, idOrName string) (agentlab.Workspace, error) {
	v, err := s.Get(ctx, idOrName)
	if err == nil {
		err = s.reachable(v)
	}
	if err == nil {
		_, err = s.volumes(v)
	}
	return v, err
}

func snapshotRef(v agentlab.Workspace, uid string) backend.VolumeSnapshotRef {
	return backend.VolumeSnapshotRef{UID: uid, Of: backend.VolumeRefOf(v)}
}
