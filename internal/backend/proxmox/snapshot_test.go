package proxmox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// snapUID is the UID of the nth snapshot.
func snapUID(n int) string { return testUID(500 + n) }

// running creates and starts a sandbox.
func (w *world) running(t testing.TB, n int) backend.Spec {
	t.Helper()
	spec := w.create(t, n)
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
	return spec
}

func (w *world) saveSnapshot(t testing.TB, spec backend.Spec, n int) backend.Snapshot {
	t.Helper()
	s, err := w.driver.SaveSnapshot(t.Context(), spec.Ref(), snapUID(n))
	ok(t, "SaveSnapshot", err)
	return s
}

func (w *world) snapshots(t testing.TB) []backend.Snapshot {
	t.Helper()
	all, err := w.driver.Snapshots(t.Context())
	ok(t, "Snapshots", err)
	return all
}

func refTo(spec backend.Spec, n int) backend.SnapshotRef {
	return backend.SnapshotRef{UID: snapUID(n), Of: spec.Ref()}
}

// A snapshot is saved, listed, restored and deleted, on each kind of storage.
func TestSnapshotLife(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		for _, storage := range slices.Sorted(maps.Keys(storages)) {
			if shell && storage != "dir" {
				continue
			}
			t.Run(storage, func(t *testing.T) {
				w := newWorld(t, worldConfig{storage: storage, shell: shell})
				d, spec := w.driver, w.create(t, 1)
				if s := w.saveSnapshot(t, spec, 1); s.Memory || s.Partial || s.Spec == nil || s.Spec.UID != spec.UID || s.Saved.IsZero() {
					t.Errorf("of a stopped one: %+v", s)
				}
				ok(t, "Start", d.Start(t.Context(), spec.Ref()))
				saved := w.saveSnapshot(t, spec, 2)
				if !saved.Memory || saved.Ref.Of.UID != spec.UID || saved.Ref.UID != snapUID(2) {
					t.Errorf("of a running one: %+v", saved)
				}
				calls := w.node.TotalCalls()
				if again := w.saveSnapshot(t, spec, 2); again.Saved != saved.Saved {
					t.Errorf("saved again: %+v", again)
				}
				if n := w.node.TotalCalls() - calls; n > 3 {
					t.Errorf("a snapshot that exists took %d calls", n)
				}
				if w.inspect(t, spec.Ref()).Power != backend.PowerRunning {
					t.Error("it does not run any more")
				}
				w.create(t, 2) // has none, and is not asked about
				w.node.ResetCalls()
				if all := w.snapshots(t); len(all) != 2 || w.node.TotalCalls() != 1 {
					t.Errorf("%d calls list %+v", w.node.TotalCalls(), all)
				}
				ok(t, "Restore", d.RestoreSnapshot(t.Context(), refTo(spec, 2)))
				if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerRunning || in.IP == "" {
					t.Errorf("after the restore: %+v", in)
				}
				ok(t, "Delete", d.DeleteSnapshot(t.Context(), refTo(spec, 2)))
				ok(t, "Delete again", d.DeleteSnapshot(t.Context(), refTo(spec, 2)))
				ok(t, "Restore the first", d.RestoreSnapshot(t.Context(), refTo(spec, 1)))
				if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerStopped {
					t.Errorf("after the restore of one without memory: %+v", in)
				}
				ok(t, "Start", d.Start(t.Context(), spec.Ref()))
				w.saveSnapshot(t, spec, 3)
				ok(t, "Destroy", d.Destroy(t.Context(), spec.Ref()))
				ok(t, "Delete of a sandbox that is gone", d.DeleteSnapshot(t.Context(), refTo(spec, 3)))
				ok(t, "Destroy", d.Destroy(t.Context(), w.spec(2).Ref()))
				if left := w.left(t); len(left) > 0 || len(w.snapshots(t)) > 0 {
					t.Errorf("left: %q", left)
				}
			})
		}
	})
}

