package workspace

import (
	"context"
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a backend with a database, on which services come and go.
type world struct {
	*testing.T
	path   string
	host   *fake.Host
	driver *fake.Driver
	store  *store.Store
	limits Limits
	*Service
	stop func()
}

func newWorld(t *testing.T) *world {
	t.Helper()
	host, err := fake.NewHost(fake.Config{})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, path: filepath.Join(t.TempDir(), "agentlab.db"), host: host}
	t.Cleanup(func() {
		w.kill()
		_ = host.Close()
	})
	storetest.Create(t, w.path)
	w.begin()
	return w
}

// begin starts the daemon's part: store, driver and service.
func (w *world) begin() {
	w.Helper()
	var err error
	if w.store, err = store.Open(context.Background(), w.path, store.Options{}); err != nil {
		w.Fatal(err)
	}
	w.driver = w.host.Open()
	w.Service = New(Config{Store: w.store, Leases: w.store, Fleet: fleet.Single(w.driver, nil), Limits: w.limits})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Service.Run(ctx) }()
	w.stop = func() {
		cancel()
		if err := errors.Join(<-ended, w.driver.Close(), w.store.Close()); err != nil {
			w.Error(err)
		}
	}
}

// kill ends the daemon's part. The backend keeps what it has.
func (w *world) kill() {
	if w.stop != nil {
		w.stop()
		w.stop = nil
	}
}

// settled waits until no step has anything to do but to wait for a time.
func (w *world) settled() { synctest.Wait() }

func (w *world) must(v agentlab.Workspace, err error) agentlab.Workspace {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
	w.settled()
	return w.row(v.ID)
}

func (w *world) row(id string) agentlab.Workspace {
	w.Helper()
	v, err := w.store.Workspace(w.Context(), id)
	if err != nil {
		w.Fatal(err)
	}
	return v
}

func (w *world) is(v agentlab.Workspace, state agentlab.WorkspaceState) {
	w.Helper()
	if v.State != state {
		w.Fatalf("%s is %s (%s), want %s", v.Name, v.State, v.Reason, state)
	}
}

func (w *world) refused(err error, code agentlab.Code) {
	w.Helper()
	if agentlab.CodeOf(err) != code {
		w.Errorf("error %v has code %q, want %q", err, agentlab.CodeOf(err), code)
	}
}

func (w *world) save(v agentlab.Workspace, name string) agentlab.WorkspaceSnapshot {
	w.Helper()
	if _, err := w.SaveSnapshot(w.Context(), v.ID, name, ""); err != nil {
		w.Fatal(err)
	}
	w.settled()
	n, err := w.findSnapshot(w.Context(), v, name)
	if err != nil || n.State != agentlab.WorkspaceSnapshotReady {
		w.Fatalf("%+v, %v", n, err)
	}
	return n
}

// volumeUIDs returns the UIDs of the volumes on the backend.
func (w *world) volumeUIDs() (out []string) {
	w.Helper()
	list, err := w.driver.ListVolumes(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	for _, v := range list {
		if v.Partial {
			w.Errorf("volume %s is partial: %s", v.Ref.UID, v.Reason)
		}
		out = append(out, v.Ref.UID)
	}
	return out
}

// inBubble runs a test with a clock of its own.
func inBubble(t *testing.T, fn func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { fn(t, newWorld(t)) })
}

func TestLifeOfAWorkspace(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 8}))
		w.is(v, agentlab.WorkspaceReady)
		if v.Storage != fake.StorageDefault || v.Handle == "" || v.SizeGB != 8 || v.ReadyAt.IsZero() {
			t.Errorf("%+v", v)
		}
		n := w.save(v, "small")
		v = w.must(w.Resize(ctx, "data", 16))
		w.is(v, agentlab.WorkspaceReady)
		if v.SizeGB != 16 || n.SizeGB != 8 {
			t.Errorf("%+v, %+v", v, n)
		}
		if v = w.must(w.RestoreSnapshot(ctx, "data", "small")); v.SizeGB != 8 {
			t.Errorf("%+v", v)
		}
		a, b := w.must(w.Fork(ctx, "data", "a", "")), w.must(w.Fork(ctx, v.ID, "b", "small"))
		w.is(a, agentlab.WorkspaceReady)
		w.is(b, agentlab.WorkspaceReady)
		if b.From.Name != "data/small" || len(w.volumeUIDs()) != 3 {
			t.Errorf("%+v", b)
		}
		if _, err := w.DeleteSnapshot(ctx, "data", "small"); err != nil {
			t.Fatal(err)
		}
		w.settled()
		if list, err := w.Snapshots(ctx, "data"); err != nil || len(list) != 0 {
			t.Errorf("%+v, %v", list, err)
		}
		w.is(w.must(w.Delete(ctx, "data", false)), agentlab.WorkspaceTrashed)
		if uids := w.volumeUIDs(); len(uids) != 3 {
			t.Errorf("%q", uids)
		}
		w.is(w.must(w.Undelete(ctx, "data", "")), agentlab.WorkspaceReady)
		if _, err := w.Delete(ctx, "data", true); err != nil {
			t.Fatal(err)
		}
		w.settled()
		_, err := w.Get(ctx, v.ID)
		w.refused(err, agentlab.CodeNotFound)
		if uids := w.volumeUIDs(); slices.Contains(uids, v.UID) || len(uids) != 2 {
			t.Errorf("%q", uids)
		}
	})
}

