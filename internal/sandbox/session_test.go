package sandbox_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Seed 001 §4: what a session's sandbox wrote is there in the next one; a suspended
// sandbox continues; a copy is independent; a job is in the history.
func TestSession(t *testing.T) {
	inWorld(t, func(w *world) {
		t, ctx := w.T, context.Background()
		s := must(w.sessions.Create(ctx, agentlab.SessionRequest{Branch: "feature/Login", Workspace: agentlab.WorkspaceSelection{SizeGB: 2}}))(t)
		if s.Name != "feature-login" || s.Profile != "plain" {
			t.Errorf("%+v", s)
		}
		if again := must(w.sessions.Create(ctx, agentlab.SessionRequest{Branch: "feature/Login", IfMissing: true}))(t); again != s {
			t.Errorf("%+v, not %+v", again, s)
		}
		first := must(w.sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.until(first.VMID, agentlab.SandboxReady)
		w.sh(first, "echo hello > /work/note")
		if again := must(w.sessions.Resume(ctx, s.ID, 0, nil))(t); again.VMID != first.VMID {
			t.Errorf("a second sandbox: %+v", again)
		}
		wantCode(t, w.sessions.Delete(ctx, s.Name, false), agentlab.CodeConflict)
		w.restart()

		must(w.sessions.Stop(ctx, s.Name, true))(t)
		w.untilIt(first.VMID, func(sb agentlab.Sandbox) bool { return sb.OnDisk })
		if sb := must(w.sessions.Resume(ctx, s.Name, 0, nil))(t); sb.VMID != first.VMID {
			t.Errorf("another sandbox continues: %+v", sb)
		}
		w.until(first.VMID, agentlab.SandboxReady)
		must(w.sessions.Stop(ctx, s.Name, false))(t)
		w.until(first.VMID, agentlab.SandboxDestroyed)

		second := must(w.sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.until(second.VMID, agentlab.SandboxReady)
		if got := w.sh(second, "cat /work/note"); second.VMID == first.VMID || got != "hello" {
			t.Errorf("the note is %q", got)
		}
		_, err := w.sessions.Fork(ctx, s.Name, "copy", "")
		wantCode(t, err, agentlab.CodeConflict)
		_, err = w.workspaces.Delete(ctx, s.WorkspaceID, false)
		wantCode(t, err, agentlab.CodeConflict)
		w.gone(second.VMID)

		other := must(w.sessions.Fork(ctx, s.Name, "copy", ""))(t)
		w.untilWorkspace("copy", agentlab.WorkspaceReady)
		third := must(w.sessions.Resume(ctx, other.Name, 0, nil))(t)
		w.until(third.VMID, agentlab.SandboxReady)
		if got := w.sh(third, "cat /work/note"); got != "hello" {
			t.Errorf("the note of the copy is %q", got)
		}
		history := must(w.sessions.History(ctx, s))(t)
		if len(history) != 2 || history[0].UID != second.UID || history[1].UID != first.UID {
			t.Errorf("%+v", history)
		}
		r := must(w.sessions.ForJob(ctx, s.Name, agentlab.JobRequest{}))(t)
		if r.Session != s.ID || r.Branch != "feature/Login" || r.Workspace.Workspace != s.WorkspaceID || r.Profile != "plain" {
			t.Errorf("%+v", r)
		}

		must(w.sessions.Rename(ctx, s.Name, "login"))(t)
		_, err = w.sessions.Rename(ctx, "login", "copy")
		wantCode(t, err, agentlab.CodeExists)
		if err := w.sessions.Delete(ctx, "login", false); err != nil {
			t.Fatal(err)
		}
		var actions []string
		for _, e := range must(w.store.Events(ctx, agentlab.EventFilter{Kinds: []string{agentlab.EventSession}, Limit: 100}))(t) {
			if strings.Contains(e.Data, s.ID) {
				actions = append(actions, strings.TrimPrefix(e.Message[strings.LastIndex(e.Message, " "):], " "))
			}
		}
		if got := strings.Join(actions, " "); got != "created sandbox suspended resumed stopped sandbox renamed deleted" {
			t.Errorf("actions: %s", got)
		}
		if v := w.workspaceOf(s.WorkspaceID); v.State != agentlab.WorkspaceTrashed {
			t.Errorf("%+v", v)
		}
		if _, err := w.driver.InspectVolume(ctx, backend.VolumeRef{UID: w.workspaceOf(s.WorkspaceID).UID}); err != nil {
			t.Error(err)
		}
	})
}

// Requests at the same moment for the session of a branch get the same one.
func TestRaceForASession(t *testing.T) {
	inWorld(t, func(w *world) {
		var wg sync.WaitGroup
		ids := make([]string, 20)
		for i := range ids {
			wg.Go(func() {
				v, err := w.sessions.Create(context.Background(), agentlab.SessionRequest{Branch: "login", IfMissing: true})
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

// untilWorkspace lets time pass until a workspace is in a state.
func (w *world) untilWorkspace(name string, state agentlab.WorkspaceState) {
	w.Helper()
	var v agentlab.Workspace
	w.pass(func() bool { v = w.workspaceOf(name); return v.State == state }, func() string {
		return fmt.Sprintf("workspace %s is %s", name, v.State)
	})
}
