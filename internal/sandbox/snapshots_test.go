package sandbox_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

func (w *world) guest(sb agentlab.Sandbox) *control.Client {
	return control.New(func(ctx context.Context) (net.Conn, error) {
		return w.host.Open().DialControl(ctx, backend.RefOf(sb))
	})
}

func (w *world) health(sb agentlab.Sandbox) guestapi.Health {
	w.Helper()
	h, err := w.guest(sb).Health(context.Background())
	if err != nil {
		w.Fatal(err)
	}
	return h
}

// sh runs a script in a guest and returns what it prints.
func (w *world) sh(sb agentlab.Sandbox, script string) string {
	w.Helper()
	c, err := w.guest(sb).Exec(context.Background(), guestapi.ExecRequest{Command: []string{"sh", "-c", script}})
	if err != nil {
		w.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // it was only read
	var out strings.Builder
	for r := stream.NewReader(c); ; {
		typ, data, err := r.Next()
		if err != nil {
			w.Fatal(err)
		}
		switch typ {
		case stream.Stdout:
			out.Write(data)
		case stream.Exit:
			return strings.TrimSpace(out.String())
		}
	}
}

func (w *world) ready(name string) agentlab.Sandbox {
	w.Helper()
	return w.until(w.create(agentlab.SandboxRequest{Name: name}).VMID, agentlab.SandboxReady)
}

// untilSnapshots lets time pass until the snapshots, of both kinds, are as wanted.
func (w *world) untilSnapshots(cond func([]agentlab.Snapshot) bool) {
	w.Helper()
	for begin := time.Now(); ; time.Sleep(time.Second) {
		list, err := w.store.Snapshots(context.Background(), agentlab.SnapshotFilter{})
		if err != nil {
			w.Fatal(err)
		}
		if cond(list) {
			return
		}
		if time.Since(begin) > 2*time.Hour {
			w.Fatalf("after two hours the snapshots are %+v", list)
		}
	}
}

// save saves a snapshot and waits for it.
func (w *world) save(sb agentlab.Sandbox, name string, keep bool) agentlab.Snapshot {
	w.Helper()
	n, err := w.snaps.SaveSnapshot(context.Background(), sb.VMID, name, keep)
	if err != nil {
		w.Fatal(err)
	}
	return w.saved(n)
}

func (w *world) saved(n agentlab.Snapshot) agentlab.Snapshot {
	w.Helper()
	w.untilSnapshots(func(list []agentlab.Snapshot) bool {
		for _, now := range list {
			if now.UID == n.UID && now.State == agentlab.SnapshotReady {
				n = now
				return true
			}
		}
		return false
	})
	return n
}

func (w *world) untilNoSnapshots() {
	w.Helper()
	w.untilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 0 })
	left, err := w.host.Open().Snapshots(context.Background())
	if err != nil || len(left) != 0 {
		w.Errorf("the backend still has %v, %v", left, err)
	}
}

// crashes arms a crash of the driver's process, and returns a function that waits
// for it and restarts the daemon.
func (w *world) crashes(op fake.Op, at fake.Point) (restart func()) {
	dead := make(chan struct{})
	w.host.Inject(fake.Fault{Op: op, At: at, Times: 1, Crash: true, Hook: func(backend.Spec) { close(dead) }})
	return func() {
		w.Helper()
		select {
		case <-dead:
		case <-time.After(time.Hour):
			w.Fatalf("%s %s was not called", op, at)
		}
		w.restart()
	}
}

