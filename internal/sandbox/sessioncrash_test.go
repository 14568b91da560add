package sandbox_test

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A session whose VM has crashed continues from the same disk, with its workspace. A
// new VM replaces it only if the disk does not start, and then has the name of the session.
func TestSessionAfterACrash(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t, ctx := w.T, context.Background()
		s := sandboxtest.Must(w.Sessions.Create(ctx, agentlab.SessionRequest{Name: "work"}))(t)
		first := sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.Until(first.VMID, agentlab.SandboxReady)
		w.Sh(first, "echo installed > /usr/bin/tool; echo hello > /work/note")

		for _, restart := range []bool{false, true} {
			w.Crashed(first)
			w.UntilIt(first.VMID, func(sb agentlab.Sandbox) bool { return sb.Workspace == "" }) // others may use it
			if restart {
				w.Restart()
			}
			again := sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t)
			w.Until(again.VMID, agentlab.SandboxReady)
			if got := w.Sh(again, "cat /usr/bin/tool; cat /work/note"); again.UID != first.UID || got != "installed\nhello" {
				t.Errorf("sandbox %d, which has %q", again.VMID, got)
			}
		}

		w.Sh(first, "echo yes > /damaged")
		w.Crashed(first)
		sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t)
		failed := w.UntilIt(first.VMID, func(sb agentlab.Sandbox) bool { return sb.Unbootable })
		if failed.State != agentlab.SandboxFailed || !strings.Contains(failed.Reason, "while it booted") {
			t.Errorf("%s: %s", failed.State, failed.Reason)
		}
		second := sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.Until(second.VMID, agentlab.SandboxReady)
		if got := w.Sh(second, "cat /work/note"); second.UID == first.UID || got != "hello" {
			t.Errorf("sandbox %d, which has %q", second.VMID, got)
		}
		for _, arg := range []string{s.Name, s.ID} {
			if got := sandboxtest.Must(w.Svc.Get(ctx, arg))(t); got.UID != second.UID {
				t.Errorf("%s is sandbox %s", arg, got.Name)
			}
		}
		if w.Get(first.VMID).Name != s.Name {
			t.Fatal("the old sandbox has lost its name")
		}
		_, err := w.Svc.GetUnique(ctx, s.Name)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		w.Gone(first.VMID)
		if got := sandboxtest.Must(w.Svc.GetUnique(ctx, s.Name))(t); got.UID != second.UID {
			t.Errorf("%s is sandbox %s", s.Name, got.Name)
		}
		w.Gone(second.VMID)
		_, err = w.Svc.Get(ctx, s.Name)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		if hint := agentlab.HintOf(err); !strings.Contains(hint, "agentlab start") {
			t.Errorf("the hint is %q", hint)
		}
	})
}

// A sandbox that was stopped after it had failed has lost its workspace: its session gets
// it back before it starts.
func TestSessionOfAStoppedSandboxHasItsWorkspace(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t, ctx := w.T, context.Background()
		s := sandboxtest.Must(w.Sessions.Create(ctx, agentlab.SessionRequest{Name: "work"}))(t)
		sb := sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Sh(sb, "echo hello > /work/note")
		w.Crashed(sb)
		w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Workspace == "" })
		sandboxtest.Must(w.Svc.Stop(ctx, sb.VMID, 0))(t)
		w.Until(sb.VMID, agentlab.SandboxStopped)

		other := w.Create(agentlab.SandboxRequest{Name: "other", Workspace: &agentlab.WorkspaceSelection{Workspace: s.WorkspaceID}})
		_, err := w.Sessions.Resume(ctx, s.Name, 0, nil)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		if now := w.Get(sb.VMID); now.State != agentlab.SandboxStopped || now.Desired != agentlab.DesiredStopped || now.Workspace != "" {
			t.Errorf("after a refusal: %+v", now)
		}
		w.Gone(other.VMID)
		sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.Until(sb.VMID, agentlab.SandboxReady)
		if got := w.Sh(sb, "cat /work/note"); got != "hello" {
			t.Errorf("the note is %q", got)
		}
	})
}

// The disk of a kept sandbox that has failed is kept as long after its lease as that of
// one that runs.
func TestLeaseOfAKeptFailedSandboxEnds(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "kept", Keepalive: new(true)})
		w.Until(sb.VMID, agentlab.SandboxReady)
		failed := w.Crashed(sb)
		stopped := w.Until(sb.VMID, agentlab.SandboxStopped)
		if !stopped.LeaseExpiresAt.After(failed.LeaseExpiresAt) {
			w.Errorf("its lease ends at %s, and before at %s", stopped.LeaseExpiresAt, failed.LeaseExpiresAt)
		}
	})
}

// stopHook calls a function before it stops a VM.
type stopHook struct {
	*fake.Driver
	before func()
}

func (d stopHook) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	d.before()
	return d.Driver.Stop(ctx, ref, grace)
}

// A session that continues while its failed sandbox gives its workspace back has the
// workspace afterwards.
func TestSessionContinuesWhileTheWorkspaceIsReturned(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t, ctx := w.T, context.Background()
		s := sandboxtest.Must(w.Sessions.Create(ctx, agentlab.SessionRequest{Name: "work"}))(t)
		sb := sandboxtest.Must(w.Sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.Until(sb.VMID, agentlab.SandboxReady)
		var resumed atomic.Bool
		resume := sync.OnceFunc(func() {
			defer resumed.Store(true)
			if _, err := w.Sessions.Resume(ctx, s.Name, 0, nil); err != nil {
				t.Error(err)
			}
		})
		w.Wrap = func(d backend.Driver) backend.Driver {
			return stopHook{d.(*fake.Driver), func() {
				if w.Get(sb.VMID).State == agentlab.SandboxFailed {
					resume()
				}
			}}
		}
		w.Restart()
		if err := w.Host.CrashVM(backend.RefOf(w.Get(sb.VMID)), "the kernel of the guest panicked"); err != nil {
			t.Fatal(err)
		}
		w.UntilIt(sb.VMID, func(now agentlab.Sandbox) bool {
			return now.State == agentlab.SandboxReady && resumed.Load()
		})
		if now := w.Get(sb.VMID); now.Workspace != s.WorkspaceID {
			t.Errorf("it is READY without its workspace: %+v", now)
		}
	})
}