// A daemon that dies at any point of an operation finishes it after its restart, and
// leaves no volume and no snapshot behind.
func TestCrashAtEachPoint(t *testing.T) {
	ready := agentlab.WorkspaceReady
	for _, tc := range []struct {
		op      fake.Op
		request func(w *world, id string) error
		want    agentlab.WorkspaceState // of the workspace; "" means that it is deleted
		volumes int
		sizeGB  int
	}{
		{fake.OpCreateVolume, func(w *world, _ string) error {
			_, err := w.Create(w.Context(), agentlab.WorkspaceSelection{Workspace: "new", SizeGB: 1})
			return err
		}, ready, 2, 8},
		{fake.OpGrowVolume, func(w *world, id string) error { _, err := w.Resize(w.Context(), id, 12); return err }, ready, 1, 12},
		{fake.OpSnapshotVolume, func(w *world, id string) error { _, err := w.SaveSnapshot(w.Context(), id, "new", ""); return err }, ready, 1, 8},
		{fake.OpRestoreVolume, func(w *world, id string) error { _, err := w.RestoreSnapshot(w.Context(), id, "old"); return err }, ready, 1, 4},
		{fake.OpCloneVolume, func(w *world, id string) error { _, err := w.Fork(w.Context(), id, "new", ""); return err }, ready, 2, 8},
		{fake.OpCloneVolume, func(w *world, id string) error { _, err := w.Fork(w.Context(), id, "new", "old"); return err }, ready, 2, 8},
		{fake.OpDeleteVolumeSnapshot, func(w *world, id string) error { _, err := w.DeleteSnapshot(w.Context(), id, "old"); return err }, ready, 1, 8},
		{fake.OpDeleteVolume, func(w *world, id string) error { _, err := w.Delete(w.Context(), id, true); return err }, "", 0, 0},
	} {
		for _, at := range []fake.Point{fake.Before, fake.Half, fake.After} {
			if tc.op == fake.OpGrowVolume && at == fake.Half {
				continue // the fake has no such point
			}
			t.Run(string(tc.op)+"/"+string(at), func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					v := w.must(w.Create(t.Context(), agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
					w.save(v, "old")
					v = w.must(w.Resize(t.Context(), v.ID, 8))
					crashed := false
					w.host.Inject(fake.Fault{Op: tc.op, At: at, Times: 1, Crash: true, Hook: func(backend.Spec) { crashed = true }})
					if err := tc.request(w, v.ID); err != nil {
						t.Fatal(err)
					}
					w.settled()
					w.kill()
					if !crashed {
						t.Fatal("the driver did not crash")
					}
					w.begin()
					w.settled()
					w.checkAfterCrash(v, tc.want, tc.volumes, tc.sizeGB)
				})
			})
		}
	}
}

