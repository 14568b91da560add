package snapshot_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

func TestFork(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		src := w.Ready("play")
		w.Sh(src, "echo one > file")
		made := sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 6}))(t)
		w.Forked(src, made)
		for i, sb := range made {
			if sb.Name != fmt.Sprintf("play-%d", i+1) || sb.From.Name != "play" || sb.From.Sandbox != src.UID || sb.UID == src.UID {
				t.Errorf("%+v", sb)
			}
		}
		more := sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 1, NamePrefix: "play"}))(t)
		if more[0].Name != "play-7" {
			t.Errorf("it is named %s", more[0].Name)
		}
		w.Forked(src, more)
		w.DestroyAll()
	})
}

// The row says whether the guest of a sandbox continues that of a snapshot, or boots
// because its source was stopped.
func TestStartOfCopies(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		src := w.Ready("play")
		for _, want := range []agentlab.StartKind{agentlab.StartSnapshot, agentlab.StartBoot} {
			name := strings.ToLower(string(want))
			if want == agentlab.StartBoot {
				sandboxtest.Must(w.Svc.Stop(ctx, src.VMID, 0))(t)
				w.Until(src.VMID, agentlab.SandboxStopped)
			}
			w.Save(src, name, false)
			made := sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 1}))(t)
			for _, sb := range append(made, w.Create(agentlab.SandboxRequest{From: "play/" + name})) {
				if got := w.Until(sb.VMID, agentlab.SandboxReady); got.Start != want {
					t.Errorf("%s: start %q, want %q", got.Name, got.Start, want)
				}
			}
		}
		if got := w.Get(src.VMID); got.Start != agentlab.StartBoot {
			t.Errorf("the source: start %q", got.Start)
		}
	})
}

// Whatever step the daemon dies in, the next one completes the fork.
func TestForkAfterCrash(t *testing.T) {
	for _, tc := range []struct {
		op fake.Op
		at []fake.Point
	}{
		{fake.OpSaveSnapshot, []fake.Point{fake.Before, fake.Half, fake.After}},
		{fake.OpCreate, []fake.Point{fake.Before, fake.Half, fake.After}},
		{fake.OpStart, []fake.Point{fake.Before, fake.After}},
		{fake.OpDeleteSnapshot, []fake.Point{fake.Before, fake.Half, fake.After}},
	} {
		for _, at := range tc.at {
			t.Run(fmt.Sprintf("%s %s", tc.op, at), func(t *testing.T) {
				sandboxtest.InWorld(t, func(w *sandboxtest.World) {
					src := w.Ready("play")
					w.Sh(src, "echo one > file")
					restart := w.Crashes(tc.op, at)
					made := sandboxtest.Must(w.Snaps.Fork(context.Background(), src.VMID, agentlab.ForkRequest{Count: 3}))(t)
					restart()
					w.Forked(src, made)
					w.DestroyAll()
				})
			})
		}
	}
}

// A copy that fails says why; the others, and the source, are not affected.
func TestForkFails(t *testing.T) {
	t.Run("one", func(t *testing.T) {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			src := w.Ready("play")
			w.Host.Inject(fake.Fault{Op: fake.OpStart, Times: 1, Err: agentlab.Errorf(agentlab.CodeUnsupported, "another processor")})
			failed := 0
			for _, sb := range sandboxtest.Must(w.Snaps.Fork(context.Background(), src.VMID, agentlab.ForkRequest{Count: 3}))(t) {
				if got := w.Until(sb.VMID, agentlab.SandboxReady, agentlab.SandboxFailed); got.State == agentlab.SandboxFailed {
					failed++
					if !strings.Contains(got.Reason, "another processor") {
						t.Errorf("reason %q", got.Reason)
					}
				}
			}
			if failed != 1 {
				t.Errorf("%d failed, want 1", failed)
			}
			w.UntilNoSnapshots()
		})
	})
	t.Run("not saved", func(t *testing.T) {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			src := w.Ready("play")
			w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, At: fake.Half, Times: 1, Err: agentlab.Errorf(agentlab.CodeNoSpace, "the disk is full").WithHint("make room")})
			for _, sb := range sandboxtest.Must(w.Snaps.Fork(context.Background(), src.VMID, agentlab.ForkRequest{Count: 3}))(t) {
				if got := w.Until(sb.VMID, agentlab.SandboxDestroyed); !strings.Contains(got.Reason, "the disk is full (make room)") || !time.Now().Before(got.LeaseExpiresAt) {
					t.Errorf("reason %q", got.Reason)
				}
			}
			w.UntilNoSnapshots()
		})
	})
	t.Run("source destroyed", func(t *testing.T) {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			ctx := context.Background()
			src := w.Ready("play")
			w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, Times: 1, Block: make(chan struct{})})
			made := sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 2}))(t)
			sandboxtest.Must(w.Svc.Destroy(ctx, src.VMID))(t)
			for _, sb := range made {
				if got := w.Until(sb.VMID, agentlab.SandboxDestroyed); !strings.Contains(got.Reason, "its source play was not saved") || !time.Now().Before(got.LeaseExpiresAt) {
					t.Errorf("reason %q", got.Reason)
				}
			}
			w.UntilNoSnapshots()
		})
	})
	t.Run("copy destroyed", func(t *testing.T) {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			ctx := context.Background()
			src := w.Ready("play")
			blocked := make(chan struct{})
			w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, Times: 1, Block: blocked})
			made := sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 1}))(t)
			sandboxtest.Must(w.Svc.Destroy(ctx, made[0].VMID))(t)
			w.Until(made[0].VMID, agentlab.SandboxDestroyed)
			close(blocked)
			w.UntilNoSnapshots()
		})
	})
}

