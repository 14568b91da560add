package qemu

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// qemuIO runs a command on a disk that no VM uses.
func qemuIO(t testing.TB, dir string, commands ...string) {
	t.Helper()
	args := []string{"-f", "qcow2"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	cmd := exec.Command("qemu-io", append(args, filepath.Join(dir, fileRoot))...)
	if out, err := cmd.CombinedOutput(); err != nil || strings.Contains(string(out), "verification failed") {
		t.Fatalf("%s: qemu-io %q: %v\n%s", dir, commands, err, out)
	}
}

// block returns a qemu-io command for the nth block of a disk; every block has a
// pattern of its own.
func block(command string, n int) string { return fmt.Sprintf("%s -P %d %dk 64k", command, n+1, 64*n) }

// layered is a stopped sandbox whose disk has n blocks in n layers, and the
// snapshots that made them.
func layered(t *testing.T, d *Driver, sp backend.Spec, n int) []backend.SnapshotRef {
	t.Helper()
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	var refs []backend.SnapshotRef
	for i := range n {
		qemuIO(t, d.dir(sp.Ref()), block("write", i))
		s, err := d.SaveSnapshot(t.Context(), sp.Ref(), agentlab.NewUID())
		if err != nil {
			t.Fatalf("snapshot %d: %v", i, err)
		}
		refs = append(refs, s.Ref)
	}
	if got, err := layersIn(d.dir(sp.Ref())); err != nil || len(got) != n {
		t.Fatalf("the disk has the layers %q, %v; want %d", got, err, n)
	}
	return refs
}

// wantBlocks checks the first n blocks of a disk, and that the next one is empty.
func wantBlocks(t *testing.T, dir string, n int) {
	t.Helper()
	var reads []string
	for i := range n {
		reads = append(reads, block("read", i))
	}
	qemuIO(t, dir, append(reads, fmt.Sprintf("read -P 0 %dk 64k", 64*n))...)
}

// sums returns the hash of every file in dir.
func sums(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, e := range entries {
		if all[e.Name()] = "directory"; !e.IsDir() {
			all[e.Name()], _ = hash(t, filepath.Join(dir, e.Name()))
		}
	}
	return all
}

// A disk with many layers gets one. Those of its snapshots do not change.
func TestLayersAreMerged(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	refs := layered(t, d, sp, mergeFrom)
	dir, kept := d.dir(sp.Ref()), filepath.Join(d.snapshots(), refs[8].UID)
	before := sums(t, kept)
	if _, err := d.SaveSnapshot(t.Context(), sp.Ref(), agentlab.NewUID()); err != nil {
		t.Fatal(err)
	}
	if got, err := layersIn(dir); err != nil || len(got) != 2 { // the merged one, and that of this snapshot
		t.Errorf("the disk has the layers %q, %v", got, err)
	}
	wantBlocks(t, dir, mergeFrom)
	if after := sums(t, kept); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("a snapshot has changed: %v, %v before", after, before)
	}
	child := f.spec(2)
	child.From, child.Resources.RootSizeGB = &refs[8], 4
	if err := d.Create(t.Context(), child); err != nil {
		t.Fatal(err)
	}
	wantBlocks(t, d.dir(child.Ref()), 9)
	if err := d.RestoreSnapshot(t.Context(), refs[3]); err != nil {
		t.Fatal(err)
	}
	wantBlocks(t, dir, 4)
	if got, err := layersIn(dir); err != nil || len(got) != 4 {
		t.Errorf("after a restoration the disk has the layers %q, %v", got, err)
	}
}

// Layers of snapshots that were deleted are merged when the sandbox starts, unless
// this would copy more than it saves, or there is no room.
func TestUnusedLayersAreMerged(t *testing.T) {
	d, f := still(t)
	for i, test := range []struct {
		name   string
		delete int    // of 4 snapshots, from the last one
		large  string // written to the first layer
		room   uint64
		layers int // that are left
	}{
		{"used", 0, "", 0, 4},
		{"one unused", 1, "", 0, 4},
		{"unused", 3, "", 0, 1},
		{"all unused", 4, "", 0, 1},
		{"large and used", 3, "write -P 99 1m 8m", 0, 4},
		{"no room", 3, "", 1 << 60, 4},
	} {
		sp := f.spec(i)
		d.cfg.PauseBelow = test.room
		if test.large != "" {
			if err := d.Create(t.Context(), sp); err != nil {
				t.Fatal(err)
			}
			qemuIO(t, d.dir(sp.Ref()), test.large)
		}
		refs := layered(t, d, sp, 4)
		kept := filepath.Join(d.snapshots(), refs[0].UID)
		for _, ref := range refs[4-test.delete:] {
			if err := d.DeleteSnapshot(t.Context(), ref); err != nil {
				t.Fatal(err)
			}
		}
		box, err := d.find(sp.UID)
		if err != nil {
			t.Fatal(err)
		}
		before := ""
		if test.delete < 4 {
			before = fmt.Sprint(sums(t, kept))
		}
		var last []string
		for range 2 { // the second time there is nothing to do
			if err := d.tidyStopped(t.Context(), box); err != nil {
				t.Error(err)
			}
			got, err := layersIn(box.Dir)
			if err != nil || len(got) != test.layers || last != nil && !slices.Equal(got, last) {
				t.Errorf("%s: the layers are %q, %v; %q before", test.name, got, err, last)
			}
			last = got
		}
		wantBlocks(t, box.Dir, 4)
		if test.delete < 4 && fmt.Sprint(sums(t, kept)) != before {
			t.Errorf("%s: the snapshot that is left has changed", test.name)
		}
	}
}

