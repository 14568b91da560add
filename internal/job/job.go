// Package job manages jobs, from the request to the final status.
//
// A job is QUEUED until its sandbox's runner has fetched its bootstrap, then
// RUNNING until it reports its end or its end is found otherwise: its
// deadline, a request to cancel, silence of the runner, or the end of its
// sandbox. The first of these that is stored counts; a final job does not
// change. Then its sandbox is released: destroyed, or kept on request.
//
// One wakeable loop drives every job that is not final from its row, so a new
// process continues where the last one ended. What guests say arrives in Report
// and Directive, and is validated.
package job

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// Store is the part of the database that the service uses. Its semantics are
// those of package store.
type Store interface {
	CreateJob(ctx context.Context, j agentlab.Job, attempts []agentlab.Job, evs ...agentlab.Event) error
	UpdateJob(ctx context.Context, id string, fn func(*agentlab.Job) ([]agentlab.Event, error)) (agentlab.Job, error)
	Job(ctx context.Context, id string) (agentlab.Job, error)
	Jobs(ctx context.Context, f agentlab.JobFilter) ([]agentlab.Job, error)
	JobsByPrefix(ctx context.Context, prefix string, limit int) ([]agentlab.Job, error)
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	SandboxByName(ctx context.Context, name string) (agentlab.Sandbox, error)
	Snapshot(ctx context.Context, uid string) (agentlab.Snapshot, error)
	PutProfile(ctx context.Context, name, yaml string) (sum string, err error)
	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
	// Subscribe calls fn after each commit.
	Subscribe(fn func(agentlab.Commit))
}