// A copy whose VM ends before it has its identity, while no daemon runs, has lost
// its memory: it fails, and does not boot as if its guest had never run.
func TestForkLosesItsMemory(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		src := w.Ready("play")
		restart := w.Crashes(fake.OpStart, fake.After)
		made := sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 1}))(t)
		w.UntilIt(made[0].VMID, func(agentlab.Sandbox) bool { return w.Power(made[0]) == backend.PowerRunning })
		if err := w.Host.CrashVM(backend.RefOf(made[0]), "killed"); err != nil {
			t.Fatal(err)
		}
		restart()
		got := w.Until(made[0].VMID, agentlab.SandboxFailed, agentlab.SandboxReady)
		if got.State != agentlab.SandboxFailed || !strings.Contains(got.Reason, "lost its saved memory") {
			t.Errorf("%s: %s", got.State, got.Reason)
		}
		w.UntilNoSnapshots()
	})
}

// The limits are checked before anything starts, and nothing is left of a fork
// that exceeds them.
func TestForkLimits(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Limits.MaxSandboxes = 3
		w.Begin()
		ctx := context.Background()
		src := w.Create(agentlab.SandboxRequest{Name: "play"})
		_, err := w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 1})
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		w.Until(src.VMID, agentlab.SandboxReady)
		for _, n := range []int{0, -1, agentlab.MaxFork + 1} {
			_, err = w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: n})
			sandboxtest.WantCode(t, err, agentlab.CodeInvalid)
		}
		_, err = w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 1, NamePrefix: "A B"})
		sandboxtest.WantCode(t, err, agentlab.CodeInvalid)
		_, err = w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 3})
		sandboxtest.WantCode(t, err, agentlab.CodeLimit)
		if all := sandboxtest.Must(w.Svc.List(ctx, agentlab.SandboxFilter{Destroyed: true}))(t); len(all) != 1 || w.Host.Calls(fake.OpSaveSnapshot) != 0 {
			t.Errorf("%d sandboxes, %d calls", len(all), w.Host.Calls(fake.OpSaveSnapshot))
		}
		w.UntilNoSnapshots()
		sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 2}))(t)
	})
}