func TestSnapshotRestore(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.ready("play")
		w.sh(sb, "echo one > file")
		before := w.health(sb)
		n := w.save(sb, "clean", false)
		if !n.Memory || n.Bytes <= 0 || n.Kind != agentlab.SnapshotSaved || n.Image != sb.Image {
			t.Errorf("%+v", n)
		}
		if got := w.get(sb.VMID); got.State != agentlab.SandboxReady || w.power(got) != backend.PowerRunning {
			t.Errorf("its source is %s", got.State)
		}
		for _, state := range []string{"running", "suspended", "on disk", "stopped", "crashed"} {
			w.sh(w.get(sb.VMID), "echo two > file")
			switch state {
			case "suspended":
				must(w.svc.Suspend(ctx, sb.VMID, false))(t)
				w.until(sb.VMID, agentlab.SandboxSuspended)
			case "on disk":
				w.suspendToDisk(sb)
			case "stopped":
				must(w.svc.Stop(ctx, sb.VMID, 0))(t)
				w.until(sb.VMID, agentlab.SandboxStopped)
			case "crashed":
				if err := w.host.CrashVM(backend.RefOf(sb), "power cut"); err != nil {
					t.Fatal(err)
				}
				w.until(sb.VMID, agentlab.SandboxFailed)
			}
			must(w.snaps.RestoreSnapshot(ctx, sb.VMID, "clean"))(t)
			got := w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
				return sb.Restoring == "" && sb.State == agentlab.SandboxReady
			})
			h := w.health(got)
			if h.BootID != before.BootID || h.Identity != sb.UID || w.sh(got, "cat file") != "one" {
				t.Errorf("%s: boot %s, identity %s, file %q", state, h.BootID, h.Identity, w.sh(got, "cat file"))
			}
			if got.UID != sb.UID || got.Name != sb.Name || !got.LeaseExpiresAt.Equal(sb.LeaseExpiresAt) || got.Reason != "" || got.OnDisk || got.IP == "" {
				t.Errorf("%s: %+v", state, got)
			}
		}
		w.destroyAll()
		w.untilNoSnapshots()
	})
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// A snapshot of a stopped sandbox has no memory: restored, the sandbox is
// STOPPED.
func TestSnapshotOfStopped(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.ready("play")
		w.sh(sb, "echo one > file")
		must(w.svc.Stop(ctx, sb.VMID, 0))(t)
		w.until(sb.VMID, agentlab.SandboxStopped)
		if n := w.save(sb, "off", false); n.Memory {
			t.Error("it has memory")
		}
		must(w.svc.Start(ctx, sb.VMID))(t)
		w.until(sb.VMID, agentlab.SandboxReady)
		w.sh(sb, "echo two > file")
		must(w.snaps.RestoreSnapshot(ctx, sb.VMID, "off"))(t)
		w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
			return sb.Restoring == "" && sb.State == agentlab.SandboxStopped && sb.Desired == agentlab.DesiredStopped
		})
		must(w.svc.Start(ctx, sb.VMID))(t)
		w.until(sb.VMID, agentlab.SandboxReady)
		if got := w.sh(sb, "cat file"); got != "one" {
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
				inWorld(t, func(w *world) {
					ctx := context.Background()
					sb := w.ready("play")
					w.sh(sb, "echo one > file")
					boot, restart := w.boot(sb), w.crashes(op, at)
					n := must(w.snaps.SaveSnapshot(ctx, sb.VMID, "clean", false))(t)
					if op == fake.OpSaveSnapshot {
						restart()
					}
					w.saved(n)
					w.sh(w.get(sb.VMID), "echo two > file")
					must(w.snaps.RestoreSnapshot(ctx, sb.VMID, "clean"))(t)
					if op == fake.OpRestoreSnapshot || op == fake.OpResume {
						restart()
					}
					got := w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
						return sb.Restoring == "" && sb.State == agentlab.SandboxReady
					})
					if w.boot(got) != boot || w.sh(got, "cat file") != "one" {
						t.Errorf("boot %s, file %q", w.boot(got), w.sh(got, "cat file"))
					}
					must(w.snaps.DeleteSnapshot(ctx, "play", "clean"))(t)
					if op == fake.OpDeleteSnapshot {
						restart()
					}
					w.untilNoSnapshots()
					if got := w.get(sb.VMID); got.State != agentlab.SandboxReady {
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
			inWorld(t, func(w *world) {
				ctx := context.Background()
				src := w.ready("play")
				w.sh(src, "echo one > file")
				w.save(src, "clean", false)
				again := func() {}
				if name != "" {
					again = w.crashes(restart.op, restart.at)
				}
				sb := w.create(agentlab.SandboxRequest{Name: "copy", From: "play/clean"})
				again()
				got := w.until(sb.VMID, agentlab.SandboxReady)
				h := w.health(got)
				if h.BootID != w.boot(src) || h.Identity != got.UID || w.sh(got, "cat file") != "one" {
					t.Errorf("boot %s, identity %s, file %q", h.BootID, h.Identity, w.sh(got, "cat file"))
				}
				if got.From.Name != "play/clean" || got.Profile != src.Profile || got.UID == src.UID {
					t.Errorf("%+v", got)
				}
				must(w.svc.Stop(ctx, got.VMID, 0))(t)
				w.until(got.VMID, agentlab.SandboxStopped)
				must(w.snaps.DeleteSnapshot(ctx, "play", "clean"))(t)
				w.untilNoSnapshots()
				must(w.svc.Start(ctx, got.VMID))(t) // the snapshot is not needed any more
				w.until(got.VMID, agentlab.SandboxReady)
				if w.boot(got) == h.BootID || w.sh(got, "cat file") != "one" {
					t.Error("it did not boot from its own disk")
				}
				w.destroyAll()
			})
		})
	}
}