func (w *world) checkAfterCrash(v agentlab.Workspace, want agentlab.WorkspaceState, volumes, sizeGB int) {
	w.Helper()
	rows, err := w.store.Workspaces(w.Context())
	if err != nil || len(rows) != volumes {
		w.Fatalf("%d rows, %v", len(rows), err)
	}
	uids := w.volumeUIDs()
	snapshots := 0
	for _, row := range rows {
		w.is(row, agentlab.WorkspaceReady)
		if !slices.Contains(uids, row.UID) {
			w.Errorf("workspace %s has no volume", row.Name)
		}
		list, err := w.Snapshots(w.Context(), row.ID)
		if err != nil {
			w.Fatal(err)
		}
		for _, n := range list {
			if n.State != agentlab.WorkspaceSnapshotReady {
				w.Errorf("snapshot %s is %s", n.Name, n.State)
			}
		}
		snapshots += len(list)
	}
	saved, err := w.driver.VolumeSnapshots(w.Context())
	if err != nil || len(saved) != snapshots || len(uids) != volumes {
		w.Errorf("%d snapshots on the backend, %d rows; %d volumes, want %d; %v", len(saved), snapshots, len(uids), volumes, err)
	}
	if want != "" {
		if now := w.row(v.ID); now.SizeGB != sizeGB || now.State != want {
			w.Errorf("%+v", now)
		}
	}
}

// A snapshot that was requested before a restoration is saved before it.
func TestSnapshotBeforeRestore(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		w.save(v, "old")
		v = w.must(w.Resize(ctx, v.ID, 8))
		free := w.host.Inject(fake.Fault{Op: fake.OpSnapshotVolume, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the storage is offline")})
		if _, err := w.SaveSnapshot(ctx, v.ID, "new", ""); err != nil {
			t.Fatal(err)
		}
		w.is(w.must(w.RestoreSnapshot(ctx, v.ID, "old")), agentlab.WorkspaceRestoring)
		_, err := w.DeleteSnapshot(ctx, v.ID, "old")
		w.refused(err, agentlab.CodeConflict)
		free()
		time.Sleep(time.Minute) // of the bubble: the step is tried again
		w.settled()
		if now := w.row(v.ID); now.State != agentlab.WorkspaceReady || now.SizeGB != 4 {
			t.Errorf("%+v", now)
		}
		if n, err := w.findSnapshot(ctx, v, "new"); err != nil || n.SizeGB != 8 || n.State != agentlab.WorkspaceSnapshotReady {
			t.Errorf("%+v, %v", n, err)
		}
	})
}

// What cannot succeed ends with the reason; what may succeed later is tried again.
func TestFailures(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		broken := agentlab.Errorf(agentlab.CodeNoSpace, "the storage is full")

		w.host.Inject(fake.Fault{Op: fake.OpGrowVolume, Times: 1, Err: broken})
		if v = w.must(w.Resize(ctx, v.ID, 8)); v.State != agentlab.WorkspaceReady || v.SizeGB != 4 {
			t.Errorf("%+v", v)
		}
		w.lastEventHas(`"refused":"the storage is full"`, `"code":"no_space"`, `"failed_operation":"resize"`)

		w.host.Inject(fake.Fault{Op: fake.OpSnapshotVolume, At: fake.Half, Times: 1, Err: broken})
		if _, err := w.SaveSnapshot(ctx, v.ID, "x", ""); err != nil {
			t.Fatal(err)
		}
		w.settled()
		if list, err := w.Snapshots(ctx, v.ID); err != nil || len(list) != 0 {
			t.Errorf("%+v, %v", list, err)
		}
		if saved, err := w.driver.VolumeSnapshots(ctx); err != nil || len(saved) != 0 {
			t.Errorf("%+v, %v", saved, err)
		}

		w.host.Inject(fake.Fault{Op: fake.OpCreateVolume, At: fake.Half, Times: 1, Err: broken})
		full := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "full", SizeGB: 4}))
		w.is(full, agentlab.WorkspaceFailed)
		if !strings.Contains(full.Reason, "the storage is full") {
			t.Errorf("%q", full.Reason)
		}
		if _, err := w.Delete(ctx, "full", false); err != nil { // it has no content: it is not kept
			t.Fatal(err)
		}
		w.settled()
		if uids := w.volumeUIDs(); len(uids) != 1 {
			t.Errorf("%q", uids)
		}

		free := w.host.Inject(fake.Fault{Op: fake.OpCreateVolume, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the node does not answer")})
		late := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "late", SizeGB: 4}))
		w.is(late, agentlab.WorkspaceCreating)
		if !strings.Contains(late.Reason, "waits: the node does not answer") {
			t.Errorf("%q", late.Reason)
		}
		free()
		time.Sleep(time.Minute)
		w.settled()
		if late = w.row(late.ID); late.State != agentlab.WorkspaceReady || late.Reason != "" {
			t.Errorf("%+v", late)
		}
	})
}

