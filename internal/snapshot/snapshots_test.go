package snapshot_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

func TestSnapshotRestore(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Ready("play")
		w.Sh(sb, "echo one > file")
		before := w.Health(sb)
		n := w.Save(sb, "clean", false)
		if !n.Memory || n.Bytes <= 0 || n.Kind != agentlab.SnapshotSaved || n.Image != sb.Image {
			t.Errorf("%+v", n)
		}
		if got := w.Get(sb.VMID); got.State != agentlab.SandboxReady || w.Power(got) != backend.PowerRunning {
			t.Errorf("its source is %s", got.State)
		}
		for _, state := range []string{"running", "suspended", "on disk", "stopped", "crashed"} {
			w.Sh(w.Get(sb.VMID), "echo two > file")
			switch state {
			case "suspended":
				sandboxtest.Must(w.Svc.Suspend(ctx, sb.VMID, false))(t)
				w.Until(sb.VMID, agentlab.SandboxSuspended)
			case "on disk":
				w.SuspendToDisk(sb)
			case "stopped":
				sandboxtest.Must(w.Svc.Stop(ctx, sb.VMID, 0))(t)
				w.Until(sb.VMID, agentlab.SandboxStopped)
			case "crashed":
				if err := w.Host.CrashVM(backend.RefOf(sb), "power cut"); err != nil {
					t.Fatal(err)
				}
				w.Until(sb.VMID, agentlab.SandboxFailed)
			}
			sandboxtest.Must(w.Snaps.RestoreSnapshot(ctx, sb.VMID, "clean"))(t)
			got := w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
				return sb.Restoring == "" && sb.State == agentlab.SandboxReady
			})
			h := w.Health(got)
			if h.BootID != before.BootID || h.Identity != sb.UID || w.Sh(got, "cat file") != "one" {
				t.Errorf("%s: boot %s, identity %s, file %q", state, h.BootID, h.Identity, w.Sh(got, "cat file"))
			}
			if got.UID != sb.UID || got.Name != sb.Name || !got.LeaseExpiresAt.Equal(sb.LeaseExpiresAt) || got.Reason != "" || got.OnDisk || got.IP == "" {
				t.Errorf("%s: %+v", state, got)
			}
		}
		w.DestroyAll()
		w.UntilNoSnapshots()
	})
}

// A snapshot of a stopped sandbox has no memory: restored, the sandbox is
// STOPPED.
func TestSnapshotOfStopped(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Ready("play")
		w.Sh(sb, "echo one > file")
		sandboxtest.Must(w.Svc.Stop(ctx, sb.VMID, 0))(t)
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if n := w.Save(sb, "off", false); n.Memory {
			t.Error("it has memory")
		}
		sandboxtest.Must(w.Svc.Start(ctx, sb.VMID))(t)
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Sh(sb, "echo two > file")
		sandboxtest.Must(w.Snaps.RestoreSnapshot(ctx, sb.VMID, "off"))(t)
		w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
			return sb.Restoring == "" && sb.State == agentlab.SandboxStopped && sb.Desired == agentlab.DesiredStopped
		})
		sandboxtest.Must(w.Svc.Start(ctx, sb.VMID))(t)
		w.Until(sb.VMID, agentlab.SandboxReady)
		if got := w.Sh(sb, "cat file"); got != "one" {
			t.Errorf("file %q", got)
		}
	})
}

