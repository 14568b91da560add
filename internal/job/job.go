// Package job is the service of jobs: it takes a request to its end.
//
// A job is QUEUED until its sandbox's runner has fetched its bootstrap, then
// RUNNING until it reports its end or its end is found otherwise: its
// deadline, a request to cancel, silence of the runner, or the end of its
// sandbox. The first of these that is written counts; a final job does not
// change. Then its sandbox is released: destroyed, or kept when asked.
//
// One wakeable loop drives every job that is not final from its row, so a new
// process continues where the last one ended. What guests say arrives in Report
// and Directive, and is validated.
package job

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// Store is what the service needs of the database. The semantics are those
// of package store.
type Store interface {
	CreateJob(ctx context.Context, j agentlab.Job, evs ...agentlab.Event) error
	UpdateJob(ctx context.Context, id string, fn func(*agentlab.Job) ([]agentlab.Event, error)) (agentlab.Job, error)
	Job(ctx context.Context, id string) (agentlab.Job, error)
	Jobs(ctx context.Context, f agentlab.JobFilter) ([]agentlab.Job, error)
	JobsByPrefix(ctx context.Context, prefix string, limit int) ([]agentlab.Job, error)
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	SandboxByName(ctx context.Context, name string) (agentlab.Sandbox, error)
	PutProfile(ctx context.Context, name, yaml string) (sum string, err error)
	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
}

// Sandboxes is the service of sandboxes; *sandbox.Service implements it.
type Sandboxes interface {
	Plan(r agentlab.SandboxRequest) (agentlab.Sandbox, agentlab.Profile, error)
	Create(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, error)
	List(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	MarkRunning(ctx context.Context, vmid int) error
	NarrowNetwork(ctx context.Context, vmid int, layer agentlab.Network) error
	Release(ctx context.Context, vmid int, o sandbox.Outcome) (agentlab.Sandbox, error)
	Destroy(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Paused() map[int]string // whose guests the host has paused, and why
	Wake(vmid int)
}

// Profiles returns a profile, or an error that says why it cannot be used.
type Profiles interface {
	Use(name string) (agentlab.Profile, error)
}

// Secrets opens secrets bundles; *secret.Vault implements it.
type Secrets interface {
	Outline(ctx context.Context, name string) (plain secret.Bundle, references []string, err error)
}

// Bootstrap delivers jobs and secrets to guests; *bootstrap.Service implements
// it.
type Bootstrap interface {
	Trouble(uid string) string // why the secrets could not be delivered, "" when they could
}

// Bundles keeps git bundles of local repositories; *artifact.Service
// implements it.
type Bundles interface {
	ClaimBundle(ctx context.Context, bundleID, jobID string) error
	DropBundle(jobID string) error
}

// Egress is the record of what sandboxes wanted from the network;
// *audit.Service implements it.
type Egress interface {
	List(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error)
}

// Limits bound jobs. Zero fields take the default.
type Limits struct {
	DefaultTTL time.Duration // when neither request nor profile says; default 3 h

	// UploadWindow is how long after its deadline a job may still upload
	// and report; default UploadWindow. The sandbox's lease is so much longer.
	UploadWindow time.Duration
	// CancelWindow is the same after a request to cancel; default 2 min.
	CancelWindow time.Duration
	// StartTimeout is how long the runner of a READY sandbox may take to
	// fetch its bootstrap; default 10 min.
	StartTimeout time.Duration
	// Silence is how long nothing may be heard of a runner; default 90 s.
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

// Config is what a Service needs.
type Config struct {
	Store     Store
	Sandboxes Sandboxes
	Profiles  Profiles
	Secrets   Secrets
	Bootstrap Bootstrap
	Bundles   Bundles
	Egress    Egress // nil: nothing is recorded

	DefaultProfile string // of jobs that name none
	DefaultAgent   string // of jobs that name none
	ShellImage     string // of jobs of the agent shell, when neither job nor profile names one
	AgentsImage    string // of jobs of any other agent
	Limits         Limits

	Clock  func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Service is the service of jobs. Its methods may be called from any
// goroutine. SandboxChanged must be wired to sandbox.Config.Changed.
type Service struct {
	cfg   Config
	lim   Limits
	log   *slog.Logger
	clock func() time.Time
	loop  *reconcile.Loop[string]

	mu         sync.Mutex
	runtimes   map[string]*jobRuntime
	creating   map[string]bool // jobs whose row is about to be written
	waiting    []string        // jobs that found no room for a sandbox, the oldest first
	lastActive time.Time       // when this process was last known to be at work; zero before Run
}

// jobRuntime is what is remembered of a job that is not final. Nothing in it
// matters: a new process begins with an empty one.
type jobRuntime struct {
	lastHeard    time.Time     // when its runner was last heard, or first waited for
	stopped      time.Time     // when this process first saw that it is to stop
	changed      chan struct{} // closed when there is something new for its runner
	progress     progress      // of its clone
	tried        time.Time     // when a sandbox was first asked for and could not be had
	denials      modelDenials  // of its model
	stopReason   string        // why its sandbox was stopped, which is started again
	stopReasonAt time.Time
}

// New returns a Service; Run makes it work.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, lim: cfg.Limits.withDefaults(), log: cfg.Logger, clock: cfg.Clock, runtimes: map[string]*jobRuntime{}, creating: map[string]bool{}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	s.loop = reconcile.New(reconcile.Config[string]{Step: s.step, Failed: s.stepFailed})
	return s
}

// Run drives jobs until ctx ends. It may be called once.
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

// trackActivity notes all the time that the process is at work.
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

// noteActive notes that the process is at work. When it was held up for long, what
// runners said meanwhile was not heard, so their silence begins anew.
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

// recover wakes every job with something left to do.
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
		default: // the process died between the two rows
			s.log.Warn("destroying a sandbox whose job is not in the database", "vmid", sb.VMID, "job", sb.JobID)
			if _, err := s.cfg.Sandboxes.Destroy(ctx, sb.VMID); err != nil {
				return err
			}
		}
	}
	return nil
}

