package sandbox_test

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
)

// snapshotOf returns a snapshot of the workspace data, when it is neither being saved
// nor deleted. The zero value means that there is none.
func (w *world) snapshotOf(name string) (n agentlab.WorkspaceSnapshot) {
	w.Helper()
	for {
		synctest.Wait()
		list, err := w.workspaces.Snapshots(context.Background(), "data")
		if err != nil {
			w.Fatal(err)
		}
		i := slices.IndexFunc(list, func(n agentlab.WorkspaceSnapshot) bool { return n.Name == name })
		if i < 0 {
			return agentlab.WorkspaceSnapshot{}
		}
		if list[i].State == agentlab.WorkspaceSnapshotReady {
			return list[i]
		}
		time.Sleep(time.Second) // of the bubble
	}
}

func (w *world) saveAttached(name string, c agentlab.WorkspaceConsistency) agentlab.WorkspaceSnapshot {
	w.Helper()
	must(w.workspaces.SaveSnapshot(context.Background(), "data", name, c))(w.T)
	return w.snapshotOf(name)
}

// A workspace is saved while a sandbox has it: with the guest, which changes nothing
// meanwhile and can write afterwards, or without asking it.
func TestAttachedWorkspaceIsSaved(t *testing.T) {
	inWorld(t, func(w *world) {
		t := w.T
		sb := w.create(onWorkspace("data", 0))
		w.until(sb.VMID, agentlab.SandboxReady)
		w.sh(sb, "echo saved > /work/note")
		during := ""
		w.host.Inject(fake.Fault{Op: fake.OpSnapshotVolume, Times: 1, Hook: func(backend.Spec) {
			during = w.sh(sb, "echo during > /work/note; cat /work/note")
		}})
		if n := w.saveAttached("frozen", agentlab.ConsistencyFrozen); n.Consistency != agentlab.ConsistencyFrozen || during != "saved" {
			t.Errorf("%+v; while it was saved the note was %q", n, during)
		}
		if got := w.sh(sb, "echo later > /work/note; cat /work/note"); got != "later" {
			t.Errorf("the guest cannot write afterwards: %q", got)
		}
		if n := w.saveAttached("crash", agentlab.ConsistencyCrash); n.Consistency != agentlab.ConsistencyCrash {
			t.Errorf("%+v", n)
		}
		w.gone(sb.VMID)
		for _, c := range agentlab.AttachedConsistencies {
			if n := w.saveAttached("free-"+string(c), c); n.Consistency != agentlab.ConsistencyDetached {
				t.Errorf("%+v", n)
			}
		}
		for name, want := range map[string]string{"frozen": "saved", "crash": "later"} {
			must(w.workspaces.Fork(context.Background(), "data", name, name))(t)
			copied := w.create(onWorkspace(name, 0))
			w.until(copied.VMID, agentlab.SandboxReady)
			if got := w.sh(copied, "cat /work/note"); got != want {
				t.Errorf("snapshot %s has %q, want %q", name, got, want)
			}
		}
	})
}