// Whatever step the daemon dies in, the next one completes what was requested.
func TestSnapshotAfterCrash(t *testing.T) {
	points := []fake.Point{fake.Before, fake.Half, fake.After}
	for _, op := range []fake.Op{fake.OpSaveSnapshot, fake.OpRestoreSnapshot, fake.OpResume, fake.OpDeleteSnapshot} {
		for _, at := range points {
			if op == fake.OpResume && at == fake.Half {
				continue
			}
			t.Run(fmt.Sprintf("%s %s", op, at), func(t *testing.T) {
				sandboxtest.InWorld(t, func(w *sandboxtest.World) {
					ctx := context.Background()
					sb := w.Ready("play")
					w.Sh(sb, "echo one > file")
					boot, restart := w.Boot(sb), w.Crashes(op, at)
					n := sandboxtest.Must(w.Snaps.SaveSnapshot(ctx, sb.VMID, "clean", false))(t)
					if op == fake.OpSaveSnapshot {
						restart()
					}
					w.Saved(n)
					w.Sh(w.Get(sb.VMID), "echo two > file")
					sandboxtest.Must(w.Snaps.RestoreSnapshot(ctx, sb.VMID, "clean"))(t)
					if op == fake.OpRestoreSnapshot || op == fake.OpResume {
						restart()
					}
					got := w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
						return sb.Restoring == "" && sb.State == agentlab.SandboxReady
					})
					if w.Boot(got) != boot || w.Sh(got, "cat file") != "one" {
						t.Errorf("boot %s, file %q", w.Boot(got), w.Sh(got, "cat file"))
					}
					sandboxtest.Must(w.Snaps.DeleteSnapshot(ctx, "play", "clean"))(t)
					if op == fake.OpDeleteSnapshot {
						restart()
					}
					w.UntilNoSnapshots()
					if got := w.Get(sb.VMID); got.State != agentlab.SandboxReady {
						t.Errorf("the sandbox is %s", got.State)
					}
				})
			})
		}
	}
}

// A new sandbox from a snapshot continues its guest with an identity of its own.
func TestNewFromSnapshot(t *testing.T) {
	for name, restart := range map[string]struct {
		op fake.Op
		at fake.Point
	}{
		"": {}, "create half": {fake.OpCreate, fake.Half}, "create after": {fake.OpCreate, fake.After},
		"start before": {fake.OpStart, fake.Before}, "start after": {fake.OpStart, fake.After},
	} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				ctx := context.Background()
				src := w.Ready("play")
				w.Sh(src, "echo one > file")
				w.Save(src, "clean", false)
				again := func() {}
				if name != "" {
					again = w.Crashes(restart.op, restart.at)
				}
				sb := w.Create(agentlab.SandboxRequest{Name: "copy", From: "play/clean"})
				again()
				got := w.Until(sb.VMID, agentlab.SandboxReady)
				h := w.Health(got)
				if h.BootID != w.Boot(src) || h.Identity != got.UID || w.Sh(got, "cat file") != "one" {
					t.Errorf("boot %s, identity %s, file %q", h.BootID, h.Identity, w.Sh(got, "cat file"))
				}
				if got.From.Name != "play/clean" || got.Profile != src.Profile || got.UID == src.UID {
					t.Errorf("%+v", got)
				}
				sandboxtest.Must(w.Svc.Stop(ctx, got.VMID, 0))(t)
				w.Until(got.VMID, agentlab.SandboxStopped)
				sandboxtest.Must(w.Snaps.DeleteSnapshot(ctx, "play", "clean"))(t)
				w.UntilNoSnapshots()
				sandboxtest.Must(w.Svc.Start(ctx, got.VMID))(t) // the snapshot is not needed any more
				w.Until(got.VMID, agentlab.SandboxReady)
				if w.Boot(got) == h.BootID || w.Sh(got, "cat file") != "one" {
					t.Error("it did not boot from its own disk")
				}
				w.DestroyAll()
			})
		})
	}
}

