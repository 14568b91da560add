package sandbox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// auditLoop compares the backend with the rows now and then, so that a VM
// that crashes, and what a crash of ours left behind, is found.
func (s *Service) auditLoop(ctx context.Context) {
	t := time.NewTicker(s.lim.AuditEvery)
	defer t.Stop()
	for {
		if err := s.audit(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("the backend could not be compared with the rows", "err", err)
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// audit compares once. It changes no row itself: a sandbox that is not as it
// should be is looked at by its own next step.
func (s *Service) audit(ctx context.Context) error {
	all, err := s.cfg.Driver.List(ctx)
	if err != nil {
		return err
	}
	found := make(map[string]backend.Instance, len(all))
	for _, in := range all {
		found[in.Ref.UID] = in
	}
	s.mu.Lock()
	var suspects, paused []int
	for vmid, m := range s.memory {
		in, there := found[m.uid]
		delete(found, m.uid)
		if m.inspected && !m.suspect && differs(m.state, in.Power, there) {
			m.suspect = true
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
		if err := s.tellPaused(ctx, vmid); err != nil {
			s.log.Warn("an event was not written", "vmid", vmid, "err", err)
		}
	}
	s.keepDrift(found)
	for _, in := range found {
		if err := s.orphan(ctx, in); err != nil {
			return err
		}
	}
	return nil
}

// tellPaused writes an event when the host has paused a guest, or lets it go on.
func (s *Service) tellPaused(ctx context.Context, vmid int) error {
	why := s.Paused()[vmid]
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return err
	}
	text := "goes on"
	if why != "" {
		text = "is paused: " + s.told(ctx, sb, why)
	}
	s.log.Warn("the guest of a sandbox "+text, "vmid", vmid)
	return s.cfg.Store.AppendEvents(ctx, event(agentlab.EventSandboxState, sb, map[string]any{"state": sb.State, "paused": why != ""}, "the guest of sandbox %s %s", sb.Name, text))
}

// Paused returns the sandboxes whose guests the host has paused, with the
// reason, as the last audit found them.
func (s *Service) Paused() map[int]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[int]string{}
	for vmid, m := range s.memory {
		if m.paused != "" {
			out[vmid] = m.paused
		}
	}
	return out
}

// differs tells whether a sandbox in that state should look otherwise.
func differs(state agentlab.SandboxState, power backend.Power, there bool) bool {
	switch {
	case state == agentlab.SandboxBooting:
		return false // its step looks itself
	case state == agentlab.SandboxSuspended:
		return !there || power != backend.PowerSuspended
	case state.HasVM():
		return !there || power != backend.PowerRunning
	case state == agentlab.SandboxFailed, state == agentlab.SandboxStopped, state == agentlab.SandboxTimeout:
		return there && power == backend.PowerRunning
	}
	return false
}

// orphan deals with what bears our mark and belongs to no sandbox that is
// not destroyed. What a row proves to be ours is destroyed; anything else is
// told of once and left alone.
func (s *Service) orphan(ctx context.Context, in backend.Instance) error {
	sb, ours, err := s.owner(ctx, in.Ref.UID)
	switch {
	case err != nil:
		return err
	case ours && sb.State == agentlab.SandboxDestroyed:
		s.log.Warn("destroying what is left of a destroyed sandbox", "vmid", sb.VMID)
		ctx, cancel := context.WithTimeout(ctx, destroyTimeout)
		defer cancel()
		return s.cfg.Driver.Destroy(ctx, in.Ref)
	case ours:
		s.remember(sb) // written by another process, or while this one looked
		s.loop.Wake(sb.VMID)
		return nil
	}
	s.mu.Lock()
	_, told := s.drift[in.Ref.UID]
	s.drift[in.Ref.UID] = in
	s.mu.Unlock()
	if told {
		return nil
	}
	s.log.Warn("the backend holds a sandbox that no row knows; it is left alone", "vmid", in.VMID, "uid", in.Ref.UID)
	return s.cfg.Store.AppendEvents(ctx, driftEvent(in, false,
		"the backend holds a sandbox with this number that no row knows; it is left alone; see 'agentlab sandbox list --orphans'"))
}
