package workspace_test

import (
	"context"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A copy takes the place of a workspace with its name and its session, but only as long as
// the sandbox that has copied the files has the workspace, and no other one waits for it.
func TestReplace(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t, ctx := w.T, context.Background()
		s := sandboxtest.Must(w.Sessions.Create(ctx, agentlab.SessionRequest{Name: "data"}))(t)
		by := sandboxtest.Must(w.Workspaces.Create(ctx, agentlab.WorkspaceSelection{Workspace: "copy", SizeGB: 1}))(t)
		w.UntilWorkspace("data", agentlab.WorkspaceReady)
		w.UntilWorkspace("copy", agentlab.WorkspaceReady)
		replace := func(vmid int) (agentlab.Workspace, error) { return w.Workspaces.Replace(ctx, "data", by.ID, vmid) }

		user := w.Until(w.Create(sandboxtest.OnWorkspace("data", 0)).VMID, agentlab.SandboxReady)
		_, err := replace(user.VMID) // it may write
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		w.Gone(user.VMID)
		own := sandboxtest.Must(w.Sessions.Resume(ctx, "data", 0, nil))(t)
		w.Until(own.VMID, agentlab.SandboxReady)
		sandboxtest.Must(w.Workspaces.Release(ctx, "data", false))(t)
		w.UntilIt(own.VMID, func(sb agentlab.Sandbox) bool { return sb.Workspace == "" })
		old := w.WorkspaceOf("data")

		files := sandboxtest.OnWorkspace("data", 0)
		files.Maintenance = agentlab.MaintenanceFiles
		sb := w.Until(w.Create(files).VMID, agentlab.SandboxReady)
		waits := w.Create(sandboxtest.OnWorkspace("data", time.Hour))
		_, err = replace(sb.VMID)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		w.Gone(waits.VMID)
		_, err = replace(sb.VMID) // the session would continue without its workspace
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		w.Gone(own.VMID)
		if now := w.WorkspaceOf("data"); now != old {
			t.Errorf("after refused calls the workspace is %+v, not %+v", now, old)
		}

		got := sandboxtest.Must(replace(sb.VMID))(t)
		if got.ID != by.ID || got.Name != "data" || sandboxtest.Must(w.Sessions.Get(ctx, s.ID))(t).WorkspaceID != by.ID {
			t.Errorf("%+v", got)
		}
		if now := sandboxtest.Must(w.Workspaces.Get(ctx, old.ID))(t); now.State != agentlab.WorkspaceTrashed || now.TrashedAt.IsZero() {
			t.Errorf("the other one is %+v", now)
		}
		w.Gone(sb.VMID)
		_, err = replace(sb.VMID)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		back := sandboxtest.Must(w.Workspaces.Undelete(ctx, old.ID, "before"))(t)
		if back.State != agentlab.WorkspaceReady {
			t.Errorf("%+v", back)
		}
	})
}
