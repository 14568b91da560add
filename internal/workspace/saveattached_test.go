package workspace_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A workspace is saved while a sandbox has it: with the guest, which changes nothing
// meanwhile and can write afterwards, or without asking it.
func TestAttachedWorkspaceIsSaved(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		t := w.T
		sb := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Sh(sb, "echo saved > /work/note")
		during := ""
		w.Host.Inject(fake.Fault{Op: fake.OpSnapshotVolume, Times: 1, Hook: func(backend.Spec) {
			during = w.Sh(sb, "echo during > /work/note; cat /work/note")
		}})
		if n := w.SaveAttached("frozen", agentlab.ConsistencyFrozen); n.Consistency != agentlab.ConsistencyFrozen || during != "saved" {
			t.Errorf("%+v; while it was saved the note was %q", n, during)
		}
		if got := w.Sh(sb, "echo later > /work/note; cat /work/note"); got != "later" {
			t.Errorf("the guest cannot write afterwards: %q", got)
		}
		if n := w.SaveAttached("crash", agentlab.ConsistencyCrash); n.Consistency != agentlab.ConsistencyCrash {
			t.Errorf("%+v", n)
		}
		w.Gone(sb.VMID)
		for _, c := range agentlab.AttachedConsistencies {
			if n := w.SaveAttached("free-"+string(c), c); n.Consistency != agentlab.ConsistencyDetached {
				t.Errorf("%+v", n)
			}
		}
		for name, want := range map[string]string{"frozen": "saved", "crash": "later"} {
			sandboxtest.Must(w.Workspaces.Fork(context.Background(), "data", name, name))(t)
			copied := w.Create(sandboxtest.OnWorkspace(name, 0))
			w.Until(copied.VMID, agentlab.SandboxReady)
			if got := w.Sh(copied, "cat /work/note"); got != want {
				t.Errorf("snapshot %s has %q, want %q", name, got, want)
			}
		}
	})
}

// Without the help of the guest there is no frozen snapshot, and the answer names the
// other kind. No guest stays frozen.
func TestGuestThatDoesNotFreeze(t *testing.T) {
	for name, spoil := range map[string]func(w *sandboxtest.World, sb agentlab.Sandbox){
		"refuses": func(w *sandboxtest.World, sb agentlab.Sandbox) { w.Sh(sb, "echo x > /work/never-freezes") },
		"thaws":   func(w *sandboxtest.World, sb agentlab.Sandbox) { w.Sh(sb, "echo x > /work/thaws-early") },
		"slow": func(w *sandboxtest.World, _ agentlab.Sandbox) {
			w.Host.Inject(fake.Fault{Op: fake.OpSnapshotVolume, Delay: 2 * time.Minute, Times: 1})
		},
		"no answer": func(w *sandboxtest.World, _ agentlab.Sandbox) {
			w.Host.Inject(fake.Fault{Op: fake.OpDialControl, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the guest hangs")})
		},
		"stopped": func(w *sandboxtest.World, sb agentlab.Sandbox) {
			sandboxtest.Must(w.Svc.Stop(context.Background(), sb.VMID, 0))(w.T)
			w.Until(sb.VMID, agentlab.SandboxStopped)
		},
	} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				t := w.T
				sb := w.Create(sandboxtest.OnWorkspace("data", 0))
				w.Until(sb.VMID, agentlab.SandboxReady)
				spoil(w, sb)
				if n := w.SaveAttached("one", agentlab.ConsistencyFrozen); n.Name != "" {
					t.Errorf("it was saved: %+v", n)
				}
				refused := slices.ContainsFunc(w.Events(agentlab.EventWorkspaceSnapshot), func(e agentlab.Event) bool {
					return strings.Contains(e.Data, "--attached crash") && strings.Contains(e.Message, "frozen")
				})
				if !refused {
					t.Error("the reason is not an event")
				}
				if list, err := w.Driver.VolumeSnapshots(context.Background()); err != nil || len(list) != 0 {
					t.Errorf("left: %+v, %v", list, err)
				}
				if n := w.SaveAttached("two", agentlab.ConsistencyCrash); n.Consistency != agentlab.ConsistencyCrash {
					t.Errorf("%+v", n)
				}
			})
		})
	}
}

