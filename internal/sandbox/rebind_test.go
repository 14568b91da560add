package sandbox_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

// One call moves a workspace to a new sandbox; a call that is repeated with its name
// continues with that sandbox.
func TestRebind(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		first := w.until(w.create(onWorkspace("data", 0)).VMID, agentlab.SandboxReady)
		w.sh(first, "echo hello > /work/file")
		next := must(w.sessions.Rebind(ctx, "data", agentlab.SandboxRequest{Name: "next"}, false))(t)
		for range 2 {
			w.until(next.VMID, agentlab.SandboxReady)
			if got := w.sh(next, "cat /work/file"); got != "hello" {
				t.Errorf("the new sandbox has %q", got)
			}
			again := must(w.sessions.Rebind(ctx, "data", agentlab.SandboxRequest{Name: "next"}, false))(t)
			if again.UID != next.UID {
				t.Errorf("another call created %s", again.Name)
			}
		}
		if got := w.get(first.VMID); got.State != agentlab.SandboxReady || got.Workspace != "" {
			t.Errorf("the sandbox that had it is %s, with workspace %q", got.State, got.Workspace)
		}
		_, err := w.sessions.Rebind(ctx, "data", agentlab.SandboxRequest{Name: first.Name}, false)
		wantCode(t, err, agentlab.CodeExists)
		_, err = w.sessions.Rebind(ctx, "ghost", agentlab.SandboxRequest{}, false)
		wantCode(t, err, agentlab.CodeNotFound)
		must(w.svc.Destroy(ctx, next.VMID))(t)
		w.until(next.VMID, agentlab.SandboxDestroyed)
		third := must(w.sessions.Rebind(ctx, "data", agentlab.SandboxRequest{}, false))(t) // no sandbox has it
		w.until(third.VMID, agentlab.SandboxReady)
		if got := w.sh(third, "cat /work/file"); got != "hello" {
			t.Errorf("the third sandbox has %q", got)
		}
	})
}

// A workspace that cannot be taken stays where it is, and no sandbox waits for it.
func TestRebindFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorldOn(t, fake.Config{BootDelay: 2 * time.Second, NoVolumeHotplug: true})
		ctx := context.Background()
		first := w.until(w.create(onWorkspace("data", 0)).VMID, agentlab.SandboxReady)
		_, err := w.sessions.Rebind(ctx, "data", agentlab.SandboxRequest{Name: "next"}, false)
		wantCode(t, err, agentlab.CodeConflict)
		w.pass(func() bool {
			list, err := w.store.Sandboxes(ctx, agentlab.SandboxFilter{})
			return err == nil && len(list) == 1
		}, func() string { return "the new sandbox still exists" })
		leases, err := w.workspaces.Leases(ctx, "")
		if err != nil || len(leases) != 1 || leases[0].UID != first.UID || leases[0].Release != agentlab.ReleaseNone {
			t.Errorf("%+v, %v", leases, err)
		}
	})
}
