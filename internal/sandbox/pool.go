package sandbox

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// The warm pool has sandboxes that no user has asked for yet. Each is an ordinary
// row with the profile agentlab.ProfilePool, and goes from REQUESTED to POOLED: its
// guest has booted, has no identity and no network, and is paused if the backend can
// pause it. Create hands one out that fits: in one transaction the row gets the
// name, profile, policy, lease and job of the request, and becomes BOOTING. Its step
// applies the policy, continues the guest and sends the identity.
//
// Requests come first. A sandbox of the pool is made only while no other one starts,
// one at a time and without a slot for booting. It is destroyed when a request needs
// its number, its memory or the CPUs. A process destroys those of an earlier process,
// because the software of the host may have been replaced in between.

const (
	// poolTTL is the lease of a sandbox of the pool. It bounds how long its VM
	// runs without a daemon.
	poolTTL = 2 * time.Hour
	// poolQuiet is how long after a request or a start no sandbox of the pool is made.
	poolQuiet = 3 * time.Second
	// poolBackoff is the first pause after a failure; it is doubled each time.
	poolBackoff    = 10 * time.Second
	poolBackoffMax = 10 * time.Minute
	// yieldTimeout limits how long a request waits for the numbers of the pool.
	yieldTimeout = 30 * time.Second
	// bootedUptime is when a guest whose init does not report its state counts as
	// booted.
	bootedUptime = 20 * time.Second
	// warmTimeout limits the preparation of a guest of the pool.
	warmTimeout = time.Minute
)

// PoolEntry is a number of sandboxes that wait for users.
type PoolEntry struct {
	Image   string
	Profile string // whose resources and options they have; "" is the default profile
	Count   int
}

// pool is the state in memory of the warm pool.
type pool struct {
	wake chan struct{}

	mu       sync.Mutex
	mine     map[int]bool          // the sandboxes that this process has made
	making   int                   // the one that is not POOLED yet; 0 if there is none
	quiet    time.Time             // none is made before
	trouble  map[string]*poolFault // by shape
	problems []string              // of the entries of the configuration; "" if there is none
	removed  chan struct{}         // closed when the row of one has been deleted
}

// poolFault counts the consecutive failures of sandboxes of one shape.
type poolFault struct {
	count  int
	until  time.Time // no other one is made before
	reason string
}

func newPool() pool {
	return pool{wake: make(chan struct{}, 1), mine: map[int]bool{}, trouble: map[string]*poolFault{}, removed: make(chan struct{})}
}

func (p *pool) wakeUp() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// poolLoop keeps the pool as configured until ctx ends.
func (s *Service) poolLoop(ctx context.Context) {
	if err := s.wakeRemoved(ctx); err != nil && ctx.Err() == nil {
		s.log.Warn("rows of the warm pool could not be deleted", "err", err)
	}
	for ctx.Err() == nil {
		again, err := s.tendPool(ctx)
		if err != nil && ctx.Err() == nil {
			s.log.Warn("the warm pool could not be checked", "err", err)
		}
		if again == 0 {
			return
		}
		select {
		case <-time.After(again):
		case <-s.pool.wake:
		case <-ctx.Done():
		}
	}
}

// wakeRemoved wakes the steps that delete the rows of destroyed sandboxes of the pool.
func (s *Service) wakeRemoved(ctx context.Context) error {
	rows, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{States: []agentlab.SandboxState{agentlab.SandboxDestroyed}})
	for _, sb := range rows {
		if sb.Pooled() {
			s.loop.Wake(sb.VMID)
		}
	}
	return err
}

// tendPool removes the sandboxes that the pool must not have, and begins to make one
// that it lacks. It returns the time until the next call, 0 for none.
func (s *Service) tendPool(ctx context.Context) (again time.Duration, err error) {
	again = s.lim.AuditEvery
	rows, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{})
	if err != nil {
		return again, err
	}
	var have []agentlab.Sandbox
	busy := false
	for _, sb := range rows {
		switch {
		case s.elsewhere(sb):
		case !sb.Pooled():
			busy = busy || starts(sb)
		case sb.Desired == agentlab.DesiredDestroyed:
			busy = true
		default:
			have = append(have, sb)
			busy = busy || sb.State != agentlab.SandboxPooled
		}
	}
	if len(s.cfg.Pool) == 0 && len(have) == 0 {
		return 0, nil
	}
	next, surplus := s.comparePool(ctx, have)
	for sb, why := range surplus {
		s.dropPooled(ctx, sb, why)
	}
	if next == nil || busy || len(surplus) > 0 {
		return again, nil
	}
	s.pool.mu.Lock()
	wait := s.pool.quiet.Sub(s.clock())
	s.pool.mu.Unlock()
	if wait > 0 {
		return min(wait, again), nil
	}
	return again, s.makePooled(ctx, *next)
}

