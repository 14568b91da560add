package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// auditLoop compares a backend with the rows at intervals, to find VMs that
// crashed and objects that a crash of the daemon left behind.
func (s *Service) auditLoop(ctx context.Context, b *fleet.Backend) {
	for {
		for _, vmid := range s.leasesDue(b.Name()) {
			s.loop.Wake(vmid)
		}
		if err := s.audit(ctx, b); err != nil && ctx.Err() == nil {
			s.log.Warn("a backend could not be compared with the database", "backend", b.Name(), "err", err)
		}
		s.mu.Lock()
		pause := max(s.lim.AuditEvery, time.Duration(len(s.states))*time.Second/auditRate)
		s.mu.Unlock()
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// auditRate is how many sandboxes are compared in a second, if there are thousands.
const auditRate = 200

// leasesDue returns the sandboxes of a backend whose lease has ended, or is about to and
// needs a warning: their steps are late if the clock was changed or the host has slept.
func (s *Service) leasesDue(name string) (due []int) {
	now := s.clock()
	s.mu.Lock()
	defer s.mu.Unlock()
	for vmid, m := range s.states {
		if m.backend != name || m.leaseEnd.IsZero() {
			continue
		}
		if left := m.leaseEnd.Sub(now); left <= 0 || m.mustWarn(left) {
			due = append(due, vmid)
		}
	}
	return due
}

// audit compares a backend with the rows of its sandboxes. It changes no row itself:
// it wakes the loop of a sandbox whose state differs.
func (s *Service) audit(ctx context.Context, b *fleet.Backend) error {
	all, err := b.List(ctx)
	if err != nil {
		return err
	}
	found := make(map[string]*backend.Instance, len(all))
	for i := range all {
		found[all[i].Ref.UID] = &all[i]
	}
	s.mu.Lock()
	var suspects, paused []int
	var missing backend.Instance
	for vmid, m := range s.states {
		if m.backend != b.Name() {
			continue
		}
		in, there := found[m.uid]
		if !there {
			in = &missing
		}
		delete(found, m.uid)
		if m.inspected && !m.needsInspect && stateMismatch(m.state, in.Power, there) {
			m.needsInspect = true
			suspects = append(suspects, vmid)
		}
		why := ""
		if in.Power == backend.PowerRunning {
			why = in.Reason
		}
		if (m.paused == "") != (why == "") {
			paused = append(paused, vmid)
		}
		m.paused = why
	}
	s.mu.Unlock()
	for _, vmid := range suspects {
		s.loop.Wake(vmid)
	}
	for _, vmid := range paused {
		if err := s.reportPaused(ctx, vmid); err != nil {
			s.log.Warn("an event was not written", "vmid", vmid, "err", err)
		}
	}
	s.dropResolvedOrphans(b, found)
	for _, in := range found {
		if err := s.handleOrphan(ctx, fleet.Instance{Instance: *in, Backend: b.Name()}); err != nil {
			return err
		}
	}
	return nil
}

// reportPaused writes an event when the host has paused or resumed a guest.
func (s *Service) reportPaused(ctx context.Context, vmid int) error {
	why := s.Paused()[vmid]
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return err
	}
	text := "continues to run"
	if why != "" {
		text = "is paused: " + s.RedactReason(ctx, sb, why)
	}
	s.log.Warn("the guest of a sandbox "+text, "vmid", vmid)
	return s.cfg.Store.AppendEvents(ctx, NewEvent(agentlab.EventSandboxState, sb, map[string]any{"state": sb.State, "paused": why != ""}, "the guest of sandbox %s %s", sb.Name, text))
}

// Paused returns the sandboxes whose guests the host had paused at the last
// audit, with the reason.
func (s *Service) Paused() map[int]string {
	return s.collect(func(m *runtimeState) string { return m.paused })
}

// Unheard reports whether the guest of a sandbox cannot report now: it is paused, or the
// daemon does not have its backend, or the backend does not answer.
func (s *Service) Unheard(vmid int) (unheard bool) {
	s.withState(vmid, func(m *runtimeState) {
		b := s.cfg.Fleet.Of(m.backend)
		unheard = m.paused != "" || b.Missing() != nil || b.Down() != nil
	})
	return unheard
}

// collect returns what get returns for each sandbox, unless it is "".
func (s *Service) collect(get func(*runtimeState) string) map[int]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[int]string{}
	for vmid, m := range s.states {
		if text := get(m); text != "" {
			out[vmid] = text
		}
	}
	return out
}

