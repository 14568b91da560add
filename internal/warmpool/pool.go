// Package warmpool keeps sandboxes that no user has asked for yet. Each is an ordinary
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
package warmpool

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

const (
	// ttl is the lease of a sandbox of the pool. It bounds how long its VM
	// runs without a daemon.
	ttl = 2 * time.Hour
	// quietTime is how long after a request or a start no sandbox of the pool is made.
	quietTime = 3 * time.Second
	// backoff is the first pause after a failure; it is doubled each time.
	backoff    = 10 * time.Second
	backoffMax = 10 * time.Minute
	// yieldTimeout limits how long a request waits for the numbers of the pool.
	yieldTimeout = 30 * time.Second
	// bootedUptime is when a guest whose init does not report its state counts as
	// booted.
	bootedUptime = 20 * time.Second
	// warmTimeout limits the preparation of a guest of the pool.
	warmTimeout = time.Minute
)

// Entry is a number of sandboxes that wait for users.
type Entry struct {
	Image   string
	Profile string // whose resources and options they have; "" is the default profile
	Count   int
}

// Store is the part of the database that the pool uses. Its semantics are those of
// package store.
type Store interface {
	AllocateSandbox(ctx context.Context, sb agentlab.Sandbox, a agentlab.Allocation, evs ...agentlab.Event) (agentlab.Sandbox, error)
	HandOutSandbox(ctx context.Context, vmid int, sb agentlab.Sandbox, maxLive int, evs ...agentlab.Event) (agentlab.Sandbox, error)
	DeleteSandbox(ctx context.Context, vmid int) error
	Sandboxes(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	// Subscribe calls fn after each commit.
	Subscribe(fn func(agentlab.Commit))
}

// Pool is the warm pool. Its methods may be called from any goroutine.
type Pool struct {
	core    *sandbox.Core
	store   Store
	entries []Entry
	fleet   *fleet.Fleet
	log     *slog.Logger
	wake    chan struct{}

	mu       sync.Mutex
	mine     map[int]bool      // the sandboxes that this process has made
	making   int               // the one that is not POOLED yet; 0 if there is none
	quiet    time.Time         // none is made before
	trouble  map[string]*fault // by shape
	problems []string          // of the entries of the configuration; "" if there is none
	removed  chan struct{}     // closed when the row of one has been deleted
}

// fault counts the consecutive failures of sandboxes of one shape.
type fault struct {
	count  int
	until  time.Time // no other one is made before
	reason string
}

// New returns a Pool with the entries. Call Run to fill it.
func New(core *sandbox.Core, store Store, entries ...Entry) *Pool {
	p := &Pool{
		core: core, store: store, entries: entries, fleet: core.Fleet(), log: core.Log(),
		wake: make(chan struct{}, 1), mine: map[int]bool{}, trouble: map[string]*fault{}, removed: make(chan struct{}),
	}
	store.Subscribe(p.committed)
	return p
}

// committed counts the sandboxes of the pool that have failed.
func (p *Pool) committed(c agentlab.Commit) {
	for _, sb := range c.Sandboxes {
		if sb.Pooled() && sb.State == agentlab.SandboxFailed {
			p.failed(sb)
		}
	}
}

func (p *Pool) wakeUp() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Run keeps the pool as configured until ctx ends. It returns at once if there is none.
func (p *Pool) Run(ctx context.Context) error {
	if err := p.wakeRemoved(ctx); err != nil && ctx.Err() == nil {
		p.log.Warn("rows of the warm pool could not be deleted", "err", err)
	}
	for ctx.Err() == nil {
		again, err := p.tend(ctx)
		if err != nil && ctx.Err() == nil {
			p.log.Warn("the warm pool could not be checked", "err", err)
		}
		if again == 0 {
			break
		}
		select {
		case <-time.After(again):
		case <-p.wake:
		case <-ctx.Done():
		}
	}
	return nil
}

// wakeRemoved wakes the steps that delete the rows of destroyed sandboxes of the pool.
func (p *Pool) wakeRemoved(ctx context.Context) error {
	rows, err := p.store.Sandboxes(ctx, agentlab.SandboxFilter{States: []agentlab.SandboxState{agentlab.SandboxDestroyed}})
	for _, sb := range rows {
		if sb.Pooled() {
			p.core.Wake(sb.VMID)
		}
	}
	return err
}

// tend removes the sandboxes that the pool must not have, and begins to make one
// that it lacks. It returns the time until the next call, 0 for none.
func (p *Pool) tend(ctx context.Context) (again time.Duration, err error) {
	again = p.core.Limits().AuditEvery
	rows, err := p.store.Sandboxes(ctx, agentlab.SandboxFilter{})
	if err != nil {
		return again, err
	}
	var have []agentlab.Sandbox
	busy := false
	for _, sb := range rows {
		switch {
		case p.core.Elsewhere(sb):
		case !sb.Pooled():
			busy = busy || starts(sb)
		case sb.Desired == agentlab.DesiredDestroyed:
			busy = true
		default:
			have = append(have, sb)
			busy = busy || sb.State != agentlab.SandboxPooled
		}
	}
	if len(p.entries) == 0 && len(have) == 0 {
		return 0, nil
	}
	next, surplus := p.compare(ctx, have)
	for sb, why := range surplus {
		p.Drop(ctx, sb, why)
	}
	if next == nil || busy || len(surplus) > 0 {
		return again, nil
	}
	p.mu.Lock()
	wait := p.quiet.Sub(p.core.Now())
	p.mu.Unlock()
	if wait > 0 {
		return min(wait, again), nil
	}
	return again, p.begin(ctx, *next)
}

// starts reports whether a sandbox of a user is on its way to READY.
func starts(sb agentlab.Sandbox) bool {
	switch sb.State {
	case agentlab.SandboxRequested, agentlab.SandboxProvisioning, agentlab.SandboxBooting, agentlab.SandboxSuspended, agentlab.SandboxStopped:
		return sb.Desired == agentlab.DesiredRunning
	}
	return false
}

// compare compares the pool with its configuration. next is a sandbox to make,
// nil if there is none; surplus are the numbers of those to destroy, with the reason.
func (p *Pool) compare(ctx context.Context, have []agentlab.Sandbox) (next *agentlab.Sandbox, surplus map[int]string) {
	surplus = map[int]string{}
	p.mu.Lock()
	for _, sb := range have {
		surplus[sb.VMID] = "its image or the configuration has changed"
		if !p.mine[sb.VMID] {
			surplus[sb.VMID] = "it was made by an earlier daemon"
		}
	}
	have = slices.DeleteFunc(have, func(sb agentlab.Sandbox) bool { return !p.mine[sb.VMID] })
	p.mu.Unlock()
	var problems []string
	for _, e := range p.entries {
		shape, err := p.shape(ctx, e)
		if err == nil {
			err = p.room(ctx, shape)
		}
		if err != nil {
			problems = append(problems, agentlab.Reason(agentlab.TextWithHint(err)))
			if code := agentlab.CodeOf(err); code != agentlab.CodeNoSpace {
				keep(&have, surplus, shape, e.Count) // what is unknown destroys nothing
			}
			continue
		}
		missing := e.Count - keep(&have, surplus, shape, e.Count)
		problem, ready := p.troubleOf(shape)
		if missing > 0 && ready && next == nil {
			shape.Resources.MemoryMB *= 2 // room for a request is left afterwards
			if err := p.room(ctx, shape); err != nil {
				problem = agentlab.Reason(agentlab.TextWithHint(err))
			} else {
				shape.Resources.MemoryMB /= 2
				next = &shape
			}
		}
		problems = append(problems, problem)
	}
	p.mu.Lock()
	p.problems = problems
	p.mu.Unlock()
	return next, surplus
}

// keep takes up to count sandboxes of a shape out of have and surplus, and
// returns how many.
func keep(have *[]agentlab.Sandbox, surplus map[int]string, shape agentlab.Sandbox, count int) (kept int) {
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

// shape returns a sandbox of an entry, without name, number and UID.
func (p *Pool) shape(ctx context.Context, e Entry) (agentlab.Sandbox, error) {
	if err := p.possible(); err != nil {
		return agentlab.Sandbox{}, err
	}
	sb, _, err := p.core.PlanImage(agentlab.SandboxRequest{Image: e.Image, Profile: e.Profile})
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	if sb.Image, err = p.core.On(sb).Images.Current(ctx, sb.Image); err != nil {
		return agentlab.Sandbox{}, err
	}
	now := p.core.Now().UTC()
	out := agentlab.Sandbox{
		Backend: sb.Backend, Profile: agentlab.ProfilePool, Image: sb.Image, State: agentlab.SandboxRequested, Desired: agentlab.DesiredRunning,
		Resources: sb.Resources, Options: sb.Options, Network: agentlab.Network{Mode: agentlab.NetworkOff},
		LeaseExpiresAt: now.Add(ttl), CreatedAt: now,
	}
	asked := sandbox.SpecOf(out)
	asked.Name = "pool"
	return out, p.fleet.Of(out.Backend).Validate(asked)
}

// possible returns an error with code unsupported if the backend can have no pool.
func (p *Pool) possible() error {
	b := p.fleet.Default()
	if b.Net != nil && b.Host != nil && b.Can().NetworkOff {
		return nil
	}
	return b.Without("cannot have a warm pool: it must be able to change network policies and know its free memory").
		WithHint("remove warm_pool from config.yaml")
}

// room returns an error with code no_space if the host lacks room for another
// sandbox.
func (p *Pool) room(ctx context.Context, sb agentlab.Sandbox) error {
	if h := p.core.On(sb).Host; h != nil {
		return h.Room(ctx, sb.Resources)
	}
	return nil
}

// troubleOf returns the last failure of a shape, and whether another sandbox of it
// may be made now.
func (p *Pool) troubleOf(shape agentlab.Sandbox) (reason string, ready bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f := p.trouble[shapeKey(shape)]; f != nil {
		return f.reason, !p.core.Now().Before(f.until)
	}
	return "", true
}

// failed records that a sandbox of the pool could not be made, or died. One counts once.
func (p *Pool) failed(sb agentlab.Sandbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.mine[sb.VMID] {
		return
	}
	delete(p.mine, sb.VMID)
	f := p.trouble[shapeKey(sb)]
	if f == nil {
		f = &fault{}
		p.trouble[shapeKey(sb)] = f
	}
	f.reason, f.until = sb.Reason, p.core.Now().Add(min(backoff<<min(f.count, 10), backoffMax))
	f.count++
}

// begin begins to make a sandbox of the pool.
func (p *Pool) begin(ctx context.Context, sb agentlab.Sandbox) error {
	a, err := p.core.Allocation(ctx, sb.Backend)
	if err != nil {
		return err
	}
	sb.UID = agentlab.NewUID()
	sb.Name = "pool-" + sb.UID[:12]
	made, err := p.store.AllocateSandbox(ctx, sb, a)
	if agentlab.CodeOf(err) == agentlab.CodeLimit { // users have all that there is
		return nil
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.mine[made.VMID], p.making = true, made.VMID
	p.mu.Unlock()
	p.log.Debug("a sandbox of the warm pool is being made", "vmid", made.VMID, "image", made.Image)
	p.core.Added(made)
	return nil
}

// Drop implements sandbox.Pool.
func (p *Pool) Drop(ctx context.Context, vmid int, why string) {
	dropped := false
	_, err := p.core.Update(ctx, vmid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if dropped = sb.Pooled() && sb.Desired != agentlab.DesiredDestroyed && !p.core.Elsewhere(*sb); dropped {
			sb.Desired = agentlab.DesiredDestroyed
		}
		return nil, nil
	})
	switch {
	case err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound && ctx.Err() == nil:
		p.log.Warn("a sandbox of the warm pool was not destroyed", "vmid", vmid, "err", err)
	case err == nil && dropped:
		p.log.Info("a sandbox of the warm pool is destroyed", "vmid", vmid, "why", why)
		p.made(vmid)
		p.core.Interrupt(vmid)
	}
}

// made records that a sandbox is no longer being made for the pool.
func (p *Pool) made(vmid int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.making == vmid {
		p.making = 0
	}
}

// Removed implements sandbox.Pool.
func (p *Pool) Removed(ctx context.Context, vmid int) error {
	if err := p.store.DeleteSandbox(ctx, vmid); err != nil {
		return err
	}
	p.made(vmid)
	p.mu.Lock()
	delete(p.mine, vmid)
	close(p.removed)
	p.removed = make(chan struct{})
	p.mu.Unlock()
	p.wakeUp()
	return nil
}