// starts reports whether a sandbox of a user is on its way to READY.
func starts(sb agentlab.Sandbox) bool {
	switch sb.State {
	case agentlab.SandboxRequested, agentlab.SandboxProvisioning, agentlab.SandboxBooting, agentlab.SandboxSuspended, agentlab.SandboxStopped:
		return sb.Desired == agentlab.DesiredRunning
	}
	return false
}

// comparePool compares the pool with its configuration. next is a sandbox to make,
// nil if there is none; surplus are the numbers of those to destroy, with the reason.
func (s *Service) comparePool(ctx context.Context, have []agentlab.Sandbox) (next *agentlab.Sandbox, surplus map[int]string) {
	surplus = map[int]string{}
	s.pool.mu.Lock()
	for _, sb := range have {
		surplus[sb.VMID] = "its image or the configuration has changed"
		if !s.pool.mine[sb.VMID] {
			surplus[sb.VMID] = "it was made by an earlier daemon"
		}
	}
	have = slices.DeleteFunc(have, func(sb agentlab.Sandbox) bool { return !s.pool.mine[sb.VMID] })
	s.pool.mu.Unlock()
	var problems []string
	for _, e := range s.cfg.Pool {
		shape, err := s.poolShape(ctx, e)
		if err == nil {
			err = s.poolRoom(ctx, shape)
		}
		if err != nil {
			problems = append(problems, agentlab.Reason(agentlab.TextWithHint(err)))
			if code := agentlab.CodeOf(err); code != agentlab.CodeNoSpace {
				keepPooled(&have, surplus, shape, e.Count) // what is unknown destroys nothing
			}
			continue
		}
		missing := e.Count - keepPooled(&have, surplus, shape, e.Count)
		problem, ready := s.poolTrouble(shape)
		if missing > 0 && ready && next == nil {
			shape.Resources.MemoryMB *= 2 // room for a request is left afterwards
			if err := s.poolRoom(ctx, shape); err != nil {
				problem = agentlab.Reason(agentlab.TextWithHint(err))
			} else {
				shape.Resources.MemoryMB /= 2
				next = &shape
			}
		}
		problems = append(problems, problem)
	}
	s.pool.mu.Lock()
	s.pool.problems = problems
	s.pool.mu.Unlock()
	return next, surplus
}

// keepPooled takes up to count sandboxes of a shape out of have and surplus, and
// returns how many.
func keepPooled(have *[]agentlab.Sandbox, surplus map[int]string, shape agentlab.Sandbox, count int) (kept int) {
	*have = slices.DeleteFunc(*have, func(sb agentlab.Sandbox) bool {
		if kept == count || shapeKey(sb) != shapeKey(shape) {
			return false
		}
		kept++
		delete(surplus, sb.VMID)
		return true
	})
	return kept
}

// shapeKey identifies what cannot be changed when a sandbox is handed out.
func shapeKey(sb agentlab.Sandbox) string {
	return fmt.Sprintf("%s %s %+v %+v", sb.Backend, sb.Image, sb.Resources, sb.Options)
}

// poolShape returns a sandbox of an entry, without name, number and UID.
func (s *Service) poolShape(ctx context.Context, e PoolEntry) (agentlab.Sandbox, error) {
	if err := s.poolable(); err != nil {
		return agentlab.Sandbox{}, err
	}
	sb, _, err := s.plan(ctx, agentlab.SandboxRequest{Image: e.Image, Profile: e.Profile}, nil)
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	if sb.Image, err = s.on(sb).Images.Current(ctx, sb.Image); err != nil {
		return agentlab.Sandbox{}, err
	}
	now := s.clock().UTC()
	out := agentlab.Sandbox{
		Backend: sb.Backend, Profile: agentlab.ProfilePool, Image: sb.Image, State: agentlab.SandboxRequested, Desired: agentlab.DesiredRunning,
		Resources: sb.Resources, Options: sb.Options, Network: agentlab.Network{Mode: agentlab.NetworkOff},
		LeaseExpiresAt: now.Add(poolTTL), CreatedAt: now,
	}
	asked := spec(out)
	asked.Name = "pool"
	return out, s.on(out).Validate(asked)
}