// The events of finished operations have their names and how long they took, with the
// time in which the backend did not answer.
func TestOperationsAreTimed(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		w.lastEventHas(`"operation":"create"`, `"seconds":`)
		w.save(v, "x")
		w.lastEventHas(`"seconds":`)
		w.must(w.Fork(ctx, v.ID, "copy", ""))
		w.lastEventHas(`"operation":"fork"`, `"seconds":`)
		w.must(w.RestoreSnapshot(ctx, v.ID, "x"))
		w.lastEventHas(`"operation":"restore"`, `"seconds":`)

		free := w.host.Inject(fake.Fault{Op: fake.OpGrowVolume, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the node does not answer")})
		w.is(w.must(w.Resize(ctx, v.ID, 8)), agentlab.WorkspaceGrowing)
		time.Sleep(time.Minute)
		free()
		time.Sleep(time.Minute)
		w.settled()
		w.is(w.row(v.ID), agentlab.WorkspaceReady)
		var data struct {
			Operation string
			Seconds   float64
		}
		list, err := w.store.Events(ctx, agentlab.EventFilter{Tail: true, Limit: 1})
		if err == nil {
			err = json.Unmarshal([]byte(list[0].Data), &data)
		}
		if err != nil || data.Operation != "resize" || data.Seconds < 60 || data.Seconds > 120 {
			t.Errorf("%+v, %v", data, err)
		}
	})
}

// checks are the errors of the calls of Check.
type checks []error

func (c *checks) Checked(_ time.Duration, err error) { *c = append(*c, err) }

// Check reports each call.
func TestChecksAreTimed(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var calls checks
		w.cfg.Metrics = &calls
		_, none := w.Check(t.Context(), "")
		_, missing := w.Check(t.Context(), "missing")
		if len(calls) != 2 || calls[0] != none || calls[1] != missing || agentlab.CodeOf(missing) != agentlab.CodeNotFound {
			t.Errorf("%v", calls)
		}
	})
}

func (w *world) lastEventHas(parts ...string) {
	w.Helper()
	list, err := w.store.Events(w.Context(), agentlab.EventFilter{Tail: true, Limit: 1})
	if err != nil || len(list) != 1 {
		w.Fatalf("%+v, %v", list, err)
	}
	for _, part := range parts {
		if !strings.Contains(list[0].Data, part) {
			w.Errorf("%s does not contain %s", list[0].Data, part)
		}
	}
}

// A volume that is missing makes its workspace FAILED, and is never created again. One
// that cannot be looked up is not missing.
func TestMissingVolume(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		free := w.host.Inject(fake.Fault{Op: fake.OpInspectVolume, Err: agentlab.Errorf(agentlab.CodeUnavailable, "offline")})
		if _, err := w.Check(ctx, ""); err != nil {
			t.Fatal(err)
		}
		w.settled()
		w.is(w.row(v.ID), agentlab.WorkspaceReady)
		free()
		if err := w.driver.DeleteVolume(ctx, backend.VolumeRefOf(v)); err != nil {
			t.Fatal(err)
		}
		found, err := w.Check(ctx, "data")
		if err != nil || len(found) != 1 || found[0].Level != backend.LevelWarn || !strings.Contains(found[0].Detail, "missing") || found[0].Remedy == "" {
			t.Errorf("%+v, %v", found, err)
		}
		w.settled()
		w.is(w.row(v.ID), agentlab.WorkspaceFailed)
		for _, err := range []error{
			second(w.Resize(ctx, v.ID, 8)), second(w.Fork(ctx, v.ID, "copy", "")), second(w.SaveSnapshot(ctx, v.ID, "x", "")),
		} {
			w.refused(err, agentlab.CodeConflict)
		}
		w.kill()
		w.begin()
		w.settled()
		w.is(w.row(v.ID), agentlab.WorkspaceFailed)
		if len(w.volumeUIDs()) != 0 {
			t.Error("the volume was created again")
		}
		if err := w.audit(ctx, w.cfg.Fleet.Default()); err != nil {
			t.Fatal(err)
		}
		if f := w.Findings(); len(f) != 1 || f[0].Name != "failed workspaces" {
			t.Errorf("%+v", f)
		}
		if _, err := w.driver.CreateVolume(ctx, backend.VolumeSpec{UID: v.UID, SizeGB: 4}); err != nil { // the storage is back
			t.Fatal(err)
		}
		if err := w.audit(ctx, w.cfg.Fleet.Default()); err != nil {
			t.Fatal(err)
		}
		w.settled()
		w.is(w.row(v.ID), agentlab.WorkspaceReady)
	})
}

