package session

import (
	"context"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// rebindWait is how long a sandbox waits for a workspace that another one is about to
// give back.
const rebindWait = 10 * time.Minute

// Rebind creates a sandbox that gets a workspace, and requests that the workspace is taken
// from the sandbox that has it: after its guest has unmounted it, or with force also if it
// does not. The new sandbox has its place in the queue before the other one loses the
// workspace; if that cannot be requested, the new one is destroyed, and nothing has
// changed. A call with the name of a sandbox that has the workspace or waits for it, such
// as one that was interrupted, continues with that sandbox. Codes are those of
// sandbox.Service.Create and workspace.Service.Release.
func (s *Service) Rebind(ctx context.Context, workspace string, r agentlab.SandboxRequest, force bool) (agentlab.Sandbox, error) {
	v, err := s.cfg.Workspaces.Get(ctx, workspace)
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	r.Workspace = &agentlab.WorkspaceSelection{Workspace: v.ID, Wait: rebindWait}
	sb, err := s.cfg.Sandboxes.Create(ctx, r)
	again := false
	if agentlab.CodeOf(err) == agentlab.CodeExists && r.Name != "" {
		if sb, again, err = s.rebound(ctx, v, r.Name, err); err != nil {
			return agentlab.Sandbox{}, err
		}
	}
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	err = s.cfg.Workspaces.ReleaseTo(ctx, v.ID, sb.UID, force)
	if err != nil && !again {
		dctx := context.WithoutCancel(ctx) // the caller may have left
		if _, derr := s.cfg.Sandboxes.Destroy(dctx, sb.VMID); derr != nil {
			return agentlab.Sandbox{}, agentlab.Errorf(agentlab.CodeOf(err), "%w; the new sandbox %s was not destroyed: %v", err, sb.Name, derr).WithHint("agentlab sandbox destroy %s", sb.Name)
		}
	}
	return sb, err
}

// rebound returns the sandbox with a name, if it has the workspace or waits for it;
// otherwise exists.
func (s *Service) rebound(ctx context.Context, v agentlab.Workspace, name string, exists error) (sb agentlab.Sandbox, ok bool, err error) {
	sb, err = s.cfg.Sandboxes.Get(ctx, name)
	if err != nil {
		return sb, false, err
	}
	leases, err := s.cfg.Store.WorkspaceLeases(ctx, v.ID)
	if err != nil {
		return sb, false, err
	}
	if !slices.ContainsFunc(leases, func(l agentlab.WorkspaceLease) bool { return l.UID == sb.UID }) {
		return sb, false, exists
	}
	return sb, true, nil
}