// ZFS returns only to the newest snapshot. The error names the newer ones, and
// nothing has changed.
func TestRestoreOfOlderSnapshot(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		spec := w.running(t, 1)
		for n := range 3 {
			w.saveSnapshot(t, spec, n)
		}
		err := w.driver.RestoreSnapshot(t.Context(), refTo(spec, 0))
		wantCode(t, "Restore", err, agentlab.CodeConflict)
		if hint := agentlab.HintOf(err); !strings.Contains(hint, snapUID(1)+", "+snapUID(2)) || strings.Contains(hint, snapUID(0)) {
			t.Errorf("%v (%s)", err, hint)
		}
		if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerRunning {
			t.Errorf("%+v", in)
		}
		disk := volumesOf(w.node.Config(spec.VMID), spec.VMID)
		i := slices.IndexFunc(disk, func(v string) bool { return !isCloudInit(v) })
		w.node.ZFSSnapshot(disk[i], "backup")
		err = w.driver.RestoreSnapshot(t.Context(), refTo(spec, 2))
		wantCode(t, "Restore below a snapshot of zfs", err, agentlab.CodeConflict)
		if !strings.Contains(agentlab.HintOf(err), "zfs list -t snapshot") {
			t.Errorf("%v (%s)", err, agentlab.HintOf(err))
		}
	})
}

// A snapshot of another user is neither listed nor changed.
func TestForeignSnapshots(t *testing.T) {
	w := newWorld(t, worldConfig{storage: "lvmthin"})
	spec := w.running(t, 1)
	path := w.vmPath(spec.VMID) + "/snapshot"
	for _, s := range []struct{ name, description string }{
		{"mine", ""}, {snapshotName(snapUID(1)), "mine"}, {snapshotName(snapUID(2)), w.driver.snapshotMark(snapUID(1), idOf(spec))},
	} {
		ok(t, "snapshot", w.admin(t, pve.Post, path, map[string][]string{"snapname": {s.name}, "description": {s.description}}))
	}
	w.saveSnapshot(t, spec, 3)
	if all := w.snapshots(t); len(all) != 1 || all[0].Ref.UID != snapUID(3) {
		t.Errorf("%+v", all)
	}
	for n := 1; n <= 2; n++ {
		_, err := w.driver.SaveSnapshot(t.Context(), spec.Ref(), snapUID(n))
		wantCode(t, "Save", err, agentlab.CodeExists)
		wantCode(t, "Restore", w.driver.RestoreSnapshot(t.Context(), refTo(spec, n)), agentlab.CodeNotFound)
		ok(t, "Delete", w.driver.DeleteSnapshot(t.Context(), refTo(spec, n)))
	}
	if file := w.node.ConfigFile(spec.VMID); strings.Count(file, "\n[") != 4 {
		t.Errorf("the configuration is\n%s", file)
	}
	wantCode(t, "Restore of none", w.driver.RestoreSnapshot(t.Context(), refTo(spec, 9)), agentlab.CodeNotFound)
	// The VM of another user with the number has a snapshot with our name.
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	untouched := w.foreign(t, spec.VMID, "theirs", nil)
	ok(t, "Delete", w.driver.DeleteSnapshot(t.Context(), refTo(spec, 3)))
	_, err := w.driver.SaveSnapshot(t.Context(), spec.Ref(), snapUID(3))
	wantCode(t, "Save", err, agentlab.CodeNotFound)
	untouched(t)
}