func TestSnapshotRefusals(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.quota.Count = 2
		w.begin()
		ctx := context.Background()
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		_, err := w.snaps.SaveSnapshot(ctx, sb.VMID, "early", false)
		wantCode(t, err, agentlab.CodeConflict)
		w.until(sb.VMID, agentlab.SandboxReady)
		for _, name := range []string{"", "A B", "../x"} {
			_, err = w.snaps.SaveSnapshot(ctx, sb.VMID, name, false)
			wantCode(t, err, agentlab.CodeInvalid)
		}
		w.save(sb, "one", false)
		_, err = w.snaps.SaveSnapshot(ctx, sb.VMID, "one", false)
		wantCode(t, err, agentlab.CodeExists)
		w.save(sb, "two", false)
		_, err = w.snaps.SaveSnapshot(ctx, sb.VMID, "three", false)
		wantCode(t, err, agentlab.CodeLimit)
		_, err = w.snaps.RestoreSnapshot(ctx, sb.VMID, "none")
		wantCode(t, err, agentlab.CodeNotFound)
		_, err = w.snaps.DeleteSnapshot(ctx, "play", "none")
		wantCode(t, err, agentlab.CodeNotFound)
		_, err = w.snaps.Snapshots(ctx, "ghost")
		wantCode(t, err, agentlab.CodeNotFound)
		for field, r := range map[string]agentlab.SandboxRequest{
			"resources.cores":     {From: "play/one", Cores: 2},
			"resources.memory_mb": {From: "play/one", MemoryMB: 1024},
			"image":               {From: "play/one", Image: "agents"},
			"from_snapshot":       {From: "play"},
		} {
			_, err := w.svc.Create(ctx, r)
			wantCode(t, err, agentlab.CodeInvalid)
			if !strings.Contains(err.Error(), field) {
				t.Errorf("%s: %v", field, err)
			}
		}
		_, err = w.svc.Create(ctx, agentlab.SandboxRequest{From: "play/none"})
		wantCode(t, err, agentlab.CodeNotFound)
		must(w.snaps.DeleteSnapshot(ctx, "play", "one"))(t)
		w.untilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 1 })
		w.save(sb, "three", false)
		other := w.ready("other")
		_, err = w.snaps.RestoreSnapshot(ctx, other.VMID, "two")
		wantCode(t, err, agentlab.CodeNotFound)
	})
}

// A backend without snapshots refuses all that needs them.
func TestNoSnapshots(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.plain = true
		w.begin()
		ctx := context.Background()
		sb := w.ready("play")
		_, err := w.snaps.SaveSnapshot(ctx, sb.VMID, "one", false)
		wantCode(t, err, agentlab.CodeUnsupported)
		_, err = w.snaps.RestoreSnapshot(ctx, sb.VMID, "one")
		wantCode(t, err, agentlab.CodeUnsupported)
		_, err = w.svc.Create(ctx, agentlab.SandboxRequest{From: "play/one"})
		wantCode(t, err, agentlab.CodeUnsupported)
		_, err = w.snaps.Fork(ctx, sb.VMID, agentlab.ForkRequest{Count: 1})
		wantCode(t, err, agentlab.CodeUnsupported)
	})
}