// Sandboxes manages sandboxes; *sandbox.Service implements it.
type Sandboxes interface {
	Plan(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, agentlab.Profile, error)
	CheckWorkspace(ctx context.Context, r agentlab.SandboxRequest) error
	Create(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, error)
	List(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	MarkRunning(ctx context.Context, vmid int) error
	NarrowNetwork(ctx context.Context, vmid int, layer agentlab.Network) error
	Release(ctx context.Context, vmid int, o sandbox.Outcome) (agentlab.Sandbox, error)
	Destroy(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Unheard(vmid int) bool // whether the guest of a sandbox cannot report now
	// SalvageEnded is called after the end of a job that extracted the work of another.
	SalvageEnded()
	Wake(vmid int)
}

// Snapshots manages the snapshots from which sandboxes of jobs are created;
// *snapshot.Service implements it.
type Snapshots interface {
	CanFork(backend string) error
	CanKeepSetups(backend string) error
	FindSetup(ctx context.Context, backend, image string, keys ...string) (agentlab.Snapshot, bool, error)
	SaveForAttempts(ctx context.Context, vmid int, jobID string, entry agentlab.SetupEntry, fn func(j *agentlab.Job, uid string) ([]agentlab.Event, error)) error
	SaveForSalvage(ctx context.Context, vmid int, jobID string, fn func(j *agentlab.Job, uid string) ([]agentlab.Event, error)) error
	DropFork(ctx context.Context, uid string) error
}

// Profiles are the profiles of the daemon.
type Profiles interface {
	// Use returns a profile, or an error with the reason why it cannot be used.
	Use(name string) (agentlab.Profile, error)
	// Usable returns the profiles that can be used, by name.
	Usable() []agentlab.Profile
}

// Secrets opens secrets bundles; *secret.Vault implements it.
type Secrets interface {
	Outline(ctx context.Context, name string) (plain secret.Bundle, references []string, err error)
}

// Bootstrap delivers jobs and secrets to guests; *bootstrap.Service implements
// it.
type Bootstrap interface {
	Trouble(uid string) string // why the secrets could not be delivered, "" if they could
}

// Artifacts stores the files of jobs; *artifact.Service implements it.
type Artifacts interface {
	ClaimBundle(ctx context.Context, bundleID, jobID string) error
	DropBundle(jobID string) error
	DropCheckpoint(ctx context.Context, jobID string) error
	List(ctx context.Context, jobID string) ([]agentlab.Artifact, error)
	Share(ctx context.Context, a agentlab.Artifact, jobID, path string) error
	ShareLog(ctx context.Context, fromID, jobID, path string) error
}

// Egress is the egress audit log; *audit.Service implements it.
type Egress interface {
	List(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error)
}

// Limits are the limits on jobs. Zero means the default.
type Limits struct {
	DefaultTTL time.Duration // if neither request nor profile has one; default 3 h

	// UploadWindow is how long after its deadline a job may still upload
	// and report; default UploadWindow. The sandbox's lease is longer by
	// this time.
	UploadWindow time.Duration
	// CancelWindow is the same time after a request to cancel; default 2
	// min.
	CancelWindow time.Duration
	// StartTimeout is how long the runner of a READY sandbox may take to
	// fetch its bootstrap; default 10 min.
	StartTimeout time.Duration
	// Silence is the maximum time between reports of a runner; default 90
	// s.
	Silence time.Duration
}

// UploadWindow is the default of Limits.UploadWindow.
const UploadWindow = 5 * time.Minute

func (l Limits) withDefaults() Limits {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&l.DefaultTTL, 3*time.Hour)
	def(&l.UploadWindow, UploadWindow)
	def(&l.CancelWindow, 2*time.Minute)
	def(&l.StartTimeout, 10*time.Minute)
	def(&l.Silence, 90*time.Second)
	return l
}

// Config is the configuration of a Service.
type Config struct {
	Store     Store
	Sandboxes Sandboxes
	Snapshots Snapshots
	Profiles  Profiles
	Secrets   Secrets
	Bootstrap Bootstrap
	Artifacts Artifacts
	Egress    Egress // nil: nothing is recorded

	DefaultProfile string // of jobs without one in the request
	DefaultAgent   string // of jobs without one in the request
	ShellImage     string // of jobs of the agent shell, if neither job nor profile names an image
	AgentsImage    string // of jobs of any other agent
	Limits         Limits

	Clock  func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Service manages jobs. Its methods may be called from any goroutine.
type Service struct {
	cfg   Config
	lim   Limits
	log   *slog.Logger
	clock func() time.Time
	loop  *reconcile.Loop[string]

	salvaging sync.Mutex // held by Salvage

	mu         sync.Mutex
	runtimes   map[string]*jobRuntime
	creating   map[string]bool // jobs whose row is not written yet
	waiting    []string        // jobs that wait for a sandbox because a limit is reached, the oldest first
	lastActive time.Time       // when this process was last known to run; zero before Run
}

// jobRuntime is the service's state in memory for a job that is not final. It
// may be lost: a new process starts with an empty one.
type jobRuntime struct {
	lastHeard  time.Time     // when its runner last reported, or the wait for it began
	stopped    time.Time     // when this process first read the request to stop it
	changed    chan struct{} // closed when there is a new directive for its runner
	progress   progress      // of its clone
	killsAt    time.Time     // of the last event of noteKills
	tried      time.Time     // when a sandbox was first requested and not available
	denials    modelDenials  // of its model
	stopReason string        // why its sandbox, which is started again, was stopped after the job began
}

// New returns a Service. Call Run to start it.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, lim: cfg.Limits.withDefaults(), log: cfg.Logger, clock: cfg.Clock, runtimes: map[string]*jobRuntime{}, creating: map[string]bool{}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	s.loop = reconcile.New(reconcile.Config[string]{Step: s.step, Failed: reconcile.LogFailed[string](s.log, "job", "job")})
	cfg.Store.Subscribe(s.Committed)
	return s
}

// Run runs the steps of jobs until ctx ends. It may be called once.
func (s *Service) Run(ctx context.Context) error {
	if err := s.recover(ctx); err != nil && ctx.Err() == nil {
		return err
	}
	var wg sync.WaitGroup
	wg.Go(func() { s.trackActivity(ctx) })
	s.loop.Run(ctx)
	wg.Wait()
	return nil
}

// trackActivity calls noteActive periodically.
func (s *Service) trackActivity(ctx context.Context) {
	s.mu.Lock()
	s.lastActive = s.clock()
	s.mu.Unlock()
	t := time.NewTicker(s.lim.Silence / 9)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			s.noteActive()
		case <-ctx.Done():
			return
		}
	}
}

// noteActive records that this process is running. After a long pause of the
// process it restarts the measured silence of all runners, because their reports
// during the pause were not received.
func (s *Service) noteActive() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock()
	if s.lastActive.IsZero() {
		return
	}
	if now.Sub(s.lastActive) > s.lim.Silence/3 {
		for _, l := range s.runtimes {
			l.lastHeard = now
		}
	}
	s.lastActive = now
}