// poolable returns an error with code unsupported if the backend can have no pool.
func (s *Service) poolable() error {
	b := s.cfg.Fleet.Default()
	if b.Net != nil && b.Host != nil && b.Can().NetworkOff {
		return nil
	}
	return b.Without("cannot have a warm pool: it must be able to change network policies and know its free memory").
		WithHint("remove warm_pool from config.yaml")
}

// poolRoom returns an error with code no_space if the host lacks room for another
// sandbox.
func (s *Service) poolRoom(ctx context.Context, sb agentlab.Sandbox) error {
	if h := s.on(sb).Host; h != nil {
		return h.Room(ctx, sb.Resources)
	}
	return nil
}

// poolTrouble returns the last failure of a shape, and whether another sandbox of it
// may be made now.
func (s *Service) poolTrouble(shape agentlab.Sandbox) (reason string, ready bool) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	if f := s.pool.trouble[shapeKey(shape)]; f != nil {
		return f.reason, !s.clock().Before(f.until)
	}
	return "", true
}

// poolFailed records that a sandbox of the pool could not be made, or died.
func (s *Service) poolFailed(sb agentlab.Sandbox, reason string) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	f := s.pool.trouble[shapeKey(sb)]
	if f == nil {
		f = &poolFault{}
		s.pool.trouble[shapeKey(sb)] = f
	}
	f.reason, f.until = reason, s.clock().Add(min(poolBackoff<<min(f.count, 10), poolBackoffMax))
	f.count++
}

// makePooled begins to make a sandbox of the pool.
func (s *Service) makePooled(ctx context.Context, sb agentlab.Sandbox) error {
	a, err := s.allocation(ctx, sb.Backend)
	if err != nil {
		return err
	}
	sb.UID = agentlab.NewUID()
	sb.Name = "pool-" + sb.UID[:12]
	made, err := s.cfg.Store.AllocateSandbox(ctx, sb, a)
	if agentlab.CodeOf(err) == agentlab.CodeLimit { // users have all that there is
		return nil
	}
	if err != nil {
		return err
	}
	s.pool.mu.Lock()
	s.pool.mine[made.VMID], s.pool.making = true, made.VMID
	s.pool.mu.Unlock()
	s.log.Debug("a sandbox of the warm pool is being made", "vmid", made.VMID, "image", made.Image)
	s.track(made)
	s.loop.Wake(made.VMID)
	return nil
}

// dropPooled destroys a sandbox of the pool, unless it was handed out.
func (s *Service) dropPooled(ctx context.Context, vmid int, why string) {
	dropped := false
	_, err := s.update(ctx, vmid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if dropped = sb.Pooled() && sb.Desired != agentlab.DesiredDestroyed && !s.elsewhere(*sb); dropped {
			sb.Desired = agentlab.DesiredDestroyed
		}
		return nil, nil
	})
	switch {
	case err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound && ctx.Err() == nil:
		s.log.Warn("a sandbox of the warm pool was not destroyed", "vmid", vmid, "err", err)
	case err == nil && dropped:
		s.log.Info("a sandbox of the warm pool is destroyed", "vmid", vmid, "why", why)
		s.madePooled(vmid)
		s.loop.Interrupt(vmid)
	}
}

// madePooled records that a sandbox is no longer being made for the pool.
func (s *Service) madePooled(vmid int) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	if s.pool.making == vmid {
		s.pool.making = 0
	}
}

// poolRemoved deletes the row of a destroyed sandbox of the pool, so that its number
// is free again.
func (s *Service) poolRemoved(ctx context.Context, vmid int) error {
	if err := s.cfg.Store.DeleteSandbox(ctx, vmid); err != nil {
		return err
	}
	s.madePooled(vmid)
	s.pool.mu.Lock()
	delete(s.pool.mine, vmid)
	close(s.pool.removed)
	s.pool.removed = make(chan struct{})
	s.pool.mu.Unlock()
	s.pool.wakeUp()
	return nil
}