// A disk whose files are much larger than the disk is merged before it is saved.
// Otherwise it is not saved.
func TestLargeLayers(t *testing.T) {
	d, f := still(t)
	const size = 4 << 20
	if err := os.Truncate(f.Image.RootDisk, size); err != nil {
		t.Fatal(err)
	}
	sp := f.spec(1)
	refs := layered(t, d, sp, 2)
	box, err := d.find(sp.UID)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := layersIn(box.Dir)
	if err != nil {
		t.Fatal(err)
	}
	spoil(t, filepath.Join(box.Dir, layers[0]), size, bytes.Repeat([]byte{1}, maxDisks*size)) // behind the data
	save := func() error {
		_, err := d.SaveSnapshot(t.Context(), sp.Ref(), agentlab.NewUID())
		return err
	}
	d.cfg.PauseBelow = 1 << 60
	if err := save(); agentlab.CodeOf(err) != agentlab.CodeNoSpace || agentlab.HintOf(err) == "" {
		t.Errorf("%v (hint %q)", err, agentlab.HintOf(err))
	}
	d.cfg.PauseBelow = 0
	if err := save(); err != nil {
		t.Error(err)
	}
	wantBlocks(t, box.Dir, 2)
	if got, err := layersIn(box.Dir); err != nil || len(got) != 2 { // the merged one, and that of this snapshot
		t.Errorf("the layers are %q, %v", got, err)
	}
	if u, err := diskUseOf(box.Dir, nil); err != nil || u.all > size {
		t.Errorf("%+v, %v", u, err)
	}
	if err := d.RestoreSnapshot(t.Context(), refs[0]); err != nil {
		t.Error(err)
	}
	wantBlocks(t, box.Dir, 1)
}