// recover wakes every job that has work left.
func (s *Service) recover(ctx context.Context) error {
	open, err := s.cfg.Store.Jobs(ctx, agentlab.JobFilter{Statuses: []agentlab.JobStatus{agentlab.JobQueued, agentlab.JobRunning}})
	if err != nil {
		return err
	}
	for i := len(open) - 1; i >= 0; i-- { // the oldest first
		s.loop.Wake(open[i].ID)
	}
	left, err := s.cfg.Sandboxes.List(ctx, agentlab.SandboxFilter{})
	if err != nil {
		return err
	}
	for _, sb := range left {
		if sb.JobID == "" {
			continue
		}
		known, err := s.Known(ctx, sb.JobID)
		switch {
		case err != nil:
			return err
		case known:
			s.loop.Wake(sb.JobID) // it may be final and its sandbox not released
		case !neverBooted(sb): // it may hold a user's work
			s.log.Warn("the job of a sandbox is not in the database; the sandbox is not changed", "vmid", sb.VMID, "job", sb.JobID, "state", sb.State)
		default: // the process died between the two rows
			s.log.Warn("destroying a sandbox whose job is not in the database", "vmid", sb.VMID, "job", sb.JobID)
			if _, err := s.cfg.Sandboxes.Destroy(ctx, sb.VMID); agentlab.CodeOf(err) == agentlab.CodeConflict {
				s.log.Warn("the sandbox is not destroyed now", "vmid", sb.VMID, "err", err)
			} else if err != nil {
				return err
			}
		}
	}
	return nil
}

// neverBooted reports whether the guest of a sandbox has never answered, so that
// its disk holds no work. Its job may then never have been written.
func neverBooted(sb agentlab.Sandbox) bool {
	switch sb.State {
	case agentlab.SandboxRequested, agentlab.SandboxProvisioning, agentlab.SandboxBooting:
		return sb.BootedAt.IsZero()
	}
	return false
}

// Queue returns what the loop of the jobs has to do now.
func (s *Service) Queue() reconcile.Stats { return s.loop.Stats() }

// Committed runs the steps of the jobs that a commit is about. The store calls it.
func (s *Service) Committed(c agentlab.Commit) {
	for _, e := range c.Events {
		switch e.Kind {
		case agentlab.EventJobStatus:
			s.statusChanged(e)
		case agentlab.EventSandboxSnapshot:
			s.wake(e.JobID)
		}
	}
	for _, sb := range c.Sandboxes {
		s.sandboxChanged(sb)
	}
	for _, id := range c.Records {
		s.wake(id)
	}
}

// wake runs the step of a job, and wakes a pending Directive call.
func (s *Service) wake(id string) {
	s.mu.Lock()
	if l := s.runtimes[id]; l != nil {
		close(l.changed)
		l.changed = make(chan struct{})
	}
	s.mu.Unlock()
	s.loop.Wake(id)
}

// statusChanged handles an event of a job's status.
func (s *Service) statusChanged(e agentlab.Event) {
	var data struct{ Status, Stop string }
	if json.Unmarshal([]byte(e.Data), &data) == nil && data.Status == string(agentlab.JobRunning) && data.Stop == "" {
		s.mu.Lock()
		if l := s.runtimes[e.JobID]; l != nil { // it begins: an earlier stop is not its end
			l.stopReason = ""
		}
		s.mu.Unlock()
	}
	s.wake(e.JobID)
}

// sandboxChanged handles a change of a sandbox.
func (s *Service) sandboxChanged(sb agentlab.Sandbox) {
	if sb.JobID != "" {
		s.loop.Wake(sb.JobID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb.JobID != "" && sb.State == agentlab.SandboxStopped && sb.Desired == agentlab.DesiredRunning {
		s.track(sb.JobID).stopReason = sb.Reason
	}
	if sb.State != agentlab.SandboxDestroyed {
		return
	}
	if len(s.waiting) > 0 {
		s.loop.Wake(s.waiting[0]) // the limits allow one more
	}
}

// track returns the state of a job. The caller holds s.mu.
func (s *Service) track(id string) *jobRuntime {
	l := s.runtimes[id]
	if l == nil {
		l = &jobRuntime{lastHeard: s.clock(), changed: make(chan struct{})}
		s.runtimes[id] = l
	}
	return l
}

// forget deletes the in-memory state of a job that has ended.
func (s *Service) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopWaiting(id)
	if l := s.runtimes[id]; l != nil {
		close(l.changed)
		delete(s.runtimes, id)
	}
}