// Without the help of the guest there is no frozen snapshot, and the answer names the
// other kind. No guest stays frozen.
func TestGuestThatDoesNotFreeze(t *testing.T) {
	for name, spoil := range map[string]func(w *world, sb agentlab.Sandbox){
		"refuses": func(w *world, sb agentlab.Sandbox) { w.sh(sb, "echo x > /work/never-freezes") },
		"thaws":   func(w *world, sb agentlab.Sandbox) { w.sh(sb, "echo x > /work/thaws-early") },
		"slow": func(w *world, _ agentlab.Sandbox) {
			w.host.Inject(fake.Fault{Op: fake.OpSnapshotVolume, Delay: 2 * time.Minute, Times: 1})
		},
		"no answer": func(w *world, _ agentlab.Sandbox) {
			w.host.Inject(fake.Fault{Op: fake.OpDialControl, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the guest hangs")})
		},
		"stopped": func(w *world, sb agentlab.Sandbox) {
			must(w.svc.Stop(context.Background(), sb.VMID, 0))(w.T)
			w.until(sb.VMID, agentlab.SandboxStopped)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				t := w.T
				sb := w.create(onWorkspace("data", 0))
				w.until(sb.VMID, agentlab.SandboxReady)
				spoil(w, sb)
				if n := w.saveAttached("one", agentlab.ConsistencyFrozen); n.Name != "" {
					t.Errorf("it was saved: %+v", n)
				}
				refused := slices.ContainsFunc(w.events(agentlab.EventWorkspaceSnapshot), func(e agentlab.Event) bool {
					return strings.Contains(e.Data, "--attached crash") && strings.Contains(e.Message, "frozen")
				})
				if !refused {
					t.Error("the reason is not an event")
				}
				if list, err := w.driver.VolumeSnapshots(context.Background()); err != nil || len(list) != 0 {
					t.Errorf("left: %+v, %v", list, err)
				}
				if n := w.saveAttached("two", agentlab.ConsistencyCrash); n.Consistency != agentlab.ConsistencyCrash {
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
			inWorld(t, func(w *world) {
				t := w.T
				sb := w.create(onWorkspace("data", 0))
				w.until(sb.VMID, agentlab.SandboxReady)
				w.sh(sb, "echo old > /work/note")
				restart := w.crashes(fake.OpSnapshotVolume, at)
				must(w.workspaces.SaveSnapshot(context.Background(), "data", "one", agentlab.ConsistencyFrozen))(t)
				restart()
				if n := w.snapshotOf("one"); n.Consistency != agentlab.ConsistencyFrozen {
					t.Fatalf("%+v", n)
				}
				if list, err := w.driver.VolumeSnapshots(context.Background()); err != nil || len(list) != 1 || list[0].Partial {
					t.Errorf("%+v, %v", list, err)
				}
				w.until(sb.VMID, agentlab.SandboxReady)
				if got := w.sh(sb, "echo new > /work/note; cat /work/note"); got != "new" {
					t.Errorf("the guest cannot write: %q", got)
				}
				if got := w.leases("data"); len(got) != 1 || got[0] != sb.VMID {
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
			inWorld(t, func(w *world) {
				t := w.T
				sb := w.create(onWorkspace("data", 0))
				w.until(sb.VMID, agentlab.SandboxReady)
				w.sh(sb, "echo old > /work/note")
				free := w.host.Inject(fake.Fault{Op: fake.OpSnapshotVolume, At: fake.After, Err: agentlab.Errorf(agentlab.CodeUnknownOutcome, "no answer")})
				must(w.workspaces.SaveSnapshot(context.Background(), "data", "one", c))(t)
				synctest.Wait()
				w.sh(sb, "echo new > /work/note")
				w.gone(sb.VMID)
				free()
				if n := w.snapshotOf("one"); n.Consistency != agentlab.ConsistencyCrash {
					t.Errorf("the guest may have been killed: %+v", n)
				}
				must(w.workspaces.Fork(context.Background(), "data", "copy", "one"))(t)
				copied := w.create(onWorkspace("copy", 0))
				w.until(copied.VMID, agentlab.SandboxReady)
				if got := w.sh(copied, "cat /work/note"); got != "new" {
					t.Errorf("a snapshot of what the sandbox left has %q", got)
				}
			})
		})
	}
}

// The time that a sandbox waits for its workspace is not part of its start, which the
// histogram of starts measures.
func TestStartSecondsLeaveOutTheWaitForAWorkspace(t *testing.T) {
	inWorld(t, func(w *world) {
		first := w.create(onWorkspace("data", 0))
		w.until(first.VMID, agentlab.SandboxReady)
		second := w.create(onWorkspace("data", time.Hour))
		time.Sleep(30 * time.Minute) // of the bubble
		w.gone(first.VMID)
		w.until(second.VMID, agentlab.SandboxReady)
		for _, e := range w.events(agentlab.EventSandboxState) {
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
