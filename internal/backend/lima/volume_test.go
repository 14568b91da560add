package lima

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// volumes makes the call of a method for volumes.
func (c *doomed) volumes(ctx context.Context, d *Driver) (err error) {
	v := backend.VolumeRef{UID: c.Volume.UID}
	switch c.Method {
	case backendtest.MethodCreateVolume:
		_, err = d.CreateVolume(ctx, c.Volume)
	case backendtest.MethodDeleteVolume:
		err = d.DeleteVolume(ctx, v)
	case backendtest.MethodGrowVolume:
		err = d.GrowVolume(ctx, v, c.Volume.SizeGB)
	case backendtest.MethodAttachVolume:
		err = d.AttachVolume(ctx, c.Has, v)
	case backendtest.MethodDetachVolume:
		err = d.DetachVolume(ctx, c.Has, v)
	case backendtest.MethodSnapshotVolume:
		_, err = d.SnapshotVolume(ctx, c.Saved.Of, c.Saved.UID)
	case backendtest.MethodRestoreVolume:
		err = d.RestoreVolume(ctx, c.Saved)
	case backendtest.MethodCloneVolume:
		_, err = d.CloneVolume(ctx, c.Saved.Of, v.UID)
	case backendtest.MethodCloneVolumeSnapshot:
		_, err = d.CloneVolumeSnapshot(ctx, c.Saved, v.UID)
	}
	return err
}

// doomVolume is doom for a method of volumes.
func (m *mortal) doomVolume(method backendtest.Method, v backend.VolumeSpec, has backend.Ref) (error, bool) { //nolint:revive // two results of one call
	m.mu.Lock()
	if m.armed != nil && m.armed.Method == method {
		m.armed.Volume, m.armed.Has = v, has
	}
	m.mu.Unlock()
	return m.doom(method, has)
}

// doomSaved is doomVolume for a method with snapshots or copies; uid is the copy.
func (m *mortal) doomSaved(method backendtest.Method, saved backend.VolumeSnapshotRef, uid string) (error, bool) { //nolint:revive // two results of one call
	m.mu.Lock()
	if m.armed != nil && m.armed.Method == method {
		m.armed.Saved = saved
	}
	m.mu.Unlock()
	return m.doomVolume(method, backend.VolumeSpec{UID: uid}, backend.Ref{})
}

func (m *mortal) SnapshotVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.VolumeSnapshot, error) {
	if err, dead := m.doomSaved(backendtest.MethodSnapshotVolume, backend.VolumeSnapshotRef{UID: uid, Of: ref}, ""); dead {
		return backend.VolumeSnapshot{}, err
	}
	return m.Driver.SnapshotVolume(ctx, ref, uid)
}

func (m *mortal) RestoreVolume(ctx context.Context, ref backend.VolumeSnapshotRef) error {
	if err, dead := m.doomSaved(backendtest.MethodRestoreVolume, ref, ""); dead {
		return err
	}
	return m.Driver.RestoreVolume(ctx, ref)
}

func (m *mortal) CloneVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.Volume, error) {
	if err, dead := m.doomSaved(backendtest.MethodCloneVolume, backend.VolumeSnapshotRef{Of: ref}, uid); dead {
		return backend.Volume{}, err
	}
	return m.Driver.CloneVolume(ctx, ref, uid)
}

func (m *mortal) CloneVolumeSnapshot(ctx context.Context, ref backend.VolumeSnapshotRef, uid string) (backend.Volume, error) {
	if err, dead := m.doomSaved(backendtest.MethodCloneVolumeSnapshot, ref, uid); dead {
		return backend.Volume{}, err
	}
	return m.Driver.CloneVolumeSnapshot(ctx, ref, uid)
}

func (m *mortal) CreateVolume(ctx context.Context, spec backend.VolumeSpec) (backend.Volume, error) {
	if err, dead := m.doomVolume(backendtest.MethodCreateVolume, spec, backend.Ref{}); dead {
		return backend.Volume{}, err
	}
	return m.Driver.CreateVolume(ctx, spec)
}

func (m *mortal) DeleteVolume(ctx context.Context, ref backend.VolumeRef) error {
	if err, dead := m.doomVolume(backendtest.MethodDeleteVolume, backend.VolumeSpec{UID: ref.UID}, backend.Ref{}); dead {
		return err
	}
	return m.Driver.DeleteVolume(ctx, ref)
}