func TestSnapshotRefusals(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Quota.Count = 2
		w.Begin()
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		_, err := w.Snaps.SaveSnapshot(ctx, sb.VMID, "early", false)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		w.Until(sb.VMID, agentlab.SandboxReady)
		for _, name := range []string{"", "A B", "../x"} {
			_, err = w.Snaps.SaveSnapshot(ctx, sb.VMID, name, false)
			sandboxtest.WantCode(t, err, agentlab.CodeInvalid)
		}
		w.Save(sb, "one", false)
		_, err = w.Snaps.SaveSnapshot(ctx, sb.VMID, "one", false)
		sandboxtest.WantCode(t, err, agentlab.CodeExists)
		w.Save(sb, "two", false)
		_, err = w.Snaps.SaveSnapshot(ctx, sb.VMID, "three", false)
		sandboxtest.WantCode(t, err, agentlab.CodeLimit)
		_, err = w.Snaps.RestoreSnapshot(ctx, sb.VMID, "none")
		sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
		_, err = w.Snaps.DeleteSnapshot(ctx, "play", "none")
		sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
		_, err = w.Snaps.Snapshots(ctx, "ghost")
		sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
		for field, r := range map[string]agentlab.SandboxRequest{
			"resources.cores":     {From: "play/one", Cores: 2},
			"resources.memory_mb": {From: "play/one", MemoryMB: 1024},
			"image":               {From: "play/one", Image: "agents"},
			"from_snapshot":       {From: "play"},
		} {
			_, err := w.Svc.Create(ctx, r)
			sandboxtest.WantCode(t, err, agentlab.CodeInvalid)
			if !strings.Contains(err.Error(), field) {
				t.Errorf("%s: %v", field, err)
			}
		}
		_, err = w.Svc.Create(ctx, agentlab.SandboxRequest{From: "play/none"})
		sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
		sandboxtest.Must(w.Snaps.DeleteSnapshot(ctx, "play", "one"))(t)
		w.UntilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 1 })
		w.Save(sb, "three", false)
		other := w.Ready("other")
		_, err = w.Snaps.RestoreSnapshot(ctx, other.VMID, "two")
		sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
	})
}

// A backend without snapshots refuses all that needs them.
func TestNoSnapshots(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Plain = true
		w.Begin()
		ctx := context.Background()
		sb := w.Ready("play")
		_, err := w.Snaps.SaveSnapshot(ctx, sb.VMID, "one", false)
		sandboxtest.WantCode(t, err, agentlab.CodeUnsupported)
		_, err = w.Snaps.RestoreSnapshot(ctx, sb.VMID, "one")
		sandboxtest.WantCode(t, err, agentlab.CodeUnsupported)
		_, err = w.Svc.Create(ctx, agentlab.SandboxRequest{From: "play/one"})
		sandboxtest.WantCode(t, err, agentlab.CodeUnsupported)
		_, err = w.Snaps.Fork(ctx, sb.VMID, agentlab.ForkRequest{Count: 1})
		sandboxtest.WantCode(t, err, agentlab.CodeUnsupported)
	})
}

// A sandbox that has received secrets is not saved, also if it receives them while
// it is saved.
func TestSnapshotOfSecrets(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Ready("play")
		w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, At: fake.Half, Times: 1, Hook: func(backend.Spec) { w.Received.Store(sb.UID, true) }})
		sandboxtest.Must(w.Snaps.SaveSnapshot(ctx, sb.VMID, "late", true))(t)
		w.UntilNoSnapshots()
		_, err := w.Snaps.SaveSnapshot(ctx, sb.VMID, "later", true)
		sandboxtest.WantCode(t, err, agentlab.CodeDenied)
		refused := false
		for _, e := range w.Events(agentlab.EventSandboxSnapshot) {
			refused = refused || strings.Contains(e.Data, `"code":"denied"`) && strings.Contains(e.Message, "has received secrets")
			if n := strings.Count(e.Message+e.Data, "secrets bundle"); n > 1 || strings.Contains(e.Message, "secrets bundle") {
				t.Errorf("the event has its hint %d times: %s %s", n, e.Message, e.Data)
			}
		}
		if !refused {
			t.Error("no event has the reason")
		}
	})
}

