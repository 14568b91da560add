package sandbox_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// Seed 001 §4: what a session's sandbox wrote is there in the next one; a suspended
// sandbox continues; a copy is independent; a job is in the history.
func TestSession(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t, ctx := w.T, context.Background()
		s := sandboxtest.Must(w.Sessions.Create(ctx, agentlab.SessionRequest{Branch: "feature/Login", Workspace: agentlab.WorkspaceSelection{SizeGB: 2}}))(t)
		if s.Name != "feature-login" || s.Profile != "plain" {
			t.Errorf("%+v", s)
		}
		if again := sandboxtest.Must(w.Sessions.Create(ctx, agentlab.SessionRequest{Branch: "feature/Login", IfMissing: true}))(t); again != s {
			t.Errorf("%+v, not %+v", again, s)
		}
		first := sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.Until(first.VMID, agentlab.SandboxReady)
		w.Sh(first, "echo hello > /work/note")
		if again := sandboxtest.Must(w.Sessions.Resume(ctx, s.ID, 0, nil))(t); again.VMID != first.VMID {
			t.Errorf("a second sandbox: %+v", again)
		}
		sandboxtest.WantCode(t, w.Sessions.Delete(ctx, s.Name, false), agentlab.CodeConflict)
		w.Restart()

		sandboxtest.Must(w.Sessions.Stop(ctx, s.Name, true))(t)
		w.UntilIt(first.VMID, func(sb agentlab.Sandbox) bool { return sb.OnDisk })
		if sb := sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t); sb.VMID != first.VMID {
			t.Errorf("another sandbox continues: %+v", sb)
		}
		w.Until(first.VMID, agentlab.SandboxReady)
		sandboxtest.Must(w.Sessions.Stop(ctx, s.Name, false))(t)
		w.Until(first.VMID, agentlab.SandboxDestroyed)

		second := sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.Until(second.VMID, agentlab.SandboxReady)
		if got := w.Sh(second, "cat /work/note"); second.VMID == first.VMID || got != "hello" {
			t.Errorf("the note is %q", got)
		}
		_, err := w.Sessions.Fork(ctx, s.Name, "copy", "")
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		_, err = w.Workspaces.Delete(ctx, s.WorkspaceID, false)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		w.Gone(second.VMID)

		other := sandboxtest.Must(w.Sessions.Fork(ctx, s.Name, "copy", ""))(t)
		w.UntilWorkspace("copy", agentlab.WorkspaceReady)
		third := sandboxtest.Must(w.Sessions.Resume(ctx, other.Name, 0, nil))(t)
		w.Until(third.VMID, agentlab.SandboxReady)
		if got := w.Sh(third, "cat /work/note"); got != "hello" {
			t.Errorf("the note of the copy is %q", got)
		}
		history := sandboxtest.Must(w.Sessions.History(ctx, s))(t)
		if len(history) != 2 || history[0].UID != second.UID || history[1].UID != first.UID {
			t.Errorf("%+v", history)
		}
		r := sandboxtest.Must(w.Sessions.ForJob(ctx, s.Name, agentlab.JobRequest{}))(t)
		if r.Session != s.ID || r.Branch != "feature/Login" || r.Workspace.Workspace != s.WorkspaceID || r.Profile != "plain" {
			t.Errorf("%+v", r)
		}

		sandboxtest.Must(w.Sessions.Rename(ctx, s.Name, "login"))(t)
		_, err = w.Sessions.Rename(ctx, "login", "copy")
		sandboxtest.WantCode(t, err, agentlab.CodeExists)
		if err := w.Sessions.Delete(ctx, "login", false); err != nil {
			t.Fatal(err)
		}
		var actions []string
		for _, e := range sandboxtest.Must(w.Store.Events(ctx, agentlab.EventFilter{Kinds: []string{agentlab.EventSession}, Limit: 100}))(t) {
			if strings.Contains(e.Data, s.ID) {
				actions = append(actions, strings.TrimPrefix(e.Message[strings.LastIndex(e.Message, " "):], " "))
			}
		}
		if got := strings.Join(actions, " "); got != "created sandbox suspended resumed stopped sandbox renamed deleted" {
			t.Errorf("actions: %s", got)
		}
		if v := w.WorkspaceOf(s.WorkspaceID); v.State != agentlab.WorkspaceTrashed {
			t.Errorf("%+v", v)
		}
		if _, err := w.Driver.InspectVolume(ctx, backend.VolumeRef{UID: w.WorkspaceOf(s.WorkspaceID).UID}); err != nil {
			t.Error(err)
		}
	})
}

// Requests at the same moment for the session of a branch get the same one.
func TestRaceForASession(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		var wg sync.WaitGroup
		ids := make([]string, 20)
		for i := range ids {
			wg.Go(func() {
				v, err := w.Sessions.Create(context.Background(), agentlab.SessionRequest{Branch: "login", IfMissing: true})
				if err != nil {
					w.Error(err)
				}
				ids[i] = v.ID
			})
		}
		wg.Wait()
		if slices.Sort(ids); ids[0] != ids[len(ids)-1] {
			w.Errorf("sessions %q", ids)
		}
	})
}