func second[T any](_ T, err error) error { return err }

// Volumes and snapshots that no row describes are reported, and not changed.
func TestUnknownVolumesStay(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		if _, err := w.driver.CreateVolume(ctx, backend.VolumeSpec{UID: "lost", SizeGB: 2}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.driver.SnapshotVolume(ctx, backend.VolumeRefOf(v), "lostsnap"); err != nil {
			t.Fatal(err)
		}
		w.kill()
		w.begin()
		w.settled()
		for range 2 {
			if err := w.audit(ctx, w.cfg.Fleet.Default()); err != nil {
				t.Fatal(err)
			}
		}
		found, err := w.Check(ctx, "")
		if err != nil || len(found) != 2 || !strings.Contains(found[0].Detail, "lostsnap") || found[1].Name != "volume lost" {
			t.Errorf("%+v, %v", found, err)
		}
		if f := w.Findings(); len(f) != 1 || f[0].Name != "orphaned volumes" {
			t.Errorf("%+v", f)
		}
		if uids := w.volumeUIDs(); !slices.Contains(uids, "lost") || len(uids) != 2 {
			t.Errorf("%q", uids)
		}
		drift, err := w.store.Events(ctx, agentlab.EventFilter{Kinds: []string{agentlab.EventDrift}, Limit: 10})
		if err != nil || len(drift) != 1 {
			t.Errorf("%+v, %v", drift, err)
		}
	})
}

// What is being copied is not changed, and deleting the copy ends that.
func TestCopyHoldsItsSource(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		w.save(v, "old")
		w.host.Inject(fake.Fault{Op: fake.OpCloneVolume, Err: agentlab.Errorf(agentlab.CodeBusy, "busy")})
		w.is(w.must(w.Fork(ctx, "data", "copy", "old")), agentlab.WorkspaceCreating)
		for _, err := range []error{
			second(w.Resize(ctx, "data", 8)), second(w.Delete(ctx, "data", false)), second(w.Delete(ctx, "data", true)),
			second(w.RestoreSnapshot(ctx, "data", "old")), second(w.DeleteSnapshot(ctx, "data", "old")),
		} {
			w.refused(err, agentlab.CodeConflict)
		}
		if _, err := w.Delete(ctx, "copy", false); err != nil {
			t.Fatal(err)
		}
		w.settled()
		w.is(w.must(w.Resize(ctx, "data", 8)), agentlab.WorkspaceReady)
		if uids := w.volumeUIDs(); len(uids) != 1 {
			t.Errorf("%q", uids)
		}
	})
}

func TestTrash(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		first := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		w.must(w.Delete(ctx, "data", false))
		time.Sleep(time.Hour)
		again := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		if got, err := w.Get(ctx, "data"); err != nil || got.ID != again.ID {
			t.Errorf("%+v, %v", got, err)
		}
		w.must(w.Delete(ctx, "data", false))
		_, err := w.Undelete(ctx, "data", "")
		w.refused(err, agentlab.CodeConflict)
		third := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		_, err = w.Undelete(ctx, first.ID, "")
		w.refused(err, agentlab.CodeExists)
		_, err = w.Undelete(ctx, third.ID, "")
		w.refused(err, agentlab.CodeConflict)
		if n, err := w.ExpireTrash(ctx, time.Now().Add(-time.Minute)); err != nil || n != 1 {
			t.Errorf("%d, %v", n, err)
		}
		w.settled()
		if uids := w.volumeUIDs(); len(uids) != 2 || slices.Contains(uids, first.UID) {
			t.Errorf("%q", uids)
		}
		w.is(w.must(w.Undelete(ctx, again.ID, "other")), agentlab.WorkspaceReady)
	})
}

func TestLimits(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		w.kill()
		w.limits = Limits{Quota: agentlab.WorkspaceQuota{Count: 2, TotalGB: 10}, SizeGB: 8}
		w.begin()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 0}))
		if v.SizeGB != 8 {
			t.Errorf("%d GiB", v.SizeGB)
		}
		for _, err := range []error{
			second(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "huge", SizeGB: 9})), second(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "more", SizeGB: 3})), second(w.Resize(ctx, "data", 9)), second(w.Fork(ctx, "data", "copy", "")),
		} {
			w.refused(err, agentlab.CodeLimit)
		}
		w.must(w.Delete(ctx, "data", false))
		w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "small", SizeGB: 2}))
		w.refused(second(w.Resize(ctx, "small", 3)), agentlab.CodeLimit) // the trash counts
		w.refused(second(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "third", SizeGB: 1})), agentlab.CodeLimit)
		if _, err := w.Delete(ctx, v.ID, true); err != nil {
			t.Fatal(err)
		}
		w.settled()
		w.is(w.must(w.Resize(ctx, "small", 8)), agentlab.WorkspaceReady)
		for name, code := range map[string]agentlab.Code{"A": agentlab.CodeInvalid, agentlab.NewWorkspaceID(): agentlab.CodeInvalid, "small": agentlab.CodeExists} {
			w.refused(second(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: name, SizeGB: 1})), code)
		}
	})
}