func (m *mortal) GrowVolume(ctx context.Context, ref backend.VolumeRef, gb int) error {
	if err, dead := m.doomVolume(backendtest.MethodGrowVolume, backend.VolumeSpec{UID: ref.UID, SizeGB: gb}, backend.Ref{}); dead {
		return err
	}
	return m.Driver.GrowVolume(ctx, ref, gb)
}

func (m *mortal) AttachVolume(ctx context.Context, ref backend.Ref, v backend.VolumeRef) error {
	if err, dead := m.doomVolume(backendtest.MethodAttachVolume, backend.VolumeSpec{UID: v.UID}, ref); dead {
		return err
	}
	return m.Driver.AttachVolume(ctx, ref, v)
}

func (m *mortal) DetachVolume(ctx context.Context, ref backend.Ref, v backend.VolumeRef) error {
	if err, dead := m.doomVolume(backendtest.MethodDetachVolume, backend.VolumeSpec{UID: v.UID}, ref); dead {
		return err
	}
	return m.Driver.DetachVolume(ctx, ref, v)
}

// foreignDisk makes a disk with limactl in the place of a volume.
func foreignDisk(t *testing.T, d *Driver, v backend.VolumeSpec) func(*testing.T) {
	t.Helper()
	if err := d.makeBin(); err != nil {
		t.Fatal(err)
	}
	if err := d.runLimactl(t.Context(), "disk", "create", "--tty=false", "--size=1GiB", v.UID); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(d.Volumes.Root, v.UID, limaDataDisk)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return func(t *testing.T) {
		t.Helper()
		now, err := os.ReadFile(path)
		entries, _ := os.ReadDir(filepath.Dir(path))
		if err != nil || string(now) != string(before) || len(entries) != 1 {
			t.Errorf("the foreign disk was touched: %d entries, %v", len(entries), err)
		}
	}
}

// listedDisk is a disk in the output of 'limactl disk list --json'.
type listedDisk struct {
	Name, Format, Instance string
	Size                   int64
}

func (d *Driver) disks(t *testing.T) []listedDisk {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), d.cfg.Limactl, "disk", "list", "--json")
	cmd.Env, cmd.Stderr = d.env(), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []listedDisk
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var one listedDisk
		if err := dec.Decode(&one); err != nil {
			t.Fatal(err)
		}
		all = append(all, one)
	}
	return all
}

// limactl lists a volume with its size and its sandbox, and gives it to no other instance.
// A disk that an instance of a user has is not changed.
func TestLimactlSeesVolume(t *testing.T) {
	d, f := still(t)
	sp, v := f.spec(1), backend.VolumeRef{UID: agentlab.NewUID()}
	ctx := t.Context()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	is := func(gb int64, instance string) {
		t.Helper()
		if all := d.disks(t); len(all) != 1 || all[0] != (listedDisk{v.UID, "raw", instance, gb << 30}) {
			t.Fatalf("limactl disk list: %+v", all)
		}
	}
	ok(d.Create(ctx, sp))
	_, err := d.CreateVolume(ctx, backend.VolumeSpec{UID: v.UID, SizeGB: 1})
	ok(err)
	ok(d.GrowVolume(ctx, v, 3))
	is(3, "")
	ok(d.AttachVolume(ctx, sp.Ref(), v))
	is(3, instanceName(sp.UID))
	if err := d.runLimactl(ctx, "disk", "delete", v.UID); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("limactl deletes it: %v", err)
	}
	user := filepath.Join(f.StateDir, "user.yaml")
	text := `{"images":[{"location":"` + d.placeholder() + `"}],"mounts":[],"plain":true,"vmType":"qemu","arch":"x86_64","cpuType":{"x86_64":"qemu64,agentlab=on"},"containerd":{"user":false},"firmware":{"legacyBIOS":true},"hostResolver":{"enabled":false},"additionalDisks":[{"name":"` + v.UID + `","format":false}]}`
	ok(os.WriteFile(user, []byte(text), 0o600))
	ok(d.runLimactl(ctx, "create", "--tty=false", "--name=users", user))
	cmd := exec.CommandContext(ctx, d.cfg.Limactl, "start", "--tty=false", "users")
	cmd.Env = append(d.env(), "PATH="+os.Getenv("PATH"))
	err = cmd.Run()
	log, rerr := os.ReadFile(filepath.Join(d.home(), "users", limaAgentLog))
	if err == nil || rerr != nil || !strings.Contains(string(log), "in use by instance") {
		t.Errorf("another instance with the disk: %v; %s %v", err, log, rerr)
	}
	ok(d.DetachVolume(ctx, sp.Ref(), v))
	is(3, "")
	link := filepath.Join(d.Volumes.Root, v.UID, limaInUseBy)
	ok(os.Symlink(filepath.Join(d.home(), "users"), link))
	for what, err := range map[string]error{"AttachVolume": d.AttachVolume(ctx, sp.Ref(), v), "DeleteVolume": d.DeleteVolume(ctx, v), "GrowVolume": d.GrowVolume(ctx, v, 4)} {
		if agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) == "" {
			t.Errorf("%s of a disk that a user's instance has: %v", what, err)
		}
	}
	is(3, "users")
	ok(os.RemoveAll(filepath.Join(d.home(), "users")))
	ok(d.DetachVolume(ctx, sp.Ref(), v))
	ok(d.AttachVolume(ctx, sp.Ref(), v))
	ok(d.Destroy(ctx, sp.Ref()))
	is(3, "")
	ok(d.DeleteVolume(ctx, v))
	if all := d.disks(t); len(all) != 0 {
		t.Errorf("after the deletion: %+v", all)
	}
}

