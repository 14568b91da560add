package sandbox

import (
	"cmp"
	"context"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Create stores a new sandbox and returns it, in state REQUESTED. Codes:
// invalid, not_found (profile, image), unsupported with the field named,
// exists (name taken), limit.
func (s *Service) Create(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, error) {
	var from *agentlab.Snapshot
	var layers []agentlab.Network
	if r.From != "" || r.Fork != "" {
		var snap agentlab.Snapshot
		var err error
		if r.Fork != "" {
			snap, layers, err = s.snaps.ForkOrigin(ctx, r.Fork)
			if r.Maintenance != "" {
				layers = nil // it has no network
			}
		} else {
			snap, err = s.snaps.Origin(ctx, r.From)
		}
		if err != nil {
			return agentlab.Sandbox{}, err
		}
		from = &snap
	}
	sb, prof, err := s.plan(ctx, r, from)
	if err == nil {
		err = s.CheckPlan(ctx, r, sb, prof)
	}
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	use, err := s.selectWorkspace(ctx, r, sb.Backend)
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	sb.Network.Layers = append(sb.Network.Layers, layers...)
	if _, err := s.cfg.Store.PutProfile(ctx, prof.Name, prof.YAML); err != nil {
		return agentlab.Sandbox{}, err
	}
	s.pool.Quiet(ctx)
	const tries = 8 // if a generated name is taken, or the name of a new workspace
	for i := 0; ; i++ {
		if r.Name == "" {
			sb.Name = "sb-" + agentlab.NewUID()[:6]
		}
		made, err := s.allocate(ctx, sb, use, r.Session)
		if agentlab.CodeOf(err) == agentlab.CodeExists && i < tries {
			again, serr := s.selectWorkspace(ctx, r, sb.Backend)
			if serr != nil {
				return agentlab.Sandbox{}, serr
			}
			found := use != nil && use.New != nil && again.New == nil // a request at the same time has created it
			if use = again; found || r.Name == "" {
				continue
			}
		}
		if err != nil {
			return agentlab.Sandbox{}, err
		}
		s.Added(made)
		return made, nil
	}
}

// allocate stores a planned sandbox: one of the warm pool that fits, or a new one.
func (s *Service) allocate(ctx context.Context, sb agentlab.Sandbox, use *agentlab.WorkspaceUse, session string) (agentlab.Sandbox, error) {
	if use == nil { // those of the pool run, and have none
		if made, ok, err := s.pool.HandOut(ctx, sb); ok || err != nil {
			return made, err
		}
	}
	var made agentlab.Sandbox
	err := s.pool.WithNumbers(ctx, sb.Backend, func(a agentlab.Allocation) (err error) {
		a.Workspace, a.Session = use, session
		made, err = s.cfg.Store.AllocateSandbox(ctx, sb, a, CreatedEvent(sb))
		return err
	})
	return made, err
}

// Allocation returns the numbers and addresses that a new sandbox may get now.
// A backend whose numbers other users share is asked for the numbers that they
// have.
func (s *Core) Allocation(ctx context.Context, on string) (agentlab.Allocation, error) {
	a := agentlab.Allocation{First: s.lim.VMIDFirst, Last: s.lim.VMIDLast, MaxLive: s.lim.MaxSandboxes}
	b := s.cfg.Fleet.Of(on)
	if p := b.Info().Addresses; p != nil {
		a.IPv4, a.IPv6, a.Reserved = p.IPv4, p.IPv6, p.Reserved
	}
	if b.Host == nil {
		return a, nil
	}
	var err error
	a.Taken, err = b.Host.Taken(ctx, a.First, a.Last)
	return a, err
}

// SpecOf returns what a driver creates for a sandbox.
func SpecOf(sb agentlab.Sandbox) backend.Spec {
	out := backend.Spec{
		VMID: sb.VMID, UID: sb.UID, Name: sb.Name, Image: sb.Image,
		Resources: sb.Resources, Options: sb.Options, Network: sb.Network, IPv4: sb.IPv4, IPv6: sb.IPv6,
	}
	if sb.From.Snapshot != "" {
		out.From = &backend.SnapshotRef{UID: sb.From.Snapshot, Of: backend.Ref{UID: sb.From.Sandbox, Handle: sb.From.Handle}}
	}
	return out
}

// List returns sandboxes in ascending order of their numbers.
func (s *Core) List(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error) {
	return s.cfg.Store.Sandboxes(ctx, f)
}

// Start requests that a stopped sandbox runs. A sandbox that runs or is being
// created does not change. Codes: not_found, conflict, busy (it is being
// stopped).
func (s *Service) Start(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	return s.RequestChange(ctx, vmid, s.loop.Wake, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if err := s.startable(*sb); err != nil {
			return nil, err
		}
		switch {
		case sb.State == agentlab.SandboxFailed || sb.State == agentlab.SandboxTimeout:
			return nil, Conflict(*sb, "and cannot be started as it is", "agentlab sandbox stop %d, then start it, or destroy it", vmid)
		case sb.State == agentlab.SandboxStopped:
			if err := s.Room(); err != nil {
				return nil, err
			}
			sb.Desired = agentlab.DesiredRunning
			return nil, nil
		case sb.Desired.Suspended():
			return nil, Conflict(*sb, "and cannot be started", "continue it: agentlab sandbox resume %d", vmid)
		case sb.Desired == agentlab.DesiredStopped:
			return nil, agentlab.Errorf(agentlab.CodeBusy, "sandbox %s (%d) is being stopped", sb.Name, vmid).WithHint("try again when it is STOPPED")
		}
		return nil, nil
	})
}