// A changed policy interrupts a save, which then begins again at once.
func TestPolicyInterruptsSave(t *testing.T) {
	for _, state := range []agentlab.SandboxState{agentlab.SandboxReady, agentlab.SandboxSuspended} {
		t.Run(string(state), func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				w.Kill()
				w.Limits.AuditEvery = time.Hour // does not wake the step
				w.Begin()
				ctx := context.Background()
				sb := w.Ready("play")
				if state == agentlab.SandboxSuspended {
					sandboxtest.Must(w.Svc.Suspend(ctx, sb.VMID, false))(t)
					w.Until(sb.VMID, state)
				}
				w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, At: fake.Half, Times: 1, Block: make(chan struct{})})
				n := sandboxtest.Must(w.Snaps.SaveSnapshot(ctx, sb.VMID, "clean", false))(t)
				time.Sleep(time.Second)
				began := time.Now()
				sandboxtest.WantPolicySoon(w, sb.VMID, 100*time.Millisecond)
				if got := w.Saved(n); got.SavedAt.Sub(began) > 100*time.Millisecond {
					t.Errorf("it was saved after %s", got.SavedAt.Sub(began))
				}
				if got := w.Get(sb.VMID); got.State != state {
					t.Errorf("the sandbox is %s", got.State)
				}
			})
		})
	}
}

// A name and a number never mean a snapshot of their former owner while a sandbox
// has them.
func TestSnapshotOfFormerOwner(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Limits.VMIDFirst, w.Limits.VMIDLast = 1000, 1000
		w.Begin()
		ctx := context.Background()
		former := w.Ready("play")
		w.Save(former, "kept", true)
		sandboxtest.Must(w.Svc.Destroy(ctx, former.VMID))(t)
		w.Until(former.VMID, agentlab.SandboxDestroyed)
		for _, id := range []string{"play", "1000"} {
			if n := sandboxtest.Must(w.Snaps.FindSnapshot(ctx, id, "kept"))(t); n.SandboxUID != former.UID {
				t.Errorf("%s: %+v", id, n)
			}
		}
		if err := w.Store.DeleteSandbox(ctx, former.VMID); err != nil {
			t.Fatal(err)
		}
		// Its number is reused, then its name too.
		for _, name := range []string{"other", "play"} {
			sb := w.Ready(name)
			if sb.VMID != former.VMID {
				t.Fatalf("number %d", sb.VMID)
			}
			for _, id := range []string{name, "1000"} {
				if list := sandboxtest.Must(w.Snaps.Snapshots(ctx, id))(t); len(list) != 0 {
					t.Errorf("%s: %+v", id, list)
				}
				_, err := w.Snaps.DeleteSnapshot(ctx, id, "kept")
				sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
				_, err = w.Svc.Create(ctx, agentlab.SandboxRequest{Name: "copy", From: id + "/kept"})
				sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
			}
			sandboxtest.Must(w.Svc.Destroy(ctx, sb.VMID))(t)
			w.Until(sb.VMID, agentlab.SandboxDestroyed)
			// The row still has the number.
			_, err := w.Snaps.DeleteSnapshot(ctx, "1000", "kept")
			sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
			if err := w.Store.DeleteSandbox(ctx, sb.VMID); err != nil {
				t.Fatal(err)
			}
		}
		sandboxtest.Must(w.Snaps.DeleteSnapshot(ctx, "play", "kept"))(t)
		w.UntilNoSnapshots()
	})
}

// Which secrets a sandbox has that was recovered without its profile is not known:
// it is not saved, also if it was recovered after the request.
func TestSnapshotOfRecovered(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Ready("play")
		lose := func() {
			sandboxtest.Must(w.Store.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
				sb.Profile = agentlab.ProfileLost
				return nil, nil
			}))(t)
		}
		w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, Times: 1, Hook: func(backend.Spec) { lose() }, Err: agentlab.Errorf(agentlab.CodeBusy, "locked")})
		sandboxtest.Must(w.Snaps.SaveSnapshot(ctx, sb.VMID, "early", true))(t)
		w.UntilNoSnapshots()
		_, err := w.Snaps.SaveSnapshot(ctx, sb.VMID, "late", true)
		sandboxtest.WantCode(t, err, agentlab.CodeDenied)
		if agentlab.HintOf(err) == "" {
			t.Error("no hint")
		}
		_, err = w.Snaps.Fork(ctx, sb.VMID, agentlab.ForkRequest{Count: 1})
		sandboxtest.WantCode(t, err, agentlab.CodeDenied)
	})
}