// Wake makes the service look at a job whose status or records changed, and
// answers its runner if that waits for a directive. The daemon calls it after
// the commit.
func (s *Service) Wake(id string) {
	s.mu.Lock()
	if l := s.runtimes[id]; l != nil {
		close(l.changed)
		l.changed = make(chan struct{})
	}
	s.mu.Unlock()
	s.loop.Wake(id)
}

// SandboxChanged handles a change of a sandbox. The daemon calls it after the
// commit.
func (s *Service) SandboxChanged(sb agentlab.Sandbox) {
	if sb.JobID != "" {
		s.loop.Wake(sb.JobID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb.JobID != "" && sb.State == agentlab.SandboxStopped && sb.Desired == agentlab.DesiredRunning {
		l := s.track(sb.JobID)
		l.stopReason, l.stopReasonAt = sb.Reason, sb.UpdatedAt
	}
	if sb.State != agentlab.SandboxDestroyed {
		return
	}
	if len(s.waiting) > 0 {
		s.loop.Wake(s.waiting[0]) // there is room for one more
	}
}

// track returns what is remembered of a job; s.mu is held.
func (s *Service) track(id string) *jobRuntime {
	l := s.runtimes[id]
	if l == nil {
		l = &jobRuntime{lastHeard: s.clock(), changed: make(chan struct{})}
		s.runtimes[id] = l
	}
	return l
}

// forget drops what is remembered of a job that has ended.
func (s *Service) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopWaiting(id)
	if l := s.runtimes[id]; l != nil {
		close(l.changed)
		delete(s.runtimes, id)
	}
}

func (s *Service) stepFailed(id string, attempt int, err error) {
	if errors.Is(err, context.Canceled) {
		return // the service ends
	}
	level := slog.LevelDebug
	if attempt == 1 || attempt%10 == 0 {
		level = slog.LevelWarn
	}
	s.log.Log(context.Background(), level, "job step failed, will try again", "job", id, "attempt", attempt, "err", err)
}
