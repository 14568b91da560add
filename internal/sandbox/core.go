package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
)

// Core is what the service shares with its parts, which other packages have: the rows of
// sandboxes, their state in memory, their loop and their guests. It is created first,
// then the parts, then the Service, which runs the steps.
type Core struct {
	cfg       Config
	lim       Limits
	log       *slog.Logger
	clock     func() time.Time
	loop      *reconcile.Loop[int]
	step      func(ctx context.Context, vmid int) (time.Duration, error) // of the Service
	boots     slots
	copySlots slots

	mu     sync.Mutex
	states map[int]*runtimeState
	run    context.Context // of Run; nil before

	wg sync.WaitGroup // what Run waits for in addition to the loop
}

// runtimeState is the service's state in memory for an existing sandbox. It may
// be lost: a new process starts with an empty one.
type runtimeState struct {
	uid     string
	handle  string                // as last seen
	backend string                // where it is; it may be none of the daemon's
	state   agentlab.SandboxState // as last seen

	inspected      bool           // this process has found its VM in the expected state
	needsInspect   bool           // the audit found a difference: inspect the VM again
	grace          *time.Duration // requested by Stop; nil means the default
	image          *imageResult   // result of an image build that it waited for
	retry          *retryState    // of steps that failed; nil if the last one did not
	destroyPending bool           // it must be destroyed, but the row could not be changed: the disk was full

	leaseState
	bootState
	guestState
	netState
}

// leaseState is about the lease of a sandbox.
type leaseState struct {
	lease     time.Time     // its end, as sent to the backend (backend.Power)
	leaseEnd  time.Time     // its end, as last seen
	warned    time.Duration // the last warning about leaseEnd, one of leaseWarnings; 0: none
	terminals int           // attached terminals
}

// bootState is about the starts of a VM.
type bootState struct {
	blank   bool          // this process started its VM, and sent its guest nothing
	isCopy  bool          // it continues the guest of a snapshot
	hurry   bool          // another copy of its snapshot did not answer
	tried   time.Time     // first attempt to power it on in its current state
	running time.Time     // when this process first found the VM of a BOOTING sandbox running
	looked  time.Time     // when the VM of a BOOTING sandbox was last inspected
	reboots *rate.Limiter // of its guest by itself
}

// guestState is about a guest.
type guestState struct {
	listener  *guestListener
	save      bool      // its console log must be saved
	paused    string    // why its CPUs are paused; "" if they are not
	asking    bool      // the step waits for its answer, or saves it
	newPolicy bool      // its network policy has changed since the step read the row
	silent    int       // consecutive deliveries that it did not answer
	askAt     time.Time // when the next delivery may begin
}

// netState is about the network policy of a sandbox.
type netState struct {
	trouble *netTrouble   // a network policy that cannot be applied; nil if there is none
	changed chan struct{} // closed at the next change of its row or of trouble; nil when no call waits
}

type netTrouble struct {
	since time.Time
	why   string
}

// NewCore returns a Core. New makes it a Service.
func NewCore(cfg Config) *Core {
	c := &Core{cfg: cfg, lim: cfg.Limits.withDefaults(), log: cfg.Logger, clock: cfg.Clock, states: map[int]*runtimeState{}}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.clock == nil {
		c.clock = time.Now
	}
	c.boots.limit, c.copySlots.limit = c.lim.ParallelBoots, c.lim.ParallelBoots
	c.loop = reconcile.New(reconcile.Config[int]{
		Step:   func(ctx context.Context, vmid int) (time.Duration, error) { return c.step(ctx, vmid) },
		Failed: reconcile.LogFailed[int](c.log, "sandbox", "vmid"), Workers: c.lim.Workers,
	})
	return c
}