// Findings reports the guests that the host has paused, the sandboxes of other
// backends, and the orphans that the last audit found.
func (s *Service) Findings() (out []backend.Finding) {
	out = s.findElsewhere()
	if paused := s.Paused(); len(paused) > 0 {
		first := slices.Min(slices.Collect(maps.Keys(paused)))
		out = append(out, backend.Finding{
			Name: "paused guests", Level: backend.LevelWarn,
			Detail: fmt.Sprintf("%d guests are paused, sandbox %d among them: %s", len(paused), first, paused[first]),
			Remedy: "destroy sandboxes that are not needed, or free disk space; the guests then resume automatically",
		})
	}
	if lost := s.Orphaned(); len(lost) > 0 {
		first := slices.MinFunc(lost, func(a, b fleet.Instance) int { return cmp.Compare(a.Number(), b.Number()) })
		out = append(out, backend.Finding{
			Name: "orphans", Level: backend.LevelWarn,
			Detail: fmt.Sprintf("the backend has %d virtual machines with AgentLab's mark that belong to no sandbox, for example VMID %d (%s)", len(lost), first.Number(), first.Ref.UID),
			Remedy: "list them: agentlab sandbox list --orphans; destroy one: agentlab sandbox destroy --orphan UID",
		})
	}
	return out
}

// stateMismatch reports whether the VM of a sandbox in that state should have
// another power state.
func stateMismatch(state agentlab.SandboxState, power backend.PowerState, there bool) bool {
	switch {
	case state == agentlab.SandboxBooting:
		return false // its step inspects the VM itself
	case state == agentlab.SandboxSuspended:
		return !there || power != backend.PowerSuspended
	case state == agentlab.SandboxPooled: // suspended, if the backend can
		return !there || power != backend.PowerSuspended && power != backend.PowerRunning
	case state.HasVM():
		return !there || power != backend.PowerRunning
	case state == agentlab.SandboxFailed, state == agentlab.SandboxStopped, state == agentlab.SandboxTimeout:
		return there && power == backend.PowerRunning
	}
	return false
}

// handleOrphan handles a VM with our mark that belongs to no existing sandbox.
// If a row proves that it is ours, it is destroyed; otherwise it is reported
// once and not touched.
func (s *Service) handleOrphan(ctx context.Context, in fleet.Instance) error {
	sb, ours, err := s.Owner(ctx, in.Ref.UID)
	switch {
	case err != nil:
		return err
	case ours && sb.State == agentlab.SandboxDestroyed:
		s.log.Warn("destroying the rest of a destroyed sandbox", "vmid", sb.VMID)
		ctx, cancel := context.WithTimeout(ctx, destroyTimeout)
		defer cancel()
		return s.cfg.Fleet.Of(in.Backend).Destroy(ctx, in.Ref)
	case ours:
		s.track(sb) // written by another process, or during this audit
		s.loop.Wake(sb.VMID)
		return nil
	}
	s.mu.Lock()
	_, reported := s.knownOrphans[in.Ref.UID]
	s.knownOrphans[in.Ref.UID] = in
	s.mu.Unlock()
	if reported {
		return nil
	}
	s.log.Warn("the backend has a sandbox that is not in the database; it is not changed", "vmid", in.Number(), "uid", in.Ref.UID)
	return s.cfg.Store.AppendEvents(ctx, driftEvent(in, false,
		"the backend has %s, which is not in the database; it is not changed; see 'agentlab sandbox list --orphans'"))
}

// Orphans returns the current VMs of all backends that have AgentLab's mark and belong to
// no row. missing is as of fleet.Gather.
func (s *Service) Orphans(ctx context.Context) (out []fleet.Instance, missing []error, err error) {
	// The backends first: a row is written before its VM is created, so the row of every VM
	// in this list can be read afterwards.
	all, missing, err := fleet.Gather(ctx, s.cfg.Fleet.All(), func(ctx context.Context, b *fleet.Backend) (out []fleet.Instance, err error) {
		list, err := b.List(ctx)
		for _, in := range list {
			out = append(out, fleet.Instance{Instance: in, Backend: b.Name()})
		}
		return out, err
	})
	if err != nil {
		return nil, nil, err
	}
	for _, in := range all {
		_, ok, err := s.Owner(ctx, in.Ref.UID)
		if err != nil {
			return nil, nil, err
		}
		if !ok {
			out = append(out, in)
		}
	}
	return out, missing, nil
}

// Owner returns the row that a mark belongs to, even if it is DESTROYED. After
// an error it is not known whether there is one.
func (s *Core) Owner(ctx context.Context, uid string) (agentlab.Sandbox, bool, error) {
	sb, err := s.cfg.Store.SandboxByUID(ctx, uid)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return agentlab.Sandbox{}, false, nil
	}
	return sb, err == nil, err
}