// startable returns why a sandbox is not started on a request.
func (s *Service) startable(sb agentlab.Sandbox) error {
	switch {
	case sb.Desired == agentlab.DesiredDestroyed || sb.State == agentlab.SandboxDestroyed:
		return Conflict(sb, "and cannot be started", "create a new one: agentlab sandbox new")
	case sb.Salvage:
		return OnlyKept(sb)
	case sb.Profile == agentlab.ProfileLost: // its guest's configuration and policy are not known
		return Conflict(sb, "and cannot be started: it was recovered without its profile",
			"copy what you need from its disk in the directory sandboxes/ of the state directory, then 'agentlab sandbox destroy %d'", sb.VMID)
	case sb.State == agentlab.SandboxStopped && !s.clock().Before(sb.LeaseExpiresAt):
		return Conflict(sb, "and its lease has ended", "agentlab sandbox lease renew %d --ttl 4h", sb.VMID)
	}
	return nil
}

// Continue requests that the STOPPED or FAILED sandbox of a session runs again, from its
// disk as it is, with the workspace of the session. Codes: not_found; conflict, also if
// another sandbox has the workspace; busy.
func (s *Service) Continue(ctx context.Context, vmid int, session agentlab.Session) (agentlab.Sandbox, error) {
	use, err := s.workspaces.Select(ctx, agentlab.WorkspaceSelection{Workspace: session.WorkspaceID})
	if err == nil {
		err = s.Room()
	}
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	sb, err := s.cfg.Store.AttachWorkspace(ctx, vmid, use, session.ID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if err := cmp.Or(s.Reachable(*sb), s.startable(*sb)); err != nil {
			return nil, err
		}
		before := *sb
		switch {
		case sb.StartsAgain():
			sb.State = agentlab.SandboxStopped // with its reason
		case sb.State != agentlab.SandboxStopped:
			return nil, Conflict(*sb, "and cannot be started", "see 'agentlab sandbox show %d'", vmid)
		}
		sb.Desired = agentlab.DesiredRunning
		var evs []agentlab.Event
		if sb.State != before.State {
			evs = append(evs, StateEvent(*sb, before.State))
		}
		if sb.Desired != before.Desired {
			evs = append(evs, desiredEvent(*sb))
		}
		return evs, nil
	})
	if err == nil {
		s.loop.Wake(vmid)
	}
	return sb, err
}