// A disk without snapshots, a full storage and a missing privilege are errors
// that say so, and leave nothing.
func TestSnapshotRefused(t *testing.T) {
	w := newWorld(t, worldConfig{storage: "lvmthin"})
	spec := w.running(t, 1)
	w.node.Fill("local-lvm", true)
	_, err := w.driver.SaveSnapshot(t.Context(), spec.Ref(), snapUID(1))
	wantCode(t, "Save on a full storage", err, agentlab.CodeNoSpace)
	w.node.Fill("local-lvm", false)
	w.node.Fail("snapshot.volume", pvenode.Fault{Error: "lvcreate snapshot 'pve/snap' error:   Cannot create new thin volume, free space in thin pool pve/data reached threshold."})
	_, err = w.driver.SaveSnapshot(t.Context(), spec.Ref(), snapUID(1))
	wantCode(t, "Save", err, agentlab.CodeNoSpace)
	if all := w.snapshots(t); len(all) > 0 || len(w.node.Volumes(spec.VMID)) != 2 {
		t.Errorf("left: %+v, %q", all, w.node.Volumes(spec.VMID))
	}
	h, err := w.driver.readHandle(spec.Ref())
	if ok(t, "read", err); len(h.Snapshots) > 0 {
		t.Errorf("%+v", h.Snapshots)
	}
	unlock := w.node.Lock(spec.VMID)
	_, err = w.driver.SaveSnapshot(t.Context(), spec.Ref(), snapUID(1))
	wantCode(t, "Save of a VM in use", err, agentlab.CodeBusy)
	unlock()
	w.saveSnapshot(t, spec, 1)
	unlock = w.node.Lock(spec.VMID)
	wantCode(t, "Delete", w.driver.DeleteSnapshot(t.Context(), refTo(spec, 1)), agentlab.CodeBusy)
	wantCode(t, "Restore", w.driver.RestoreSnapshot(t.Context(), refTo(spec, 1)), agentlab.CodeBusy)
	unlock()
	ok(t, "Restore", w.driver.RestoreSnapshot(t.Context(), refTo(spec, 1)))

	// Raw files: full clones of a template with a raw disk are raw too.
	w = newWorld(t, worldConfig{storage: "dir", alter: func(c *Config) { c.FullClone = true }})
	w.node.AddTemplate(t, pvenode.Template{VMID: 9100, Storage: "disks", Format: "raw"})
	w.node.Grant("/vms/9100", "agentlab@pve", roleOf(1))
	w.node.Grant("/vms/9100", w.tokenID, roleOf(1))
	raw := w.spec(1)
	raw.Image, err = w.driver.Templates().Ensure(t.Context(), templateImage(9100), nil)
	ok(t, "Ensure", err)
	ok(t, "Create", w.driver.Create(t.Context(), raw))
	_, err = w.driver.SaveSnapshot(t.Context(), raw.Ref(), snapUID(1))
	wantCode(t, "Save of a raw file", err, agentlab.CodeUnsupported)
	if agentlab.HintOf(err) == "" {
		t.Error(err)
	}
}

// A VM with a disk that was attached manually is not saved: a rollback would
// replace the content of that disk too.
func TestSnapshotOfChangedVM(t *testing.T) {
	w := newWorld(t, worldConfig{})
	spec := w.create(t, 1)
	volume := w.node.AddVolume(t, "local-zfs", 9999, "vm-9999-ws", 1<<20)
	w.node.Edit(spec.VMID, map[string]string{"scsi1": volume + ",size=1M"})
	_, err := w.driver.SaveSnapshot(t.Context(), spec.Ref(), snapUID(1))
	wantCode(t, "Save", err, agentlab.CodeDenied)
}

// The network policy is in force before the rollback, which may start the guest.
// It is that of today, not that of the snapshot.
func TestRestoreEnforcesThePresentPolicy(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		spec := w.running(t, 1)
		w.saveSnapshot(t, spec, 1)
		off := agentlab.Network{Mode: agentlab.NetworkOff}
		ok(t, "UpdateNetwork", w.driver.UpdateNetwork(t.Context(), spec.Ref(), off))
		w.farm.mu.Lock()
		w.farm.order = nil
		clear(w.farm.put)
		w.farm.mu.Unlock()
		put := false
		w.node.Fail("qmrollback", pvenode.Fault{Reached: func() {
			w.farm.mu.Lock()
			defer w.farm.mu.Unlock()
			put = w.farm.put[idOf(spec)].Network.Mode == agentlab.NetworkOff
		}})
		ok(t, "Restore", w.driver.RestoreSnapshot(t.Context(), refTo(spec, 1)))
		if !put {
			t.Error("the policy was not in force when the rollback began")
		}
		if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerRunning || in.Spec.Network.Mode != agentlab.NetworkOff {
			t.Errorf("%+v", in)
		}

		w.farm.notReady = agentlab.Errorf(agentlab.CodeUnavailable, "no rules")
		w.node.ResetCalls()
		wantCode(t, "Restore without a network", w.driver.RestoreSnapshot(t.Context(), refTo(spec, 1)), agentlab.CodeUnavailable)
		for call, n := range w.node.Calls() {
			if strings.Contains(call, "rollback") {
				t.Errorf("%d calls %s", n, call)
			}
		}
	})
}