// What happens to the snapshots of a sandbox that is destroyed, and by retention.
func TestSnapshotRetention(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Ready("play")
		w.Save(sb, "plain", false)
		w.Save(sb, "kept", true)
		if n, err := w.Snaps.ExpireSnapshots(ctx, time.Now().Add(-time.Minute)); n != 0 || err != nil {
			t.Errorf("%d are expired, %v", n, err)
		}
		w.Save(sb, "old", false)
		time.Sleep(time.Minute)
		young := w.Save(sb, "young", false)
		if n, err := w.Snaps.ExpireSnapshots(ctx, young.SavedAt); n != 2 || err != nil {
			t.Errorf("%d are expired, %v", n, err)
		}
		w.UntilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 2 })
		sandboxtest.Must(w.Svc.Destroy(ctx, sb.VMID))(t)
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		w.UntilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 1 && list[0].Name == "kept" })
		w.Restart()
		time.Sleep(time.Hour)
		copied := w.Until(w.Create(agentlab.SandboxRequest{Name: "copy", From: "play/kept"}).VMID, agentlab.SandboxReady)
		if copied.From.Sandbox != sb.UID {
			t.Errorf("%+v", copied.From)
		}
		if list, err := w.Snaps.Snapshots(ctx, "play"); len(list) != 1 || err != nil {
			t.Errorf("%v, %v", list, err)
		}
		sandboxtest.Must(w.Snaps.DeleteSnapshot(ctx, fmt.Sprint(sb.VMID), "kept"))(t)
		w.UntilNoSnapshots()
	})
}

// A snapshot on the backend that no row knows is never deleted.
func TestForeignSnapshotStays(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Ready("play")
		if _, err := w.Host.Open().SaveSnapshot(ctx, backend.RefOf(sb), "foreign"); err != nil {
			t.Fatal(err)
		}
		w.Restart()
		sandboxtest.Must(w.Svc.Destroy(ctx, sb.VMID))(t)
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		time.Sleep(time.Hour)
		if left, err := w.Host.Open().Snapshots(ctx); len(left) != 1 || err != nil {
			t.Errorf("%v, %v", left, err)
		}
	})
}

// What fails for good is given up, with the reason; the sandbox is as before.
func TestSnapshotFails(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Ready("play")
		w.Save(sb, "clean", false)
		full := agentlab.Errorf(agentlab.CodeNoSpace, "the disk is full")
		w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, At: fake.Half, Times: 1, Err: full})
		sandboxtest.Must(w.Snaps.SaveSnapshot(ctx, sb.VMID, "big", false))(t)
		w.UntilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 1 })
		w.Host.Inject(fake.Fault{Op: fake.OpRestoreSnapshot, Times: 1, Err: full})
		sandboxtest.Must(w.Snaps.RestoreSnapshot(ctx, sb.VMID, "clean"))(t)
		got := w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Restoring == "" })
		if got.State != agentlab.SandboxReady || got.Desired != agentlab.DesiredRunning || w.Power(got) != backend.PowerRunning {
			t.Errorf("%+v, power %s", got, w.Power(got))
		}
		w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, Times: 3, Err: agentlab.Errorf(agentlab.CodeBusy, "locked").WithHint("unlock it")})
		w.Save(sb, "later", false)
		waits := slices.DeleteFunc(w.Events(agentlab.EventSandboxSnapshot), func(e agentlab.Event) bool { return !strings.Contains(e.Message, "waits: ") })
		if len(waits) != 1 || !strings.Contains(waits[0].Message, "snapshot later of sandbox play waits: ") || !strings.Contains(waits[0].Message, "locked") || !strings.Contains(waits[0].Message, "unlock it") {
			t.Errorf("while it is locked: %+v", waits)
		}
	})
}