// Stop requests that a sandbox is powered off: its guest has grace to power
// off, then the power is cut; grace 0 cuts it at once. A stopped sandbox does
// not change; one that is being stopped gets the new grace. Codes: not_found,
// conflict.
func (s *Service) Stop(ctx context.Context, vmid int, grace time.Duration) (agentlab.Sandbox, error) {
	var before *time.Duration
	s.withState(vmid, func(m *runtimeState) { before, m.grace = m.grace, &grace })
	sb, err := s.RequestChange(ctx, vmid, s.loop.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		switch {
		case sb.Desired == agentlab.DesiredDestroyed || sb.State == agentlab.SandboxDestroyed:
			return nil, Conflict(*sb, "and cannot be stopped", "")
		case sb.State == agentlab.SandboxRequested || sb.State == agentlab.SandboxProvisioning:
			return nil, Conflict(*sb, "and has nothing to stop yet", "agentlab sandbox destroy %d", vmid)
		}
		sb.Desired = agentlab.DesiredStopped
		return nil, nil
	})
	switch {
	case err != nil:
		s.withState(vmid, func(m *runtimeState) { m.grace = before })
	case sb.State == agentlab.SandboxStopped: // a later stop has a grace of its own
		s.withState(vmid, func(m *runtimeState) { m.grace = nil })
	case before == nil || *before != grace:
		s.loop.Interrupt(vmid)
	}
	return sb, err
}

// Destroy is Purge, except that a sandbox whose job has work that is not stored is
// kept for Limits.Salvage; its result has Salvage. A kept one does not change. On a
// full disk the error for such a sandbox has code no_space.
func (s *Service) Destroy(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil || sb.Salvage && sb.Desired != agentlab.DesiredDestroyed {
		return sb, err
	}
	work, err := s.hasWork(ctx, sb)
	switch {
	case err != nil:
		return agentlab.Sandbox{}, err
	case !work:
		return s.Purge(ctx, vmid)
	}
	return s.RequestChange(ctx, vmid, s.loop.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if !s.salvageable(*sb) {
			return nil, nil
		}
		return []agentlab.Event{s.keep(sb)}, nil
	})
}

// Purge requests that a sandbox is destroyed. It is allowed in every state,
// and on a full disk. Purging a destroyed sandbox succeeds. Codes:
// not_found, conflict if it belongs to another backend.
func (s *Service) Purge(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	sb, err := s.RequestChange(ctx, vmid, s.loop.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if sb.State != agentlab.SandboxDestroyed {
			sb.Desired = agentlab.DesiredDestroyed
		}
		return nil, nil
	})
	if !fullDisk(err) {
		return sb, err
	}
	if sb, err = s.Get(ctx, strconv.Itoa(vmid)); err != nil {
		return agentlab.Sandbox{}, err
	}
	s.destroyWithoutRow(sb)
	sb.Desired = agentlab.DesiredDestroyed
	return sb, nil
}

// RenewLease sets a lease to end ttl from now. Codes: not_found, invalid,
// conflict if the sandbox is already ending.
func (s *Service) RenewLease(ctx context.Context, vmid int, ttl time.Duration) (agentlab.Sandbox, error) {
	ttl, err := s.TTL(ttl, -1) // a zero ttl is an error here
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	return s.Change(ctx, vmid, s.loop.Wake, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if sb.Desired == agentlab.DesiredDestroyed || sb.State == agentlab.SandboxDestroyed {
			return nil, Conflict(*sb, "and its lease cannot be renewed", "create a new one: agentlab sandbox new")
		}
		sb.LeaseExpiresAt = s.clock().UTC().Add(ttl)
		return []agentlab.Event{leaseEvent(*sb, "renewed")}, nil
	})
}

// RequestChange is change for a request that needs the backend: code conflict if
// the sandbox belongs to another one.
func (s *Core) RequestChange(ctx context.Context, vmid int, wake func(int), fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error) {
	return s.Change(ctx, vmid, wake, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if err := s.Reachable(*sb); err != nil {
			return nil, err
		}
		return fn(sb)
	})
}