// A guest with memory runs at once with the configuration of its snapshot. If
// that is not the present one, nothing is rolled back. Without memory, the
// present configuration replaces it before a start.
func TestRestoreOfOtherConfiguration(t *testing.T) {
	w := newWorld(t, worldConfig{})
	spec := w.create(t, 1)
	w.saveSnapshot(t, spec, 1)
	firewall := func(on bool) {
		w.alter = func(c *Config) { c.Firewall = on }
		w.open()
	}
	firewall(true)
	ok(t, "Restore without memory", w.driver.RestoreSnapshot(t.Context(), refTo(spec, 1)))
	if net := w.node.Config(spec.VMID)["net0"]; !strings.Contains(net, "firewall=1") {
		t.Errorf("net0 is %s", net)
	}
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
	w.farm.mu.Lock()
	port := w.farm.put[idOf(spec)].Port
	w.farm.mu.Unlock()
	if port != portOf(spec.VMID, true) {
		t.Errorf("the rules are for port %s", port)
	}
	w.saveSnapshot(t, spec, 2)
	firewall(false)
	err := w.driver.RestoreSnapshot(t.Context(), refTo(spec, 2))
	wantCode(t, "Restore with memory", err, agentlab.CodeDenied)
	if !strings.Contains(err.Error(), "net0") || !w.node.Running(spec.VMID) {
		t.Error(err)
	}
	if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerRunning {
		t.Errorf("%+v", in)
	}
}

// A task that is killed leaves a lock and a partial snapshot. Over the shell the
// driver removes both; a token cannot remove the lock, and the hint says how.
func TestSnapshotTaskKilled(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		for _, point := range []string{"snapshot.alloc", "snapshot.state", "snapshot.volume", "snapshot.commit", "delsnapshot.volume", "rollback.volume", "rollback.config", "rollback.start"} {
			t.Run(point, func(t *testing.T) {
				w := newWorld(t, worldConfig{shell: shell, storage: "lvmthin"})
				d, spec := w.driver, w.running(t, 1)
				call := func() error { _, err := d.SaveSnapshot(t.Context(), spec.Ref(), snapUID(1)); return err }
				switch {
				case strings.HasPrefix(point, "delsnapshot"):
					w.saveSnapshot(t, spec, 1)
					call = func() error { return d.DeleteSnapshot(t.Context(), refTo(spec, 1)) }
				case strings.HasPrefix(point, "rollback"):
					w.saveSnapshot(t, spec, 1)
					call = func() error { return d.RestoreSnapshot(t.Context(), refTo(spec, 1)) }
				}
				w.node.Fail(point, pvenode.Fault{Kill: true})
				wantCode(t, "the killed call", call(), agentlab.CodeUnknownOutcome)
				d = w.open()
				w.checkKilled(t, spec, point)
				err := call()
				if agentlab.CodeOf(err) == agentlab.CodeDenied && !shell {
					hint := fmt.Sprintf("qm unlock %d", spec.VMID)
					if point == "snapshot.alloc" {
						hint = "pvesm free local-lvm:vm-1001-state-"
						w.node.Grant("/storage/local-lvm", "agentlab@pve", "PVEDatastoreAdmin")
						w.node.Grant("/storage/local-lvm", w.tokenID, "PVEDatastoreAdmin")
					}
					if !strings.Contains(agentlab.HintOf(err), hint) {
						t.Errorf("%v (%s)", err, agentlab.HintOf(err))
					}
					w.node.Edit(spec.VMID, map[string]string{"lock": ""})
					err = call()
				}
				ok(t, "again", err)
				all := w.snapshots(t)
				if want := !strings.HasPrefix(point, "delsnapshot"); (len(all) == 1) != want || want && all[0].Partial {
					t.Errorf("%+v", all)
				}
				if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerRunning {
					t.Errorf("%+v", in)
				}
				ok(t, "Destroy", d.Destroy(t.Context(), spec.Ref()))
				if left := w.left(t); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			})
		}
	})
}