// What a link in LIMA_HOME leads to is neither opened, changed nor deleted.
func TestLinksAreNotFollowed(t *testing.T) {
	d, _ := still(t)
	v := backend.VolumeRef{UID: agentlab.NewUID()}
	if _, err := d.CreateVolume(t.Context(), backend.VolumeSpec{UID: v.UID, SizeGB: 1}); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(d.Volumes.Root, v.UID)
	for _, path := range []string{d.Volumes.Root, dir, filepath.Join(dir, limaDataDisk)} {
		moved := filepath.Join(d.cfg.StateDir, "moved")
		if err := os.Rename(path, moved); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(moved, path); err != nil {
			t.Fatal(err)
		}
		_, err := volumeDisk(d.home(), dir)
		for what, err := range map[string]error{"DeleteVolume": d.DeleteVolume(t.Context(), v), "GrowVolume": d.GrowVolume(t.Context(), v, 2), "QEMU": err} {
			if err == nil {
				t.Errorf("%s follows %s", what, path)
			}
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(moved, path); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"/etc", filepath.Join(d.Volumes.Root, "..", v.UID), filepath.Join(d.Volumes.Root, "users")} {
		if _, err := volumeDisk(d.home(), dir); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("QEMU opens %s: %v", dir, err)
		}
	}
	if st, err := os.Stat(filepath.Join(dir, limaDataDisk)); err != nil || st.Size() != 1<<30 {
		t.Errorf("%v, %v", st, err)
	}
	if _, err := os.Stat(filepath.Join(dir, vmdir.FileVolume)); err != nil {
		t.Error(err)
	}
}

// A copy has the holes of its source: a large volume with little in it is copied at once.
func TestCopyKeepsHoles(t *testing.T) {
	d, _ := still(t)
	v := backend.VolumeRef{UID: agentlab.NewUID()}
	if _, err := d.CreateVolume(t.Context(), backend.VolumeSpec{UID: v.UID, SizeGB: 500}); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(d.Volumes.Root, v.UID, limaDataDisk), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	const at = 400 << 30
	if _, err := f.WriteAt([]byte("far"), at); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	made, err := d.CloneVolume(t.Context(), v, agentlab.NewUID())
	if err != nil || made.SizeGB != 500 || made.Bytes > 1<<20 {
		t.Fatalf("%+v, %v", made, err)
	}
	got := make([]byte, 3)
	f, err = os.Open(filepath.Join(d.Volumes.Root, made.Ref.UID, limaDataDisk))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.ReadAt(got, at); err != nil || string(got) != "far" {
		t.Errorf("%q, %v", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.copyDisk(ctx, f.Name(), filepath.Join(d.cfg.StateDir, "copy")); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(d.cfg.StateDir, "copy")); err == nil {
		t.Error("a cancelled copy is left")
	}
}