// Change changes what is requested of a sandbox and wakes the loop. A request
// that changes nothing never interrupts the step: it may be doing what is
// requested, such as to continue a guest whose saved memory is used up.
func (s *Core) Change(ctx context.Context, vmid int, wake func(int), fn func(*agentlab.Sandbox) ([]agentlab.Event, error)) (agentlab.Sandbox, error) {
	changed := false
	sb, err := s.Update(ctx, vmid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		before := *sb
		evs, err := fn(sb)
		if err == nil && before.Pooled() && sb.Desired != agentlab.DesiredDestroyed {
			err = Conflict(*sb, "and belongs to the warm pool", "create a sandbox, which may get it: agentlab sandbox new")
		}
		if err == nil && sb.Desired != before.Desired {
			evs = append(evs, desiredEvent(*sb))
		}
		changed = !sb.Equal(before)
		return evs, err
	})
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	if changed {
		wake(sb.VMID)
	} else {
		s.loop.Wake(sb.VMID)
	}
	return sb, nil
}

// Conflict returns an error with code conflict: the state of a sandbox does not allow what
// was requested. rest follows the state in the message.
func Conflict(sb agentlab.Sandbox, rest, hint string, args ...any) error {
	what := string(sb.State)
	if sb.Desired == agentlab.DesiredDestroyed && sb.State != agentlab.SandboxDestroyed {
		what += ", about to be destroyed,"
	}
	e := agentlab.Errorf(agentlab.CodeConflict, "sandbox %s (%d) is %s %s", sb.Name, sb.VMID, what, rest)
	if hint != "" {
		e = e.WithHint(hint, args...)
	}
	return e
}

// MarkRunning changes a READY sandbox to RUNNING: its job has started.
func (s *Service) MarkRunning(ctx context.Context, vmid int) error {
	_, err := s.Change(ctx, vmid, s.loop.Wake, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if sb.State != agentlab.SandboxReady || sb.Desired != agentlab.DesiredRunning {
			return nil, nil
		}
		sb.State = agentlab.SandboxRunning
		return []agentlab.Event{StateEvent(*sb, agentlab.SandboxReady)}, nil
	})
	return err
}

// Outcome is the result of the job of a sandbox.
type Outcome struct {
	Status agentlab.JobStatus
	Reason string
	TTL    time.Duration // a kept sandbox gets a lease of at least this long from now

	Unshipped bool // the job has, or may have, work that is not stored: without keepalive its disk is kept
	Prepared  bool // the job only prepared the sandbox, which becomes READY for its user
	Unused    bool // the job was cancelled before it started: the sandbox is destroyed even with keepalive
}

// Release ends the use of a sandbox by its job. With keepalive it continues as
// if created manually: COMPLETED after a job whose agent completed, else READY.
// That of a job that was cancelled before it started is destroyed.
// Otherwise it takes the state of its job's end, and is destroyed, or kept for work
// that is not stored. It may be called again. Code: not_found.
func (s *Service) Release(ctx context.Context, vmid int, o Outcome) (agentlab.Sandbox, error) {
	return s.Change(ctx, vmid, s.loop.Interrupt, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if sb.State == agentlab.SandboxDestroyed || sb.Desired == agentlab.DesiredDestroyed {
			return nil, nil
		}
		before := sb.State
		var evs []agentlab.Event
		switch {
		case sb.Salvage:
			return nil, nil
		case sb.Keepalive && !o.Unused:
			if sb.State != agentlab.SandboxRunning {
				return nil, nil
			}
			sb.State = agentlab.SandboxReady
			if o.Status == agentlab.JobCompleted && !o.Prepared {
				sb.State = agentlab.SandboxCompleted
			}
			if end := s.clock().UTC().Add(o.TTL); end.After(sb.LeaseExpiresAt) {
				sb.LeaseExpiresAt = end
			}
		default:
			if o.Unshipped && s.salvageable(*sb) {
				evs = append(evs, s.keep(sb))
			} else {
				sb.Desired = agentlab.DesiredDestroyed
			}
			end := map[agentlab.JobStatus]agentlab.SandboxState{
				agentlab.JobCompleted: agentlab.SandboxCompleted, agentlab.JobFailed: agentlab.SandboxFailed, agentlab.JobTimeout: agentlab.SandboxTimeout,
			}[o.Status]
			if sb.State.HasVM() && sb.State.CanBecome(end) {
				sb.State, sb.Reason = end, agentlab.Reason(o.Reason)
			}
		}
		if sb.State != before {
			evs = append(evs, StateEvent(*sb, before))
		}
		return evs, nil
	})
}