// A sandbox that has received secrets is not saved, also if it receives them while
// it is saved.
func TestSnapshotOfSecrets(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.ready("play")
		w.host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, At: fake.Half, Times: 1, Hook: func(backend.Spec) { w.received.Store(sb.UID, true) }})
		must(w.snaps.SaveSnapshot(ctx, sb.VMID, "late", true))(t)
		w.untilNoSnapshots()
		_, err := w.snaps.SaveSnapshot(ctx, sb.VMID, "later", true)
		wantCode(t, err, agentlab.CodeDenied)
		refused := false
		for _, e := range w.events(agentlab.EventSandboxSnapshot) {
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
			inWorld(t, func(w *world) {
				w.kill()
				w.limits.AuditEvery = time.Hour // does not wake the step
				w.begin()
				ctx := context.Background()
				sb := w.ready("play")
				if state == agentlab.SandboxSuspended {
					must(w.svc.Suspend(ctx, sb.VMID, false))(t)
					w.until(sb.VMID, state)
				}
				w.host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, At: fake.Half, Times: 1, Block: make(chan struct{})})
				n := must(w.snaps.SaveSnapshot(ctx, sb.VMID, "clean", false))(t)
				time.Sleep(time.Second)
				began := time.Now()
				wantPolicySoon(w, sb.VMID, 100*time.Millisecond)
				if got := w.saved(n); got.SavedAt.Sub(began) > 100*time.Millisecond {
					t.Errorf("it was saved after %s", got.SavedAt.Sub(began))
				}
				if got := w.get(sb.VMID); got.State != state {
					t.Errorf("the sandbox is %s", got.State)
				}
			})
		})
	}
}

// A name and a number never mean a snapshot of their former owner while a sandbox
// has them.
func TestSnapshotOfFormerOwner(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.limits.VMIDFirst, w.limits.VMIDLast = 1000, 1000
		w.begin()
		ctx := context.Background()
		former := w.ready("play")
		w.save(former, "kept", true)
		must(w.svc.Destroy(ctx, former.VMID))(t)
		w.until(former.VMID, agentlab.SandboxDestroyed)
		for _, id := range []string{"play", "1000"} {
			if n := must(w.snaps.FindSnapshot(ctx, id, "kept"))(t); n.SandboxUID != former.UID {
				t.Errorf("%s: %+v", id, n)
			}
		}
		if err := w.store.DeleteSandbox(ctx, former.VMID); err != nil {
			t.Fatal(err)
		}
		// Its number is reused, then its name too.
		for _, name := range []string{"other", "play"} {
			sb := w.ready(name)
			if sb.VMID != former.VMID {
				t.Fatalf("number %d", sb.VMID)
			}
			for _, id := range []string{name, "1000"} {
				if list := must(w.snaps.Snapshots(ctx, id))(t); len(list) != 0 {
					t.Errorf("%s: %+v", id, list)
				}
				_, err := w.snaps.DeleteSnapshot(ctx, id, "kept")
				wantCode(t, err, agentlab.CodeNotFound)
				_, err = w.svc.Create(ctx, agentlab.SandboxRequest{Name: "copy", From: id + "/kept"})
				wantCode(t, err, agentlab.CodeNotFound)
			}
			must(w.svc.Destroy(ctx, sb.VMID))(t)
			w.until(sb.VMID, agentlab.SandboxDestroyed)
			// The row still has the number.
			_, err := w.snaps.DeleteSnapshot(ctx, "1000", "kept")
			wantCode(t, err, agentlab.CodeNotFound)
			if err := w.store.DeleteSandbox(ctx, sb.VMID); err != nil {
				t.Fatal(err)
			}
		}
		must(w.snaps.DeleteSnapshot(ctx, "play", "kept"))(t)
		w.untilNoSnapshots()
	})
}

// Which secrets a sandbox has that was recovered without its profile is not known:
// it is not saved, also if it was recovered after the request.
func TestSnapshotOfRecovered(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.ready("play")
		lose := func() {
			must(w.store.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
				sb.Profile = agentlab.ProfileLost
				return nil, nil
			}))(t)
		}
		w.host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, Times: 1, Hook: func(backend.Spec) { lose() }, Err: agentlab.Errorf(agentlab.CodeBusy, "locked")})
		must(w.snaps.SaveSnapshot(ctx, sb.VMID, "early", true))(t)
		w.untilNoSnapshots()
		_, err := w.snaps.SaveSnapshot(ctx, sb.VMID, "late", true)
		wantCode(t, err, agentlab.CodeDenied)
		if agentlab.HintOf(err) == "" {
			t.Error("no hint")
		}
		_, err = w.snaps.Fork(ctx, sb.VMID, agentlab.ForkRequest{Count: 1})
		wantCode(t, err, agentlab.CodeDenied)
	})
}

