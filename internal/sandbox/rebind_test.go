package sandbox_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// One call moves a workspace to a new sandbox; a call that is repeated with its name
// continues with that sandbox.
func TestRebind(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		first := w.Until(w.Create(sandboxtest.OnWorkspace("data", 0)).VMID, agentlab.SandboxReady)
		w.Sh(first, "echo hello > /work/file")
		next := sandboxtest.Must(w.Sessions.Rebind(ctx, "data", agentlab.SandboxRequest{Name: "next"}, false))(t)
		for range 2 {
			w.Until(next.VMID, agentlab.SandboxReady)
			if got := w.Sh(next, "cat /work/file"); got != "hello" {
				t.Errorf("the new sandbox has %q", got)
			}
			again := sandboxtest.Must(w.Sessions.Rebind(ctx, "data", agentlab.SandboxRequest{Name: "next"}, false))(t)
			if again.UID != next.UID {
				t.Errorf("another call created %s", again.Name)
			}
		}
		if got := w.Get(first.VMID); got.State != agentlab.SandboxReady || got.Workspace != "" {
			t.Errorf("the sandbox that had it is %s, with workspace %q", got.State, got.Workspace)
		}
		_, err := w.Sessions.Rebind(ctx, "data", agentlab.SandboxRequest{Name: first.Name}, false)
		sandboxtest.WantCode(t, err, agentlab.CodeExists)
		_, err = w.Sessions.Rebind(ctx, "ghost", agentlab.SandboxRequest{}, false)
		sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
		sandboxtest.Must(w.Svc.Destroy(ctx, next.VMID))(t)
		w.Until(next.VMID, agentlab.SandboxDestroyed)
		third := sandboxtest.Must(w.Sessions.Rebind(ctx, "data", agentlab.SandboxRequest{}, false))(t) // no sandbox has it
		w.Until(third.VMID, agentlab.SandboxReady)
		if got := w.Sh(third, "cat /work/file"); got != "hello" {
			t.Errorf("the third sandbox has %q", got)
		}
	})
}

// A workspace that cannot be taken stays where it is, and no sandbox waits for it.
func TestRebindFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := sandboxtest.NewWorldOn(t, fake.Config{BootDelay: 2 * time.Second, NoVolumeHotplug: true})
		ctx := context.Background()
		first := w.Until(w.Create(sandboxtest.OnWorkspace("data", 0)).VMID, agentlab.SandboxReady)
		_, err := w.Sessions.Rebind(ctx, "data", agentlab.SandboxRequest{Name: "next"}, false)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		w.Pass(func() bool {
			list, err := w.Store.Sandboxes(ctx, agentlab.SandboxFilter{})
			return err == nil && len(list) == 1
		}, func() string { return "the new sandbox still exists" })
		leases, err := w.Workspaces.Leases(ctx, "")
		if err != nil || len(leases) != 1 || leases[0].UID != first.UID || leases[0].Release != agentlab.ReleaseNone {
			t.Errorf("%+v, %v", leases, err)
		}
	})
}