// A start has a short time limit, which a merge does not use: it is done when the
// start begins. The VM that runs already is left alone.
func TestMergeBeforeStart(t *testing.T) {
	d, f := still(t)
	rehost(d, func(h *qemuvm.HostConfig) { h.Accel = qemuvm.AccelTCG })
	d.cfg.Supervisor = []string{"/bin/false"} // no VM is needed
	sp := f.spec(1)
	layered(t, d, sp, mergeFrom)
	dir := d.dir(sp.Ref())
	var points []string
	d.crash = func(point string) { points = append(points, point) }
	held, err := os.OpenFile(filepath.Join(dir, "shim.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = lockAsSupervisor(held)
	}
	if err != nil {
		t.Fatal(err)
	}
	box, err := d.find(sp.UID)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.tidyStopped(t.Context(), box); err != nil || len(points) > 0 {
		t.Errorf("the disk of a VM that runs: %v, %q", err, points)
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context(), sp.Ref()); err == nil {
		t.Error("it starts without a supervisor")
	}
	merged, begun := slices.Index(points, "disk merged"), slices.Index(points, "lock taken")
	if merged < 0 || begun < merged {
		t.Errorf("the order is %q", points)
	}
	wantBlocks(t, dir, mergeFrom)
}

// A process that dies while it merges layers loses nothing, and the next one
// leaves nothing behind.
func TestMergerDies(t *testing.T) {
	d, f := still(t)
	for i, point := range []string{"layers merged", "merged layer named", "disk merged", "disk frozen"} {
		sp := f.spec(i)
		layered(t, d, sp, mergeFrom)
		c := doomed{Fixed: f, Method: backendtest.MethodSaveSnapshot, Point: point, Snapshot: backend.SnapshotRef{UID: agentlab.NewUID(), Of: sp.Ref()}}
		if c.dieIn() == nil {
			t.Fatalf("%s was not reached", point)
		}
		dir := d.dir(sp.Ref())
		wantBlocks(t, dir, mergeFrom)
		if _, err := d.SaveSnapshot(t.Context(), sp.Ref(), c.Snapshot.UID); err != nil {
			t.Fatal(err)
		}
		wantBlocks(t, dir, mergeFrom)
		for name := range sums(t, dir) {
			if strings.HasSuffix(name, tmpSuffix) {
				t.Errorf("%s: %s is left", point, name)
			}
		}
		if chain, err := (diskFiles{dir: dir, image: f.Image.RootDisk, size: math.MaxInt64}).chain(); err != nil || len(chain) > 3 {
			t.Errorf("%s: the disk reads from %q, %v", point, chain, err)
		} else if got, err := layersIn(dir); err != nil || len(got) != len(chain) {
			t.Errorf("%s: the layers are %q, %v; the disk reads from %q", point, got, err, chain)
		}
	}
}

// A process that dies while it restores a sandbox leaves it as it was, or partial
// until the next call has restored it.
func TestRestorerDies(t *testing.T) {
	d, f := still(t)
	for i, point := range []string{"disk not named", "restore copied", "restore staged", "restore halted", "restored " + fileRoot, "restore done"} {
		sp := f.spec(i)
		refs := layered(t, d, sp, 4)
		dir := d.dir(sp.Ref())
		c := doomed{Fixed: f, Method: backendtest.MethodRestoreSnapshot, Point: point, Snapshot: refs[1]}
		if c.dieIn() == nil {
			t.Fatalf("%s was not reached", point)
		}
		switch in, err := d.Inspect(t.Context(), sp.Ref()); {
		case err != nil:
			t.Fatal(err)
		case in.Power == backend.PowerPartial:
			if err := d.Start(t.Context(), sp.Ref()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
				t.Errorf("%s: Start of a partial sandbox: %v", point, err)
			}
			if err := d.Stop(t.Context(), sp.Ref(), 0); err != nil {
				t.Error(err)
			}
			wantBlocks(t, dir, 2)
		case point == "restore done":
			wantBlocks(t, dir, 2)
		default:
			wantBlocks(t, dir, 4)
		}
		if err := d.RestoreSnapshot(t.Context(), refs[1]); err != nil {
			t.Error(err)
		}
		wantBlocks(t, dir, 2)
		for name := range sums(t, dir) {
			if strings.HasSuffix(name, tmpSuffix) || name == dirRestore {
				t.Errorf("%s: %s is left", point, name)
			}
		}
	}
}

// spoil changes bytes of a disk file, as a QEMU that the guest controls can.
func spoil(t *testing.T, path string, at int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		_, err = f.WriteAt(b, at)
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// reads makes the header of a disk file name another file to read from.
func reads(t *testing.T, path, name string) {
	t.Helper()
	const at = 1 << 10 // behind all that a header has
	spoil(t, path, at, []byte(name))
	spoil(t, path, 8, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, at), uint32(len(name))))
}