// A daemon that is killed while it saves an attached workspace saves it after its
// restart, once, with a new freeze.
func TestAttachedSnapshotAfterCrashes(t *testing.T) {
	for _, at := range []fake.Point{fake.Before, fake.Half, fake.After} {
		t.Run(string(at), func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				t := w.T
				sb := w.Create(sandboxtest.OnWorkspace("data", 0))
				w.Until(sb.VMID, agentlab.SandboxReady)
				w.Sh(sb, "echo old > /work/note")
				restart := w.Crashes(fake.OpSnapshotVolume, at)
				sandboxtest.Must(w.Workspaces.SaveSnapshot(context.Background(), "data", "one", agentlab.ConsistencyFrozen))(t)
				restart()
				if n := w.SnapshotOf("one"); n.Consistency != agentlab.ConsistencyFrozen {
					t.Fatalf("%+v", n)
				}
				if list, err := w.Driver.VolumeSnapshots(context.Background()); err != nil || len(list) != 1 || list[0].Partial {
					t.Errorf("%+v, %v", list, err)
				}
				w.Until(sb.VMID, agentlab.SandboxReady)
				if got := w.Sh(sb, "echo new > /work/note; cat /work/note"); got != "new" {
					t.Errorf("the guest cannot write: %q", got)
				}
				if got := w.Leases("data"); len(got) != 1 || got[0] != sb.VMID {
					t.Errorf("leases %v", got)
				}
			})
		})
	}
}

// A snapshot whose end was not known is saved again after the sandbox has gone: the
// first attempt lacks what the sandbox wrote later, so it is not what it left.
func TestSnapshotOutlivesItsSandbox(t *testing.T) {
	for _, c := range agentlab.AttachedConsistencies {
		t.Run(string(c), func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				t := w.T
				sb := w.Create(sandboxtest.OnWorkspace("data", 0))
				w.Until(sb.VMID, agentlab.SandboxReady)
				w.Sh(sb, "echo old > /work/note")
				free := w.Host.Inject(fake.Fault{Op: fake.OpSnapshotVolume, At: fake.After, Err: agentlab.Errorf(agentlab.CodeUnknownOutcome, "no answer")})
				sandboxtest.Must(w.Workspaces.SaveSnapshot(context.Background(), "data", "one", c))(t)
				synctest.Wait()
				w.Sh(sb, "echo new > /work/note")
				w.Gone(sb.VMID)
				free()
				if n := w.SnapshotOf("one"); n.Consistency != agentlab.ConsistencyCrash {
					t.Errorf("the guest may have been killed: %+v", n)
				}
				sandboxtest.Must(w.Workspaces.Fork(context.Background(), "data", "copy", "one"))(t)
				copied := w.Create(sandboxtest.OnWorkspace("copy", 0))
				w.Until(copied.VMID, agentlab.SandboxReady)
				if got := w.Sh(copied, "cat /work/note"); got != "new" {
					t.Errorf("a snapshot of what the sandbox left has %q", got)
				}
			})
		})
	}
}

// The time that a sandbox waits for its workspace is not part of its start, which the
// histogram of starts measures.
func TestStartSecondsLeaveOutTheWaitForAWorkspace(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		first := w.Create(sandboxtest.OnWorkspace("data", 0))
		w.Until(first.VMID, agentlab.SandboxReady)
		second := w.Create(sandboxtest.OnWorkspace("data", time.Hour))
		time.Sleep(30 * time.Minute) // of the bubble
		w.Gone(first.VMID)
		w.Until(second.VMID, agentlab.SandboxReady)
		for _, e := range w.Events(agentlab.EventSandboxState) {
			var data struct {
				Start   string
				Seconds *float64 `json:"start_seconds"`
			}
			if err := json.Unmarshal([]byte(e.Data), &data); err != nil {
				w.Fatal(err)
			}
			if e.SandboxVMID != second.VMID || data.Start == "" {
				continue
			}
			if data.Seconds == nil || *data.Seconds < 0 || *data.Seconds > 60 {
				w.Errorf("a start after a wait of 30 minutes: %s", e.Data)
			}
			return
		}
		w.Error("no event of the start")
	})
}