// DestroyOrphan destroys an orphan and returns what it was. id is its UID, or
// its VMID if only one orphan has it. A VM with a row or without AgentLab's
// mark is never changed. Codes: not_found, conflict.
func (s *Service) DestroyOrphan(ctx context.Context, id string) (fleet.Instance, error) {
	in, err := s.findOrphan(ctx, id)
	if err != nil {
		return fleet.Instance{}, err
	}
	// It continues if the caller does not wait, because a partial destruction
	// would also leave an orphan.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyTimeout)
	defer cancel()
	unlock, err := s.orphans.Lock(ctx, in.Ref.UID)
	if err != nil {
		return fleet.Instance{}, agentlab.Errorf(agentlab.CodeBusy, "orphan %s is being destroyed: %w", id, err)
	}
	defer unlock()
	if _, ok, err := s.Owner(ctx, in.Ref.UID); err != nil || ok {
		if err == nil {
			err = agentlab.Errorf(agentlab.CodeConflict, "%d (%s) is now in the database and is not destroyed", in.Number(), in.Ref.UID)
		}
		return fleet.Instance{}, err
	}
	b := s.cfg.Fleet.Of(in.Backend)
	if err := b.Destroy(ctx, in.Ref); err != nil {
		return fleet.Instance{}, err
	}
	switch _, err := b.Inspect(ctx, in.Ref); {
	case err == nil:
		return fleet.Instance{}, agentlab.Errorf(agentlab.CodeUnavailable, "the backend still has %d (%s) after its destruction", in.Number(), in.Ref.UID).
			WithHint("try again; see 'agentlab daemon logs'")
	case agentlab.CodeOf(err) != agentlab.CodeNotFound:
		return fleet.Instance{}, err
	}
	s.mu.Lock()
	delete(s.knownOrphans, in.Ref.UID)
	s.mu.Unlock()
	s.log.Warn("an orphan was destroyed by request", "vmid", in.Number(), "uid", in.Ref.UID)
	if err := s.cfg.Store.AppendEvents(ctx, driftEvent(in, true, "%s, which was not in the database, was destroyed by request")); err != nil {
		s.log.Error("an event was not written", "vmid", in.Number(), "err", err)
	}
	return in, nil
}

func (s *Service) findOrphan(ctx context.Context, id string) (fleet.Instance, error) {
	list, missing, err := s.Orphans(ctx)
	if err != nil {
		return fleet.Instance{}, err
	}
	var found []fleet.Instance
	for _, in := range list {
		if in.Ref.UID == id {
			return in, nil
		}
		if strconv.Itoa(in.Number()) == id {
			found = append(found, in)
		}
	}
	if len(missing) > 0 { // another one can have the number
		return fleet.Instance{}, missing[0]
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return fleet.Instance{}, agentlab.Errorf(agentlab.CodeConflict, "%d orphans have the number %s", len(found), id).
			WithHint("name one by its UID: agentlab sandbox list --orphans")
	}
	if sb, err := s.Get(ctx, id); err == nil && sb.State != agentlab.SandboxDestroyed {
		return fleet.Instance{}, agentlab.Errorf(agentlab.CodeNotFound, "%s is not an orphan: it is the sandbox %s", id, sb.Name).
			WithHint("destroy it with: agentlab sandbox destroy %d", sb.VMID)
	}
	return fleet.Instance{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no orphan %s", id).
		WithHint("list them: agentlab sandbox list --orphans")
}

// Orphaned returns the orphans that the last audit found, in no particular
// order.
func (s *Service) Orphaned() []fleet.Instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.knownOrphans))
}

// dropResolvedOrphans removes the orphans of a backend that were not found again.
func (s *Service) dropResolvedOrphans(b *fleet.Backend, found map[string]*backend.Instance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.knownOrphans, func(uid string, o fleet.Instance) bool {
		_, ok := found[uid]
		return !ok && o.Backend == b.Name()
	})
}

// driftEvent returns an event about an orphan. format has a %s for its name:
// its number, or its UID if it has none.
func driftEvent(in fleet.Instance, destroyed bool, format string) agentlab.Event {
	name := "the VM with the UID " + in.Ref.UID
	if n := in.Number(); n != 0 {
		name = "VM " + strconv.Itoa(n)
	}
	return agentlab.NewEvent(agentlab.EventDrift, map[string]any{"uid": in.Ref.UID, "destroyed": destroyed}, format, name).About(in.VMID, "")
}