// A restoration to a larger size counts, also while it waits, and so does the size that
// the source of a copy has when the copy is stored.
func TestLimitsOfChangedSizes(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		w.kill()
		w.limits = Limits{Quota: agentlab.WorkspaceQuota{TotalGB: 10}}
		w.begin()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 2}))
		w.save(v, "small")
		use, err := w.PlanFork(ctx, "data", "copy", "")
		if err != nil {
			t.Fatal(err)
		}
		v = w.must(w.Resize(ctx, "data", 8))
		w.refused(second(w.add(ctx, *use.New)), agentlab.CodeLimit)
		w.save(v, "large")
		w.must(w.RestoreSnapshot(ctx, "data", "small"))
		more := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "more", SizeGB: 3}))
		w.refused(second(w.RestoreSnapshot(ctx, "data", "large")), agentlab.CodeLimit)
		if _, err := w.Delete(ctx, more.ID, true); err != nil {
			t.Fatal(err)
		}
		w.settled()
		free := w.host.Inject(fake.Fault{Op: fake.OpRestoreVolume, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the storage is offline")})
		w.is(w.must(w.RestoreSnapshot(ctx, "data", "large")), agentlab.WorkspaceRestoring)
		w.refused(second(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "more", SizeGB: 3})), agentlab.CodeLimit)
		free()
		time.Sleep(time.Hour)
		w.settled()
		if v = w.row(v.ID); v.State != agentlab.WorkspaceReady || v.SizeGB != 8 || v.GrowToGB != 0 {
			t.Errorf("%+v", v)
		}
	})
}

// plain is a driver without volumes, and other is one of another backend.
type plain struct{ backend.Driver }

type other struct{ *fake.Driver }

// onlyDetached is a driver that does not save volumes while they are attached.
type onlyDetached struct{ *fake.Driver }

func (d onlyDetached) Info() backend.Info {
	info := d.Driver.Info()
	info.Capabilities.AttachedVolumeSnapshots = false
	return info
}

func (o other) Info() backend.Info {
	info := o.Driver.Info()
	info.Name = "other"
	return info
}

func TestOtherBackends(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		v := w.must(w.Create(ctx, agentlab.WorkspaceSelection{Workspace: "data", SizeGB: 4}))
		s := New(Config{Store: w.store, Leases: w.store, Fleet: fleet.Single(plain{w.driver}, nil)})
		for _, err := range []error{second(s.Create(ctx, agentlab.WorkspaceSelection{Workspace: "x", SizeGB: 1})), second(s.Fork(ctx, "data", "x", "")), second(s.SaveSnapshot(ctx, "data", "x", "")), second(s.Check(ctx, ""))} {
			w.refused(err, agentlab.CodeUnsupported)
		}
		d := New(Config{Store: w.store, Leases: w.store, Fleet: fleet.Single(onlyDetached{w.driver}, nil)})
		err := second(d.SaveSnapshot(ctx, v.ID, "x", agentlab.ConsistencyCrash))
		w.refused(err, agentlab.CodeUnsupported)
		if hint := agentlab.HintOf(err); !strings.HasSuffix(hint, "agentlab workspace detach data") {
			t.Errorf("the hint is %q", hint)
		}
		o := New(Config{Store: w.store, Leases: w.store, Fleet: fleet.Single(other{w.driver}, nil)})
		for _, err := range []error{second(o.Resize(ctx, "data", 8)), second(o.Delete(ctx, "data", true)), second(o.Fork(ctx, "data", "x", "")), second(o.Check(ctx, "data"))} {
			w.refused(err, agentlab.CodeConflict)
		}
		if _, err := o.step(ctx, v.ID); err != nil {
			t.Error(err)
		}
		w.is(w.row(v.ID), agentlab.WorkspaceReady)
	})
}
