package workspace

import (
	"context"
	"encoding/json"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// Select returns the workspace that a request for a sandbox wants. If it must be
// created, the result has its row, which is stored with that of the sandbox. Codes:
// not_found, exists, invalid, limit, conflict, unsupported.
func (s *Service) Select(ctx context.Context, sel agentlab.WorkspaceSelection) (agentlab.WorkspaceUse, error) {
	use := agentlab.WorkspaceUse{Quota: s.cfg.Limits.Quota, Wait: sel.Wait}
	if sel.Wait < 0 || sel.Wait > agentlab.MaxWorkspaceWait {
		return use, agentlab.Errorf(agentlab.CodeInvalid, "%s is not between 0 and %s", sel.Wait, agentlab.FormatTTL(agentlab.MaxWorkspaceWait)).WithField("workspace_wait_seconds")
	}
	if len(s.having()) == 0 {
		_, err := s.cfg.Fleet.Default().NeedVolumes()
		return use, err
	}
	v, err := s.Get(ctx, sel.Workspace)
	// CodeConflict: several deleted workspaces had the name, and no other one has it.
	missing := agentlab.CodeOf(err) == agentlab.CodeNotFound || agentlab.CodeOf(err) == agentlab.CodeConflict || err == nil && !v.State.Live() && !agentlab.IsWorkspaceID(sel.Workspace)
	switch {
	case missing && (sel.Create || sel.Ensure) && !agentlab.IsWorkspaceID(sel.Workspace):
		planned, err := s.plan(sel)
		use.Backend, use.ID, use.New, use.Created = planned.Backend, planned.ID, &planned, stateEvent(planned, nil)
		return use, err
	case err != nil:
		return use, err
	case sel.Create:
		return use, agentlab.Errorf(agentlab.CodeExists, "there is a workspace named %q", v.Name).WithField("workspace").
			WithHint("use it: --workspace %s", v.Name)
	}
	use.ID, use.Backend = v.ID, v.Backend
	if sel.Backend != "" && sel.Backend != v.Backend {
		return use, agentlab.Errorf(agentlab.CodeConflict, "workspace %s is on backend %s, and the request names %s", v.Name, v.Backend, sel.Backend).WithField("backend").
			WithHint("remove --backend, or use a workspace on backend %s", sel.Backend)
	}
	if err := s.reachable(v); err != nil {
		return use, err
	}
	_, err = s.volumes(v)
	return use, err
}

// Leases returns the leases of a workspace, or of all for "": the one of its owner
// first, then its queue.
func (s *Service) Leases(ctx context.Context, id string) ([]agentlab.WorkspaceLease, error) {
	return s.cfg.Leases.WorkspaceLeases(ctx, id)
}

// Release requests that a workspace is taken from the sandbox that has it: after its
// guest has unmounted it, or with force also if it does not. It returns the lease that
// ends then. A lease whose sandbox no longer exists ends at once, if the volume is not
// attached. Codes: not_found; conflict if no sandbox has the workspace.
func (s *Service) Release(ctx context.Context, idOrName string, force bool) (agentlab.WorkspaceLease, error) {
	none := agentlab.WorkspaceLease{}
	v, err := s.getReachable(ctx, idOrName)
	if err != nil {
		return none, err
	}
	l, owned, err := s.owner(ctx, v)
	if err != nil {
		return none, err
	}
	if !owned {
		return none, agentlab.Errorf(agentlab.CodeConflict, "no sandbox has workspace %s", v.Name)
	}
	return s.release(ctx, v, l, force)
}

// ReleaseTo is Release for the sandbox with a UID, which waits for the workspace. Nothing
// changes if that sandbox has it already, or no one.
func (s *Service) ReleaseTo(ctx context.Context, idOrName, uid string, force bool) error {
	v, err := s.getReachable(ctx, idOrName)
	if err != nil {
		return err
	}
	l, owned, err := s.owner(ctx, v)
	if err != nil || !owned || l.UID == uid {
		return err
	}
	_, err = s.release(ctx, v, l, force)
	return err
}

func (s *Service) release(ctx context.Context, v agentlab.Workspace, l agentlab.WorkspaceLease, force bool) (agentlab.WorkspaceLease, error) {
	if stale, err := s.endStale(ctx, v, l); stale || err != nil {
		return l, err
	}
	if err := s.mayDetach(ctx, v, l); err != nil {
		return agentlab.WorkspaceLease{}, err
	}
	return s.cfg.Leases.UpdateWorkspaceLease(ctx, l.Nonce, func(l *agentlab.WorkspaceLease) []agentlab.Event {
		if l.Release == agentlab.ReleaseForced || l.Release == agentlab.ReleaseClean && !force {
			return nil
		}
		if l.Release, l.Reason = agentlab.ReleaseClean, ""; force {
			l.Release = agentlab.ReleaseForced
		}
		e := agentlab.NewEvent(agentlab.EventWorkspaceLease, map[string]any{"workspace": v.ID, "name": v.Name, "lease": l.Number, "release": l.Release},
			"workspace %s is being detached", v.Name)
		e.SandboxVMID = l.VMID
		return []agentlab.Event{e}
	})
}

// mayDetach returns an error if the backend cannot take a workspace from the VM of its
// sandbox now. The end of a job that needs the workspace powers its VM off.
func (s *Service) mayDetach(ctx context.Context, v agentlab.Workspace, l agentlab.WorkspaceLease) error {
	if s.cfg.Fleet.Of(v.Backend).Can().VolumeHotplug {
		return nil
	}
	sb, err := s.cfg.Leases.Sandbox(ctx, l.VMID)
	if err != nil || !sb.State.HasVM() || sb.JobID != "" && sb.State.CanBecome(agentlab.SandboxFailed) && sb.State != agentlab.SandboxCompleted {
		return err
	}
	return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s is %s, and backend %s detaches workspaces from stopped sandboxes only", sb.Name, sb.State, sb.Backend).
		WithHint("stop it first: agentlab sandbox stop %s; then: agentlab workspace detach %s", sb.Name, v.Name)
}

// endStale ends a lease whose sandbox does not exist, if the backend has proven that
// the volume is not attached.
func (s *Service) endStale(ctx context.Context, v agentlab.Workspace, l agentlab.WorkspaceLease) (stale bool, err error) {
	sb, err := s.cfg.Leases.Sandbox(ctx, l.VMID)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
	case err != nil:
		return false, err
	case sb.UID == l.UID && !sb.State.Final():
		return false, nil
	}
	d, err := s.volumes(v)
	if err != nil {
		return false, err
	}
	vol, err := d.InspectVolume(ctx, backend.VolumeRefOf(v))
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
	case err != nil:
		return false, err
	case vol.AttachedTo != backend.Ref{}:
		return false, agentlab.Errorf(agentlab.CodeConflict, "workspace %s is attached to a sandbox that is not in the database", v.Name).
			WithHint("see 'agentlab workspace check %s'", v.Name)
	}
	s.log.Warn("the lease of a sandbox that does not exist is ended", "workspace", v.ID, "vmid", l.VMID)
	return true, s.cfg.Leases.ReleaseWorkspace(ctx, l.Nonce)
}

