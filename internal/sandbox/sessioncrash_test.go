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
)

// crashed lets the VM of a sandbox crash until the service knows it.
func (w *world) crashed(sb agentlab.Sandbox) agentlab.Sandbox {
	w.Helper()
	if err := w.host.CrashVM(backend.RefOf(w.get(sb.VMID)), "the kernel of the guest panicked"); err != nil {
		w.Fatal(err)
	}
	return w.until(sb.VMID, agentlab.SandboxFailed)
}

// A session whose VM has crashed continues from the same disk, with its workspace. A
// new VM replaces it only if the disk does not start, and then has the name of the session.
func TestSessionAfterACrash(t *testing.T) {
	inWorld(t, func(w *world) {
		t, ctx := w.T, context.Background()
		s := must(w.sessions.Create(ctx, agentlab.SessionRequest{Name: "work"}))(t)
		first := must(w.sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.until(first.VMID, agentlab.SandboxReady)
		w.sh(first, "echo installed > /usr/bin/tool; echo hello > /work/note")

		for _, restart := range []bool{false, true} {
			w.crashed(first)
			w.untilIt(first.VMID, func(sb agentlab.Sandbox) bool { return sb.Workspace == "" }) // others may use it
			if restart {
				w.restart()
			}
			again := must(w.sessions.Resume(ctx, s.Name, 0, nil))(t)
			w.until(again.VMID, agentlab.SandboxReady)
			if got := w.sh(again, "cat /usr/bin/tool; cat /work/note"); again.UID != first.UID || got != "installed\nhello" {
				t.Errorf("sandbox %d, which has %q", again.VMID, got)
			}
		}

		w.sh(first, "echo yes > /damaged")
		w.crashed(first)
		must(w.sessions.Resume(ctx, s.Name, 0, nil))(t)
		failed := w.untilIt(first.VMID, func(sb agentlab.Sandbox) bool { return sb.Unbootable })
		if failed.State != agentlab.SandboxFailed || !strings.Contains(failed.Reason, "while it booted") {
			t.Errorf("%s: %s", failed.State, failed.Reason)
		}
		second := must(w.sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.until(second.VMID, agentlab.SandboxReady)
		if got := w.sh(second, "cat /work/note"); second.UID == first.UID || got != "hello" {
			t.Errorf("sandbox %d, which has %q", second.VMID, got)
		}
		for _, arg := range []string{s.Name, s.ID} {
			if got := must(w.svc.Get(ctx, arg))(t); got.UID != second.UID {
				t.Errorf("%s is sandbox %s", arg, got.Name)
			}
		}
		if w.get(first.VMID).Name != s.Name {
			t.Fatal("the old sandbox has lost its name")
		}
		_, err := w.svc.GetUnique(ctx, s.Name)
		wantCode(t, err, agentlab.CodeConflict)
		w.gone(first.VMID)
		if got := must(w.svc.GetUnique(ctx, s.Name))(t); got.UID != second.UID {
			t.Errorf("%s is sandbox %s", s.Name, got.Name)
		}
		w.gone(second.VMID)
		_, err = w.svc.Get(ctx, s.Name)
		wantCode(t, err, agentlab.CodeConflict)
		if hint := agentlab.HintOf(err); !strings.Contains(hint, "agentlab start") {
			t.Errorf("the hint is %q", hint)
		}
	})
}

// A sandbox that was stopped after it had failed has lost its workspace: its session gets
// it back before it starts.
func TestSessionOfAStoppedSandboxHasItsWorkspace(t *testing.T) {
	inWorld(t, func(w *world) {
		t, ctx := w.T, context.Background()
		s := must(w.sessions.Create(ctx, agentlab.SessionRequest{Name: "work"}))(t)
		sb := must(w.sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.until(sb.VMID, agentlab.SandboxReady)
		w.sh(sb, "echo hello > /work/note")
		w.crashed(sb)
		w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Workspace == "" })
		must(w.svc.Stop(ctx, sb.VMID, 0))(t)
		w.until(sb.VMID, agentlab.SandboxStopped)

		other := w.create(agentlab.SandboxRequest{Name: "other", Workspace: &agentlab.WorkspaceSelection{Workspace: s.WorkspaceID}})
		_, err := w.sessions.Resume(ctx, s.Name, 0, nil)
		wantCode(t, err, agentlab.CodeConflict)
		if now := w.get(sb.VMID); now.State != agentlab.SandboxStopped || now.Desired != agentlab.DesiredStopped || now.Workspace != "" {
			t.Errorf("after a refusal: %+v", now)
		}
		w.gone(other.VMID)
		must(w.sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.until(sb.VMID, agentlab.SandboxReady)
		if got := w.sh(sb, "cat /work/note"); got != "hello" {
			t.Errorf("the note is %q", got)
		}
	})
}

// The disk of a kept sandbox that has failed is kept as long after its lease as that of
// one that runs.
func TestLeaseOfAKeptFailedSandboxEnds(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "kept", Keepalive: new(true)})
		w.until(sb.VMID, agentlab.SandboxReady)
		failed := w.crashed(sb)
		stopped := w.until(sb.VMID, agentlab.SandboxStopped)
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
	inWorld(t, func(w *world) {
		t, ctx := w.T, context.Background()
		s := must(w.sessions.Create(ctx, agentlab.SessionRequest{Name: "work"}))(t)
		sb := must(w.sessions.Resume(ctx, s.Name, 0, nil))(t)
		w.until(sb.VMID, agentlab.SandboxReady)
		var resumed atomic.Bool
		resume := sync.OnceFunc(func() {
			defer resumed.Store(true)
			if _, err := w.sessions.Resume(ctx, s.Name, 0, nil); err != nil {
				t.Error(err)
			}
		})
		w.wrap = func(d backend.Driver) backend.Driver {
			return stopHook{d.(*fake.Driver), func() { //nolint:forcetypeassert // it is the world's
				if w.get(sb.VMID).State == agentlab.SandboxFailed {
					resume()
				}
			}}
		}
		w.restart()
		if err := w.host.CrashVM(backend.RefOf(w.get(sb.VMID)), "the kernel of the guest panicked"); err != nil {
			t.Fatal(err)
		}
		w.untilIt(sb.VMID, func(now agentlab.Sandbox) bool {
			return now.State == agentlab.SandboxReady && resumed.Load()
		})
		if now := w.get(sb.VMID); now.Workspace != s.WorkspaceID {
			t.Errorf("it is READY without its workspace: %+v", now)
		}
	})
}
