package sandbox

import (
	"context"
	"maps"
	"slices"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Orphans returns what the backend holds that bears our mark and belongs to no
// row, as it is now.
func (s *Service) Orphans(ctx context.Context) ([]backend.Instance, error) {
	// The backend first: a row is written before its VM is made, so the row of
	// whatever is listed here can be read afterwards.
	all, err := s.cfg.Driver.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []backend.Instance
	for _, in := range all {
		_, ok, err := s.owner(ctx, in.Ref.UID)
		if err != nil {
			return nil, err
		}
		if !ok {
			out = append(out, in)
		}
	}
	return out, nil
}

// owner returns the row that a mark belongs to, also when that is DESTROYED.
// An error says nothing about whether there is one.
func (s *Service) owner(ctx context.Context, uid string) (agentlab.Sandbox, bool, error) {
	sb, err := s.cfg.Store.SandboxByUID(ctx, uid)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return agentlab.Sandbox{}, false, nil
	}
	return sb, err == nil, err
}

// DestroyOrphan destroys an orphan, named by its UID or, where only one has
// it, its VMID, and returns what it was. What has a row, and what does not bear
// our mark, is never touched. Codes: not_found, conflict.
func (s *Service) DestroyOrphan(ctx context.Context, id string) (backend.Instance, error) {
	in, err := s.findOrphan(ctx, id)
	if err != nil {
		return backend.Instance{}, err
	}
	// It goes on when the caller does not wait: half of it would be an orphan,
	// too.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyTimeout)
	defer cancel()
	unlock, err := s.orphans.Lock(ctx, in.Ref.UID)
	if err != nil {
		return backend.Instance{}, agentlab.Errorf(agentlab.CodeBusy, "orphan %s is being destroyed: %w", id, err)
	}
	defer unlock()
	if _, ok, err := s.owner(ctx, in.Ref.UID); err != nil || ok {
		if err == nil {
			err = agentlab.Errorf(agentlab.CodeConflict, "%d (%s) has a row by now; it is left alone", in.VMID, in.Ref.UID)
		}
		return backend.Instance{}, err
	}
	if err := s.cfg.Driver.Destroy(ctx, in.Ref); err != nil {
		return backend.Instance{}, err
	}
	switch _, err := s.cfg.Driver.Inspect(ctx, in.Ref); {
	case err == nil:
		return backend.Instance{}, agentlab.Errorf(agentlab.CodeUnavailable, "the backend still holds %d (%s) after its destruction", in.VMID, in.Ref.UID).
			WithHint("try again; see 'agentlab daemon logs'")
	case agentlab.CodeOf(err) != agentlab.CodeNotFound:
		return backend.Instance{}, err
	}
	s.mu.Lock()
	delete(s.drift, in.Ref.UID)
	s.mu.Unlock()
	s.log.Warn("an orphan was destroyed by request", "vmid", in.VMID, "uid", in.Ref.UID)
	if err := s.cfg.Store.AppendEvents(ctx, driftEvent(in, true, "a sandbox with this number that no row knew was destroyed by request")); err != nil {
		s.log.Error("an event was not written", "vmid", in.VMID, "err", err)
	}
	return in, nil
}

func (s *Service) findOrphan(ctx context.Context, id string) (backend.Instance, error) {
	list, err := s.Orphans(ctx)
	if err != nil {
		return backend.Instance{}, err
	}
	var found []backend.Instance
	for _, in := range list {
		if in.Ref.UID == id || strconv.Itoa(in.VMID) == id {
			found = append(found, in)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return backend.Instance{}, agentlab.Errorf(agentlab.CodeConflict, "%d orphans have the number %s", len(found), id).
			WithHint("name one by its UID: agentlab sandbox list --orphans")
	}
	if sb, err := s.Get(ctx, id); err == nil && sb.State != agentlab.SandboxDestroyed {
		return backend.Instance{}, agentlab.Errorf(agentlab.CodeNotFound, "%s is no orphan: it is the sandbox %s", id, sb.Name).
			WithHint("agentlab sandbox destroy %d", sb.VMID)
	}
	return backend.Instance{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no orphan %s", id).
		WithHint("agentlab sandbox list --orphans")
}

// Orphaned returns the orphans that the last audit found, in no order.
func (s *Service) Orphaned() []backend.Instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.drift))
}

// keepDrift forgets the orphans that are not among what was found.
func (s *Service) keepDrift(found map[string]backend.Instance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.drift, func(uid string, _ backend.Instance) bool {
		_, ok := found[uid]
		return !ok
	})
}

func driftEvent(in backend.Instance, destroyed bool, message string) agentlab.Event {
	return agentlab.NewEvent(agentlab.EventDrift, map[string]any{"uid": in.Ref.UID, "destroyed": destroyed}, "%s", message).About(in.VMID, "")
}