// The headers of disks are what a guest's QEMU wrote. A disk that would read from
// anything but its layers and its image is not merged, and no program opens what
// it names.
func TestHostileDiskIsNotMerged(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	layered(t, d, sp, mergeFrom)
	box, err := d.find(sp.UID)
	if err != nil {
		t.Fatal(err)
	}
	dir, whole := box.Dir, map[string][]byte{}
	size, err := savedSize(box.Handle, dir)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := layersIn(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(layers, fileRoot) {
		// A copy: the files have links in the snapshots.
		if whole[name], err = os.ReadFile(filepath.Join(dir, name)); err == nil {
			err = os.Remove(filepath.Join(dir, name))
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), whole[name], 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, change := range map[string]func(t *testing.T, dir string, layers []string){
		"other file":      func(t *testing.T, dir string, _ []string) { reads(t, filepath.Join(dir, fileRoot), "/etc/passwd") },
		"other directory": func(t *testing.T, dir string, l []string) { reads(t, filepath.Join(dir, fileRoot), "../"+l[0]) },
		"options": func(t *testing.T, dir string, _ []string) {
			reads(t, filepath.Join(dir, fileRoot), `json:{"driver":"nbd"}`)
		},
		"cycle": func(t *testing.T, dir string, l []string) {
			for i, from := range l {
				reads(t, filepath.Join(dir, from), l[(i+1)%len(l)])
			}
		},
		"data file":   func(t *testing.T, dir string, l []string) { spoil(t, filepath.Join(dir, l[0]), 79, []byte{4}) },
		"encryption":  func(t *testing.T, dir string, l []string) { spoil(t, filepath.Join(dir, l[0]), 35, []byte{1}) },
		"no qcow2":    func(t *testing.T, dir string, l []string) { spoil(t, filepath.Join(dir, l[0]), 0, []byte("QFJ")) },
		"long name":   func(t *testing.T, dir string, l []string) { spoil(t, filepath.Join(dir, l[0]), 16, []byte{255}) },
		"forged size": func(t *testing.T, dir string, l []string) { spoil(t, filepath.Join(dir, l[0]), 24, []byte{1}) },
		"no name":     func(t *testing.T, dir string, l []string) { spoil(t, filepath.Join(dir, l[0]), 8, []byte{127}) },
	} {
		change(t, dir, layers)
		if chain, err := (diskFiles{dir: dir, image: f.Image.RootDisk, size: size}).chain(); err == nil {
			t.Errorf("%s: it reads from %q", name, chain)
		}
		before := sums(t, dir)
		d.tidyLayers(t.Context(), box)
		if after := sums(t, dir); fmt.Sprint(after) != fmt.Sprint(before) {
			t.Errorf("%s: the disk has changed: %v, %v before", name, after, before)
		}
		for file, text := range whole {
			if err := os.WriteFile(filepath.Join(dir, file), text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	d.tidyLayers(t.Context(), box)
	if got, err := layersIn(dir); err != nil || len(got) != 1 {
		t.Errorf("the disk that was repaired has the layers %q, %v", got, err)
	}
}

// A larger copy of a disk is made without a look into what a guest's QEMU wrote.
func TestLargerCopyOfHostileDisk(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	refs := layered(t, d, sp, 1)
	dir := filepath.Join(d.snapshots(), refs[0].UID)
	layers, err := layersIn(dir)
	if err != nil {
		t.Fatal(err)
	}
	reads(t, filepath.Join(dir, layers[0]), "/nonexistent")
	child := f.spec(2)
	child.From, child.Resources.RootSizeGB = &refs[0], 4
	if err := d.Create(t.Context(), child); err != nil {
		t.Error(err)
	}
}

// A disk with too many layers, which cannot be merged, is not saved again.
func TestTooManyLayers(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	layered(t, d, sp, 1)
	dir := d.dir(sp.Ref())
	reads(t, filepath.Join(dir, fileRoot), "/etc/passwd")
	for range maxLayers - 1 {
		if err := os.WriteFile(filepath.Join(dir, newLayerName()), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ref := backend.SnapshotRef{UID: agentlab.NewUID(), Of: sp.Ref()}
	if _, err := d.SaveSnapshot(t.Context(), sp.Ref(), ref.UID); agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) == "" {
		t.Errorf("%v, want conflict and a hint", err)
	}
	if all, err := d.Snapshots(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("%+v, %v", all, err)
	}
}

// Without space on the host's disk nothing is saved, restored, created or merged,
// and nothing is lost.
func TestSnapshotsOnFullDisk(t *testing.T) {
	_, f := still(t)
	if err := os.MkdirAll(f.StateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	smalldisk.Tmpfs(t, f.StateDir, "32m")
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	sp, child := f.spec(1), f.spec(2)
	refs := layered(t, d, sp, mergeFrom)
	dir := d.dir(sp.Ref())
	qemuIO(t, dir, block("write", mergeFrom))
	child.From = &refs[3]
	smalldisk.Fill(t, f.StateDir, 64<<10)
	late := agentlab.NewUID()
	for what, call := range map[string]func() error{
		"SaveSnapshot":    func() error { _, err := d.SaveSnapshot(t.Context(), sp.Ref(), late); return err },
		"RestoreSnapshot": func() error { return d.RestoreSnapshot(t.Context(), refs[3]) },
		"Create":          func() error { return d.Create(t.Context(), child) },
	} {
		if err := call(); agentlab.CodeOf(err) != agentlab.CodeNoSpace || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %v (code %s), want no_space and a hint", what, err, agentlab.CodeOf(err))
		}
		wantBlocks(t, dir, mergeFrom+1)
		if in, err := d.Inspect(t.Context(), sp.Ref()); err != nil || in.Power != backend.PowerStopped {
			t.Errorf("%s: %+v, %v", what, in, err)
		}
	}
	if all, err := d.Snapshots(t.Context()); err != nil || len(all) != mergeFrom {
		t.Errorf("%d snapshots, %v", len(all), err)
	}
	if err := os.Remove(filepath.Join(f.StateDir, "fill")); err != nil {
		t.Fatal(err)
	}
	smalldisk.Fill(t, f.StateDir, 1<<20) // room for a snapshot, but not for a merge
	if _, err := d.SaveSnapshot(t.Context(), sp.Ref(), late); err != nil {
		t.Error(err)
	}
	wantBlocks(t, dir, mergeFrom+1)
	if got, err := layersIn(dir); err != nil || len(got) != mergeFrom+1 {
		t.Errorf("the disk has %d layers, %v", len(got), err)
	}
	if err := os.Remove(filepath.Join(f.StateDir, "fill")); err != nil {
		t.Fatal(err)
	}
	if err := d.Create(t.Context(), child); err != nil {
		t.Error(err)
	}
	wantBlocks(t, d.dir(child.Ref()), 4)
	if err := d.RestoreSnapshot(t.Context(), refs[3]); err != nil {
		t.Error(err)
	}
	wantBlocks(t, dir, 4)
}
