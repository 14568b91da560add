// Package sandbox is the service of sandboxes: it writes down what is asked
// of them and drives them there.
//
// A call that changes something writes its intent (row and event, in one
// transaction) and returns. One wakeable loop runs a step for each sandbox
// that needs one, never two at once for the same sandbox; steps are
// idempotent, so after a crash the loop of the next process continues
// from the rows. No work hangs on a request's context.
//
// # What happens to a sandbox
//
// REQUESTED → PROVISIONING (image, disk, VM) → BOOTING (started, waiting for
// the guest) → READY (the guest has its identity). Faults that may pass
// (busy, unavailable, unknown_outcome) are tried again with growing pauses
// up to Limits.ProvisionTimeout; any other, a guest that does not answer in
// Limits.BootTimeout, and a VM that stops unasked, make it FAILED. A failed
// sandbox of a job is destroyed, unless it was to be kept; one made by hand
// stays FAILED, its VM off, until it is destroyed or its lease ends.
//
// A lease always ends. Then a sandbox becomes TIMEOUT, is stopped (its guest
// is asked first) and destroyed. One with keepalive is stopped and kept for
// Limits.KeepaliveGrace, in which its lease can be renewed, and destroyed
// after that. The lease of a sandbox counts from when its image was there.
package sandbox

import (
	"context"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Store is what the service needs of the database. The semantics are those
// of package store.
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
}

// Images makes sure that what a sandbox boots is there.
type Images interface {
	// Check reports whether an image of that name exists or can be built:
	// not_found otherwise.
	Check(name string) error
	// Ensure builds the image when it is missing and returns its reference
	// name@digest. progress gets one line at a time.
	Ensure(ctx context.Context, name string, progress func(string)) (ref string, err error)
}

// Profiles returns a profile, or an error that says why it cannot be used.
type Profiles interface {
	Use(name string) (agentlab.Profile, error)
}