// When the database was lost, a snapshot for a fork of one of our sandboxes is
// deleted when it is a day old. All others stay, and are reported.
func TestSnapshotsWithoutRow(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		gone := w.Ready("gone")
		src := w.Create(agentlab.SandboxRequest{Name: "play", TTL: 48 * time.Hour})
		src = w.Until(src.VMID, agentlab.SandboxReady)
		w.Sh(src, "echo one > file")
		driver := w.Host.Open()
		save := func(sb agentlab.Sandbox, uid string) string {
			sandboxtest.Must(driver.SaveSnapshot(ctx, backend.RefOf(sb), uid))(t)
			return uid
		}
		fork, kept, forkOfGone := save(src, agentlab.NewForkUID()), save(src, agentlab.NewUID()), save(gone, agentlab.NewForkUID())
		sandboxtest.Must(w.Svc.Destroy(ctx, gone.VMID))(t)
		w.Until(gone.VMID, agentlab.SandboxDestroyed)
		foreign := backend.Spec{VMID: 4000, UID: agentlab.NewUID(), Name: "foreign", Image: src.Image, Resources: src.Resources, Network: src.Network}
		if err := driver.Create(ctx, foreign); err != nil {
			t.Fatal(err)
		}
		unowned := save(agentlab.Sandbox{UID: foreign.UID}, agentlab.NewForkUID())
		left := func() (uids []string) {
			for _, n := range sandboxtest.Must(driver.Snapshots(ctx))(t) {
				uids = append(uids, n.Ref.UID)
			}
			return uids
		}
		finding := func() string {
			for _, f := range w.Snaps.Findings() {
				if f.Name == "orphaned snapshots" {
					return f.Detail
				}
			}
			return ""
		}
		time.Sleep(2 * time.Hour)
		if got := left(); len(got) != 4 || !strings.Contains(finding(), "4 snapshots") {
			t.Fatalf("after two hours: %q (%s)", got, finding())
		}
		time.Sleep(24 * time.Hour)
		w.UntilSnapshots(func(list []agentlab.Snapshot) bool { return len(list) == 0 })
		if got := left(); slices.Contains(got, fork) || slices.Contains(got, forkOfGone) || !slices.Contains(got, kept) || !slices.Contains(got, unowned) {
			t.Errorf("after a day: %q", got)
		}
		if !strings.Contains(finding(), "2 snapshots") {
			t.Errorf("after a day: %s", finding())
		}
		events := 0
		for _, e := range w.Events(agentlab.EventDrift) {
			if strings.Contains(e.Data, `"snapshot":true`) {
				events++
			}
		}
		if events != 4 {
			t.Errorf("%d events", events)
		}
		sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 1}))(t)
		w.UntilSnapshots(func(list []agentlab.Snapshot) bool {
			for _, n := range list {
				if !agentlab.IsForkUID(n.UID) {
					t.Errorf("the snapshot of a fork is %s", n.UID)
				}
			}
			return len(list) == 0
		})
		for _, uid := range []string{kept, unowned} {
			_ = driver.DeleteSnapshot(ctx, backend.SnapshotRef{UID: uid})
		}
	})
}

// A fork is admitted like a new sandbox, before anything is stored.
func TestForkIsAdmitted(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		src := w.Ready("play")
		for what, test := range map[string]struct {
			code   agentlab.Code
			change func(bool)
		}{
			"no room":    {agentlab.CodeNoSpace, w.Full.Store},
			"not usable": {agentlab.CodeUnavailable, w.Broken.Store},
			"not valid": {agentlab.CodeUnsupported, func(on bool) { // as after a change of the backend's configuration
				cores := map[bool]int{true: 65, false: src.Resources.Cores}[on]
				_, err := w.Store.UpdateSandbox(context.Background(), src.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
					sb.Resources.Cores = cores
					return nil, nil
				})
				if err != nil {
					t.Fatal(err)
				}
			}},
		} {
			test.change(true)
			_, err := w.Snaps.Fork(context.Background(), src.VMID, agentlab.ForkRequest{Count: 2})
			if agentlab.CodeOf(err) != test.code {
				t.Errorf("%s: %v, want code %s", what, err, test.code)
			}
			test.change(false)
		}
		if all := sandboxtest.Must(w.Svc.List(context.Background(), agentlab.SandboxFilter{Destroyed: true}))(t); len(all) != 1 || w.Host.Calls(fake.OpSaveSnapshot) != 0 {
			t.Errorf("%d sandboxes, %d calls", len(all), w.Host.Calls(fake.OpSaveSnapshot))
		}
		w.UntilNoSnapshots()
	})
}

// A fork of a sandbox with secrets is recorded, and its copies have received them
// too: they cannot be saved.
func TestForkOfSecrets(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		src := w.Ready("play")
		// They are delivered after the request.
		w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, At: fake.Half, Times: 1, Hook: func(backend.Spec) { w.Received.Store(src.UID, true) }})
		for range 2 {
			made := sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 1}))(t)
			w.Until(made[0].VMID, agentlab.SandboxReady)
			_, err := w.Snaps.SaveSnapshot(ctx, made[0].VMID, "one", false)
			sandboxtest.WantCode(t, err, agentlab.CodeDenied)
		}
		recorded := 0
		for _, e := range w.Events(agentlab.EventSandboxForked) {
			if strings.Contains(e.Data, `"received_secrets":true`) {
				recorded++
			}
		}
		if recorded != 2 {
			t.Errorf("%d events record it, want 2", recorded)
		}
	})
}

// mute is a driver on which the guests of sandboxes whose names begin with "mute"
// accept connections and do not answer.
type mute struct{ *fake.Driver }