// ended is the context of a Run that is over.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// spawn runs fn with the context of Run, which waits for it. It returns false
// if Run is not running.
func (s *Core) spawn(fn func(ctx context.Context)) bool {
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
func (s *Core) track(sb agentlab.Sandbox) *runtimeState {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.states[sb.VMID]
	if m == nil || m.uid != sb.UID {
		m = &runtimeState{uid: sb.UID, backend: s.On(sb).Name()}
		s.states[sb.VMID] = m
		s.loop.Assign(sb.VMID, m.backend)
	}
	m.handle = sb.Handle
	if m.state != sb.State {
		m.state, m.inspected = sb.State, false
		m.tried, m.running, m.retry = time.Time{}, time.Time{}, nil
		m.silent, m.askAt = 0, time.Time{}
		if sb.State == agentlab.SandboxStopped {
			m.grace = nil
		}
	}
	return m
}

// Now returns the time of the daemon.
func (s *Core) Now() time.Time { return s.clock() }

// Log returns the log of the service and its parts.
func (s *Core) Log() *slog.Logger { return s.log }

// Limits returns the limits with their defaults.
func (s *Core) Limits() Limits { return s.lim }

// Fleet returns the backends.
func (s *Core) Fleet() *fleet.Fleet { return s.cfg.Fleet }

// Added runs the step of a sandbox whose row was just written.
func (s *Core) Added(sb agentlab.Sandbox) {
	s.track(sb)
	s.loop.Wake(sb.VMID)
}

// Interrupt runs the step of a sandbox from the beginning.
func (s *Core) Interrupt(vmid int) { s.loop.Interrupt(vmid) }

// forget deletes the memory of a sandbox that is destroyed.
func (s *Core) forget(vmid int) {
	s.ReleaseSlots(vmid)
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
func (s *Core) withState(vmid int, fn func(*runtimeState)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.states[vmid]; m != nil {
		fn(m)
	}
}

// Wake runs the step of a sandbox that another component changed.
func (s *Core) Wake(vmid int) { s.loop.Wake(vmid) }

// Queue returns what the loop of the sandboxes has to do now.
func (s *Core) Queue() reconcile.Stats { return s.loop.Stats() }

// Update changes a row and wakes the calls that wait for a change of it.
func (s *Core) Update(ctx context.Context, vmid int, fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error) {
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
	if sb.Salvage && !before.Salvage {
		s.spawn(s.boundSalvage)
	}
	return sb, nil
}

// On returns the backend of a sandbox. If the daemon does not have it, all methods of the
// result return an error: its VM may be running, and nothing about it is known.
func (s *Core) On(sb agentlab.Sandbox) *fleet.Backend { return s.cfg.Fleet.Of(sb.Backend) }

// missing returns the name of a backend that the daemon does not have, otherwise "".
func (s *Core) missing(name string) string {
	if s.cfg.Fleet.Of(name).Missing() == nil {
		return ""
	}
	return name
}

// Elsewhere reports whether a sandbox belongs to a backend that the daemon does not have.
// It is not changed.
func (s *Core) Elsewhere(sb agentlab.Sandbox) bool {
	return s.missing(sb.Backend) != "" && sb.State != agentlab.SandboxDestroyed
}

// Reachable returns an error with code conflict if the daemon does not have the backend of a
// sandbox.
func (s *Core) Reachable(sb agentlab.Sandbox) error {
	if !s.Elsewhere(sb) {
		return nil
	}
	err := s.On(sb).Missing()
	return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s (%d) cannot be used: %w", sb.Name, sb.VMID, err)
}

// skipElsewhere is the step of a sandbox of another backend: its row shows why
// nothing happens to it.
func (s *Service) skipElsewhere(ctx context.Context, sb agentlab.Sandbox) time.Duration {
	err := s.Reachable(sb)
	if text := agentlab.Reason(agentlab.TextWithHint(err)); text != sb.Waiting {
		s.SetWaiting(ctx, sb, text, err)
	}
	return s.idleLimit()
}

// logElsewhere logs the sandboxes of other backends when the service starts.
func (s *Service) logElsewhere(rows []agentlab.Sandbox) {
	for _, sb := range rows {
		if err := s.Reachable(sb); err != nil {
			s.log.Warn("a sandbox is not managed", "vmid", sb.VMID, "err", agentlab.TextWithHint(err))
		}
	}
}

// findElsewhere returns a finding about the sandboxes of other backends.
func (s *Service) findElsewhere() []backend.Finding {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, other := 0, ""
	for _, m := range s.states {
		if name := s.missing(m.backend); name != "" {
			n++
			other = max(other, name)
		}
	}
	if n == 0 {
		return nil
	}
	return []backend.Finding{{
		Name: "other backends", Level: backend.LevelWarn,
		Detail: fmt.Sprintf("%s belong to another backend, for example %s; they are not managed, and their VMs may be running", agentlab.Plural(n, "sandbox"), other),
		Remedy: fmt.Sprintf("add backend %s to config.yaml and restart agentlabd", other),
	}}
}