// checkKilled checks what is known of a sandbox after a killed task.
func (w *world) checkKilled(t *testing.T, spec backend.Spec, point string) {
	t.Helper()
	want := backend.PowerRunning
	if strings.HasPrefix(point, "rollback") {
		want = backend.PowerPartial
		wantCode(t, "Start", w.driver.Start(t.Context(), spec.Ref()), agentlab.CodeUnavailable)
		wantCode(t, "Delete", w.driver.DeleteSnapshot(t.Context(), refTo(spec, 1)), agentlab.CodeConflict)
		if all, err := w.driver.List(t.Context()); err != nil || len(all) != 1 || all[0].Power != want {
			t.Errorf("%+v, %v", all, err)
		}
	}
	if in := w.inspect(t, spec.Ref()); in.Power != want || want == backend.PowerPartial && in.Reason == "" {
		t.Errorf("after %s: %+v", point, in)
	}
	for _, s := range w.snapshots(t) {
		if s.Partial == strings.HasPrefix(point, "rollback") || s.Partial && s.Spec != nil {
			t.Errorf("after %s: %+v", point, s)
		}
	}
}

// A sandbox whose restore failed at its end is partial until a restore succeeds,
// and can be destroyed.
func TestRestoreFails(t *testing.T) {
	w := newWorld(t, worldConfig{})
	spec := w.running(t, 1)
	w.saveSnapshot(t, spec, 1)
	w.node.Fail("rollback.start", pvenode.Fault{Error: "start failed: QEMU exited with code 1"})
	wantCode(t, "Restore", w.driver.RestoreSnapshot(t.Context(), refTo(spec, 1)), agentlab.CodeInternal)
	if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerPartial {
		t.Errorf("%+v", in)
	}
	wantCode(t, "DialControl", inspectErrOf(w.driver.DialControl(t.Context(), spec.Ref())), agentlab.CodeUnavailable)
	ok(t, "Restore again", w.driver.RestoreSnapshot(t.Context(), refTo(spec, 1)))
	if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerRunning {
		t.Errorf("%+v", in)
	}
}

// The driver's process dies at any of its points, and the next one completes the
// call or destroys the sandbox.
func TestSnapshotCrashPoints(t *testing.T) {
	change := []string{"snapshot change about to be sent", "snapshot change sent", "snapshot change noted"}
	for deed, points := range map[string][]string{
		"save": change, "delete": append(slices.Clone(change), "snapshot deleted"),
		"restore": append(slices.Clone(change), "network in force for the restore", "rolled back"),
		"revert":  append(slices.Clone(change), "rolled back", "configured after the restore"),
	} {
		for _, point := range points {
			for _, then := range []string{"again", "destroy"} {
				t.Run(deed+"/"+point+"/"+then, func(t *testing.T) {
					w := newWorld(t, worldConfig{storage: "lvmthin"})
					spec := w.create(t, 1)
					if deed == "revert" { // of a snapshot without memory
						w.saveSnapshot(t, spec, 1)
					}
					ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
					if deed == "restore" || deed == "delete" {
						w.saveSnapshot(t, spec, 1)
					}
					ctx := t.Context()
					deeds := map[string]func() error{
						"save":    func() error { _, err := w.driver.SaveSnapshot(ctx, spec.Ref(), snapUID(1)); return err },
						"delete":  func() error { return w.driver.DeleteSnapshot(ctx, refTo(spec, 1)) },
						"restore": func() error { return w.driver.RestoreSnapshot(ctx, refTo(spec, 1)) },
					}
					deeds["revert"] = deeds["restore"]
					if !w.dies(point, deeds[deed]) {
						t.Fatal("the point was not reached")
					}
					d := w.open()
					w.inspect(t, spec.Ref())
					w.snapshots(t)
					if then == "again" {
						ok(t, deed, deeds[deed]())
						want := map[string]backend.PowerState{"revert": backend.PowerStopped}[deed]
						if in := w.inspect(t, spec.Ref()); want != "" && in.Power != want || want == "" && in.Power != backend.PowerRunning {
							t.Errorf("%+v", in)
						}
						if all := w.snapshots(t); len(all) != map[bool]int{true: 0, false: 1}[deed == "delete"] {
							t.Errorf("%+v", all)
						}
					}
					ok(t, "Destroy", d.Destroy(ctx, spec.Ref()))
					if left := w.left(t); len(left) > 0 {
						t.Errorf("left: %q", left)
					}
				})
			}
		}
	}
}