// endStaleLeases ends the leases of all sandboxes that do not exist.
func (s *Service) endStaleLeases(ctx context.Context, b *fleet.Backend) {
	leases, err := s.cfg.Leases.WorkspaceLeases(ctx, "")
	for _, l := range leases {
		if err != nil {
			break
		}
		var v agentlab.Workspace
		if v, err = s.cfg.Store.Workspace(ctx, l.WorkspaceID); err == nil && v.Backend == b.Name() {
			if _, serr := s.endStale(ctx, v, l); serr != nil && ctx.Err() == nil {
				s.log.Warn("a lease of a workspace cannot be checked", "workspace", v.ID, "err", serr)
			}
		}
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("the leases of workspaces cannot be checked", "err", err)
	}
}

// committed runs the steps of workspaces that have changed, or were created with a
// sandbox, and of the sandboxes that have or want them.
func (s *Service) committed(c agentlab.Commit) {
	for _, sb := range c.Sandboxes {
		s.sandboxChanged(sb)
	}
	for _, e := range c.Events {
		lease := e.Kind == agentlab.EventWorkspaceLease // acquired, or to be released
		if !lease && e.Kind != agentlab.EventWorkspaceState {
			continue
		}
		if lease && s.core != nil {
			s.core.Wake(e.SandboxVMID)
		}
		var data struct {
			Workspace string             `json:"workspace"`
			Step      agentlab.LeaseStep `json:"step"`
		}
		if json.Unmarshal([]byte(e.Data), &data) != nil || data.Workspace == "" {
			continue
		}
		if !lease {
			s.loop.Wake(data.Workspace)
		}
		// The sandboxes that wait for a workspace name the one that has it.
		if !lease || data.Step == agentlab.LeaseStepAcquired {
			s.wakeWaiting(data.Workspace)
		}
	}
}