// Bootstrap delivers jobs and secrets to guests, and knows which secrets they
// have; *bootstrap.Service implements it.
type Bootstrap interface {
	Document(ctx context.Context, sb agentlab.Sandbox) (*guestapi.Bootstrap, error)
	Sent(uid string)
	Reissue(ctx context.Context, sb agentlab.Sandbox, health func(context.Context) (guestapi.Health, error)) (*guestapi.Bootstrap, time.Duration, error)
	RedactFunc(ctx context.Context, id string) func(text string) string
	Redactor(ctx context.Context, jobID string) (*redact.Redactor, error)
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

// Host is the machine that sandboxes run on.
type Host interface {
	Room() error   // code no_space while its disk is too full to start anything
	Usable() error // code unavailable while the backend cannot start any sandbox
}

// Guests answers guests; *guestserver.Server implements it.
type Guests interface {
	// Serve answers the guest of one sandbox on l until ctx ends or l fails,
	// and closes l.
	Serve(ctx context.Context, vmid int, l net.Listener) error
}

// Limits bound sandboxes and the work on them. Zero fields take the default.
type Limits struct {
	VMIDFirst, VMIDLast int           // range of numbers; default 1000 to 999999
	MaxSandboxes        int           // that may exist at once; 0 means no maximum
	MaxTTL              time.Duration // maxIdle lease; default agentlab.MaxTTL
	DefaultTTL          time.Duration // when neither request nor profile says; default 3 h, at most MaxTTL

	ImageTimeout     time.Duration // for building a missing image; default 1 h
	ProvisionTimeout time.Duration // for Create and Start with all attempts; default 5 min
	BootTimeout      time.Duration // from Start until the guest answers; default 180 s
	StopGrace        time.Duration // for the guest to power off, when the request does not say; default 30 s
	KeepaliveGrace   time.Duration // from the end of a keepalive lease to destruction; default 24 h

	NetworkTimeout time.Duration // for a changed network policy to come into force, else the sandbox fails; default 1 min

	ParallelBoots int           // VMs that boot at the same time; default 4
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

// Config is what a Service needs.
type Config struct {
	Store    Store
	Driver   backend.Driver
	Images   Images
	Profiles Profiles

	Bootstrap Bootstrap
	Artifacts Artifacts // where console logs are saved; nil: nowhere
	Audit     Audit     // nil: no network use is recorded
	Host      Host      // nil: there is always room

	DefaultProfile string // of sandboxes that name none
	DefaultImage   string // when neither request nor profile names one
	Limits         Limits

	// Notes keeps requests to destroy a sandbox that the database had no room
	// for; nil: they are lost when the process ends before it has met them.
	Notes Notes

	Clock  func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Service is the service of sandboxes. Its methods may be called from any
// goroutine, also while Run does not run; then what they ask for waits.
type Service struct {
	cfg     Config
	lim     Limits
	log     *slog.Logger
	clock   func() time.Time
	loop    *reconcile.Loop[int]
	boots   slots
	orphans lock.Keyed[string] // by UID; held while one is destroyed
	images  imageBuilds
	guests  Guests // nil: there is no guest plane

	mu           sync.Mutex
	states       map[int]*runtimeState
	knownOrphans map[string]backend.Instance // by UID: orphans that an event reported
	run          context.Context             // of Run; nil before
	wg           sync.WaitGroup              // what Run waits for besides the loop
}

// runtimeState is what the service remembers of a sandbox that is not destroyed.
// Nothing in it matters: a new process begins with an empty one.
type runtimeState struct {
	uid   string
	state agentlab.SandboxState // as last seen

	lease          time.Time      // its end, as the backend was told (backend.DeadlineSetter)
	inspected      bool           // this process has seen its VM in the state it should be in
	needsInspect   bool           // the audit found something: look again
	tried          time.Time      // first attempt to power it on in its present state
	running        time.Time      // since when this process knows that the VM of a BOOTING one runs
	looked         time.Time      // when the VM of a BOOTING one was last looked at
	grace          *time.Duration // asked for by Stop; nil means the default
	image          *imageResult   // came of an image build that it waited for
	listener       *guestListener
	save           bool // its console log is to be saved
	retry          retryState
	destroyPending bool   // it is to be destroyed, and the row does not say so: the disk was full
	paused         string // why its guest's CPUs are paused; "" when they are not

	netSince   time.Time     // since when a network policy cannot be put in force; zero when there is none
	netTrouble string        // why not
	changed    chan struct{} // closed at the next change of its row or of netTrouble; nil when no call waits
}

// New returns a Service; Run makes it work.
func New(cfg Config) *Service {
	s := &Service{
		cfg: cfg, lim: cfg.Limits.withDefaults(), log: cfg.Logger, clock: cfg.Clock,
		states: map[int]*runtimeState{}, knownOrphans: map[string]backend.Instance{},
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	s.boots.free = s.lim.ParallelBoots
	s.loop = reconcile.New(reconcile.Config[int]{Step: s.step, Failed: s.stepFailed, Workers: s.lim.Workers})
	return s
}

// ServeGuests sets who answers the guests, before Run. It is not in Config
// because the guest plane calls the job service, which calls this one.
func (s *Service) ServeGuests(g Guests) { s.guests = g }

// Run drives sandboxes until ctx ends, and returns when all steps have ended.
// VMs go on. It may be called once.
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
	s.readNotes(rows)
	s.wg.Go(func() { s.auditLoop(ctx) })
	s.loop.Run(ctx)
	cancel()
	s.mu.Lock()
	s.run = ended // nothing new begins
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

// ended is the context of a Run that is over.
var ended = func() context.Context { //nolint:gochecknoglobals // a constant
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// spawn runs fn with the context of Run, which waits for it. It reports false
// when Run does not run.
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

// track returns the state of a sandbox, brought up to its row.
func (s *Service) track(sb agentlab.Sandbox) *runtimeState {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.states[sb.VMID]
	if m == nil || m.uid != sb.UID {
		m = &runtimeState{uid: sb.UID}
		s.states[sb.VMID] = m
	}
	if m.state != sb.State {
		m.state, m.inspected = sb.State, false
		m.tried, m.running, m.retry = time.Time{}, time.Time{}, retryState{}
	}
	return m
}

// forget drops what is remembered of a sandbox that is gone.
func (s *Service) forget(vmid int) {
	s.boots.release(vmid, s.loop.Wake)
	s.mu.Lock()
	m := s.states[vmid]
	delete(s.states, vmid)
	s.mu.Unlock()
	if m != nil {
		m.listener.close()
	}
}

// withState calls fn with the state of a sandbox, if there is one, under the
// lock.
func (s *Service) withState(vmid int, fn func(*runtimeState)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.states[vmid]; m != nil {
		fn(m)
	}
}

// Wake makes the service look at a sandbox that someone else changed.
func (s *Service) Wake(vmid int) { s.loop.Wake(vmid) }

// update changes a row and wakes the calls that wait for a change of it.
func (s *Service) update(ctx context.Context, vmid int, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error) {
	sb, err := s.cfg.Store.UpdateSandbox(ctx, vmid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		before := *sb
		evs, err := fn(sb)
		if sb.State != before.State || sb.Desired != before.Desired {
			sb.Waiting = "" // that was about something else
		}
		return evs, err
	})
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	s.track(sb)
	s.withState(vmid, (*runtimeState).notifyWaiters)
	return sb, nil
}

// stepFailed logs a step that will run again.
func (s *Service) stepFailed(vmid, attempt int, err error) {
	s.mu.Lock()
	ending := s.run.Err() != nil
	s.mu.Unlock()
	if ending {
		return
	}
	level := slog.LevelDebug
	if attempt == 1 || attempt%10 == 0 {
		level = slog.LevelWarn
	}
	s.log.Log(context.Background(), level, "sandbox step failed, will try again", "vmid", vmid, "attempt", attempt, "err", err)
}