// dies reports whether the driver's process died at a point of a call.
func (w *world) dies(point string, call func() error) bool {
	w.driver.crash = func(at string) {
		if at == point {
			panic(died{at})
		}
	}
	var err error
	func() {
		defer survive(&err)
		err = call()
	}()
	_, dead := err.(died)
	return dead
}

// inspectErrOf is the error of a call with two results.
func inspectErrOf[T any](_ T, err error) error { return err }

// A call whose answer was lost may still have been carried out: the next one
// waits for it.
func TestSnapshotAnswerLost(t *testing.T) {
	w := newWorld(t, worldConfig{storage: "lvmthin"})
	spec := w.running(t, 1)
	w.node.Fail("POST /nodes/{node}/qemu/{vmid}/snapshot done", pvenode.Fault{Lost: true})
	hold := make(chan struct{})
	w.node.Fail("qmsnapshot", pvenode.Fault{Hold: hold})
	_, err := w.driver.SaveSnapshot(t.Context(), spec.Ref(), snapUID(1))
	wantCode(t, "Save", err, agentlab.CodeUnknownOutcome)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var looks atomic.Int64
	disarm := w.node.Fail("GET /nodes/{node}/tasks", pvenode.Fault{Times: -1, Reached: func() {
		if looks.Add(1) == 3 { // the task was seen before
			cancel()
		}
	}})
	_, err = w.open().SaveSnapshot(ctx, spec.Ref(), snapUID(1))
	wantCode(t, "Save while it is saved", err, agentlab.CodeBusy)
	disarm()
	close(hold)
	w.saveSnapshot(t, spec, 1)
	if n := strings.Count(w.node.ConfigFile(spec.VMID), "\n["); n != 1 {
		t.Errorf("%d snapshots", n)
	}
}

// Destroying a VM succeeds even if Proxmox cannot free the memory of a snapshot:
// the sandbox is then not gone.
func TestMemoryOfSnapshotIsNotFreed(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, storage: "lvmthin"})
		spec := w.running(t, 1)
		w.saveSnapshot(t, spec, 1)
		volume := "local-lvm:" + memoryVolume(spec.VMID, snapUID(1))
		w.node.Busy(volume, true)
		err := w.driver.Destroy(t.Context(), spec.Ref())
		if err == nil || !strings.Contains(err.Error(), memoryVolume(spec.VMID, snapUID(1))) {
			t.Fatalf("%v", err)
		}
		w.node.Busy(volume, false)
		if !shell {
			w.node.Grant("/storage/local-lvm", "agentlab@pve", "PVEDatastoreAdmin")
			w.node.Grant("/storage/local-lvm", w.tokenID, "PVEDatastoreAdmin")
		}
		ok(t, "Destroy", w.open().Destroy(t.Context(), spec.Ref()))
		if left := w.left(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}