// What happens to the snapshots of a sandbox that is destroyed, and by retention.
func TestSnapshotRetention(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.ready("play")
		w.save(sb, "plain", false)
		w.save(sb, "kept", true)
		if n, err := w.snaps.ExpireSnapshots(ctx, time.Now().Add(-time.Minute)); n != 0 || err != nil {
			t.Errorf("%d are expired, %v", n, err)
		}
		w.save(sb, "old", false)
		time.Sleep(time.Minute)
		young := w.save(sb, "young", false)
		if n, err := w.snaps.ExpireSnapshots(ctx, young.SavedAt); n != 2 || err != nil {
			t.Errorf("%d are expired, %v", n, err)
		}
		w.untilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 2 })
		must(w.svc.Destroy(ctx, sb.VMID))(t)
		w.until(sb.VMID, agentlab.SandboxDestroyed)
		w.untilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 1 && list[0].Name == "kept" })
		w.restart()
		time.Sleep(time.Hour)
		copied := w.until(w.create(agentlab.SandboxRequest{Name: "copy", From: "play/kept"}).VMID, agentlab.SandboxReady)
		if copied.From.Sandbox != sb.UID {
			t.Errorf("%+v", copied.From)
		}
		if list, err := w.snaps.Snapshots(ctx, "play"); len(list) != 1 || err != nil {
			t.Errorf("%v, %v", list, err)
		}
		must(w.snaps.DeleteSnapshot(ctx, fmt.Sprint(sb.VMID), "kept"))(t)
		w.untilNoSnapshots()
	})
}

// A snapshot on the backend that no row knows is never deleted.
func TestForeignSnapshotStays(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.ready("play")
		if _, err := w.host.Open().SaveSnapshot(ctx, backend.RefOf(sb), "foreign"); err != nil {
			t.Fatal(err)
		}
		w.restart()
		must(w.svc.Destroy(ctx, sb.VMID))(t)
		w.until(sb.VMID, agentlab.SandboxDestroyed)
		time.Sleep(time.Hour)
		if left, err := w.host.Open().Snapshots(ctx); len(left) != 1 || err != nil {
			t.Errorf("%v, %v", left, err)
		}
	})
}

// What fails for good is given up, with the reason; the sandbox is as before.
func TestSnapshotFails(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.ready("play")
		w.save(sb, "clean", false)
		full := agentlab.Errorf(agentlab.CodeNoSpace, "the disk is full")
		w.host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, At: fake.Half, Times: 1, Err: full})
		must(w.snaps.SaveSnapshot(ctx, sb.VMID, "big", false))(t)
		w.untilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 1 })
		w.host.Inject(fake.Fault{Op: fake.OpRestoreSnapshot, Times: 1, Err: full})
		must(w.snaps.RestoreSnapshot(ctx, sb.VMID, "clean"))(t)
		got := w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Restoring == "" })
		if got.State != agentlab.SandboxReady || got.Desired != agentlab.DesiredRunning || w.power(got) != backend.PowerRunning {
			t.Errorf("%+v, power %s", got, w.power(got))
		}
		w.host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, Times: 3, Err: agentlab.Errorf(agentlab.CodeBusy, "locked").WithHint("unlock it")})
		w.save(sb, "later", false)
		waits := slices.DeleteFunc(w.events(agentlab.EventSandboxSnapshot), func(e agentlab.Event) bool { return !strings.Contains(e.Message, "waits: ") })
		if len(waits) != 1 || !strings.Contains(waits[0].Message, "snapshot later of sandbox play waits: ") || !strings.Contains(waits[0].Message, "locked") || !strings.Contains(waits[0].Message, "unlock it") {
			t.Errorf("while it is locked: %+v", waits)
		}
	})
}