func (d mute) DialControl(ctx context.Context, ref backend.Ref) (net.Conn, error) {
	if in, err := d.Inspect(ctx, ref); err != nil || !strings.HasPrefix(in.Name, "mute") {
		return d.Driver.DialControl(ctx, ref)
	}
	return sandboxtest.Silent{Calls: &atomic.Int32{}}.DialControl(ctx, ref)
}

// Copies whose guests do not answer do not delay other starts. They end soon, and
// then copies of other sandboxes start.
func TestSilentCopiesDelayNoStart(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		w.Wrap = func(d backend.Driver) backend.Driver { return mute{d.(*fake.Driver)} }
		w.Restart()
		src, other := w.Ready("play"), w.Ready("other")
		began := time.Now()
		made := sandboxtest.Must(w.Snaps.Fork(ctx, src.VMID, agentlab.ForkRequest{Count: 40, NamePrefix: "mute"}))(t)
		w.Until(made[0].VMID, agentlab.SandboxBooting)
		asked := time.Now()
		w.Until(w.Create(agentlab.SandboxRequest{}).VMID, agentlab.SandboxReady)
		if took := time.Since(asked); took > 5*time.Second { // a boot takes 2 s
			t.Errorf("another sandbox was ready after %s", took)
		}
		more := sandboxtest.Must(w.Snaps.Fork(ctx, other.VMID, agentlab.ForkRequest{Count: 1}))(t)
		for _, sb := range made {
			if got := w.Until(sb.VMID, agentlab.SandboxReady, agentlab.SandboxFailed); got.State != agentlab.SandboxFailed || !strings.Contains(got.Reason, "did not answer within") {
				t.Errorf("%s is %s: %s", sb.Name, got.State, got.Reason)
			}
		}
		if took := time.Since(began); took > 3*time.Minute { // the first 4 in a minute, then 4 in 10 s
			t.Errorf("the last copy has failed after %s", took)
		}
		w.Until(more[0].VMID, agentlab.SandboxReady)
		w.UntilNoSnapshots()
	})
}

// A copy that boots has all that the guest of its source had written to files, also what
// the source had not yet written to its disk.
func TestCopyThatBootsHasRecentFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := sandboxtest.NewWorldOn(t, fake.Config{BootDelay: 2 * time.Second, NoForks: true})
		src := w.Ready("play")
		w.Sh(src, "echo saved > unwritten")
		w.Save(src, "clean", false)
		w.Sh(src, "echo forked > unwritten")
		made := sandboxtest.Must(w.Snaps.Fork(context.Background(), src.VMID, agentlab.ForkRequest{Count: 1}))(t)
		made = append(made, w.Create(agentlab.SandboxRequest{From: "play/clean"}))
		for i, want := range []string{"forked", "saved"} {
			w.Until(made[i].VMID, agentlab.SandboxReady)
			if got := w.Sh(made[i], "cat written"); got != want {
				t.Errorf("%s has %q, want %q", made[i].Name, got, want)
			}
		}
		if got := w.Unsynced(); len(got) != 0 {
			t.Errorf("events say that it is not so: %q", got)
		}
	})
}

// A guest that does not write its disks is saved, and the event of the snapshot says what
// a copy lacks, also if a later try of the same save had an answer.
func TestSaveOfSilentGuest(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		src := w.Ready("play")
		silent := agentlab.Errorf(agentlab.CodeUnavailable, "the guest does not answer")
		w.Host.Inject(fake.Fault{Op: fake.OpDialControl, Times: 1, Err: silent})
		w.Host.Inject(fake.Fault{Op: fake.OpSaveSnapshot, At: fake.After, Times: 1, Err: agentlab.Errorf(agentlab.CodeUnknownOutcome, "the answer was lost")})
		w.Save(src, "clean", false)
		got := w.Unsynced()
		if len(got) != 1 || !strings.Contains(got[0], "snapshot clean of sandbox play is SAVED, but its guest had not written its disks") || !strings.Contains(got[0], silent.Error()) {
			t.Errorf("%q", got)
		}
		w.Save(src, "next", false) // a snapshot of its own
		if got := w.Unsynced(); len(got) != 1 {
			t.Errorf("%q", got)
		}
		sandboxtest.Must(w.Svc.Suspend(context.Background(), src.VMID, false))(t)
		w.Until(src.VMID, agentlab.SandboxSuspended)
		w.Host.Inject(fake.Fault{Op: fake.OpDialControl, Times: 1, Err: silent})
		w.Save(src, "paused", false) // it wrote its disks before
		if got := w.Unsynced(); len(got) != 1 {
			t.Errorf("%q", got)
		}
	})
}
