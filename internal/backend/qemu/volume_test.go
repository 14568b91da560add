package qemu

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// volumeDevice is the volume of a guest, in its shell.
const volumeDevice = `"/dev/$(for d in /sys/block/*; do [ "$(cat $d/serial 2>/dev/null)" = ` + backend.VolumeSerial + ` ] && echo ${d##*/}; done)"`

// volumeFixture opens a driver that starts no VM.
func volumeFixture(t *testing.T) *Driver {
	t.Helper()
	dir := stateDir(t)
	f := fixed{StateDir: dir, CacheDir: filepath.Join(dir, "cache"), Runner: "/bin/true"}
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func newTestVolume(t *testing.T, d *Driver) backend.VolumeRef {
	t.Helper()
	v, err := d.CreateVolume(t.Context(), backend.VolumeSpec{UID: agentlab.NewUID(), SizeGB: 1})
	if err != nil {
		t.Fatal(err)
	}
	return v.Ref
}

// A volume that is saved very often has a bounded number of layers, and what is in it
// and in an old snapshot does not change.
func TestVolumeLayersAreMerged(t *testing.T) {
	d := volumeFixture(t)
	v := newTestVolume(t, d)
	dir := filepath.Join(d.volumes(), v.UID)
	var first backend.VolumeSnapshotRef
	for i := range 2*mergeFrom + 5 {
		qemuIO(t, dir, block("write", i))
		s, err := d.SnapshotVolume(t.Context(), v, agentlab.NewUID())
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = s.Ref
		} else if err := d.DeleteVolumeSnapshot(t.Context(), s.Ref); err != nil {
			t.Fatal(err)
		}
	}
	if layers, err := layersIn(dir); err != nil || len(layers) > mergeFrom+1 {
		t.Errorf("%d layers, %v", len(layers), err)
	}
	for i := range 2*mergeFrom + 5 {
		qemuIO(t, dir, block("read", i))
	}
	if err := d.RestoreVolume(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	qemuIO(t, dir, "read -P 1 0 64k")
	qemuIO(t, dir, "read -P 0 64k 64k")
	if err := d.DeleteVolumeSnapshot(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	qemuIO(t, dir, "read -P 1 0 64k")
}

// The header of a volume's disk cannot make the host read another file: the QEMU of
// a guest wrote it.
func TestVolumeReadsNoOtherFile(t *testing.T) {
	d := volumeFixture(t)
	v := newTestVolume(t, d)
	disk := filepath.Join(d.volumes(), v.UID, fileRoot)
	secret := filepath.Join(d.cfg.StateDir, "secret")
	if err := os.WriteFile(secret, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), d.host.QEMUImg(), "rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", secret, disk).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := d.GrowVolume(t.Context(), v, 2); err == nil {
		t.Error("it is enlarged")
	}
	if _, err := volumeDisk(filepath.Dir(disk)); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("it is attached: %v", err)
	}
	if _, err := (diskFiles{dir: filepath.Dir(disk), size: 2 << 30}).chain(); err == nil {
		t.Error("its layers are read")
	}
}

// If it is not known which volume a sandbox has, no volume is changed.
func TestUnreadableAttachment(t *testing.T) {
	d := volumeFixture(t)
	v := newTestVolume(t, d)
	dir := filepath.Join(d.sandboxes(), vmdir.Name(1001, uid(1)))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, vmdir.FileVolume)
	if err := os.WriteFile(file, []byte(`{"version":9}`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := d.CloneVolume(t.Context(), v, agentlab.NewUID())
	for what, err := range map[string]error{"DeleteVolume": d.DeleteVolume(t.Context(), v), "GrowVolume": d.GrowVolume(t.Context(), v, 2), "CloneVolume": err} {
		if err == nil {
			t.Errorf("%s succeeds", what)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := d.DeleteVolume(t.Context(), v); err != nil {
		t.Error(err)
	}
}

// A power cut while the volume of a running sandbox is saved, and while it is
// attached and detached, loses nothing that the guest has synced.
func TestVolumeSurvivesPowerCut(t *testing.T) {
	f := warmFixture(t)
	b := newBox(t, f, nil)
	v := newTestVolume(t, b.d)
	b.ok(b.d.AttachVolume(b.ctx, b.ref, v))
	b.boot()
	type cut struct{ point, victim string }
	var cuts []cut
	for _, point := range []string{"volume frozen", "volume switched"} {
		for _, victim := range []string{"supervisor", "QEMU"} {
			cuts = append(cuts, cut{point, victim})
		}
	}
	last := ""
	for _, c := range sample.Cover(t, cuts, func(c cut) []string { return []string{c.point, c.victim} }) {
		last += c.point + " " + c.victim + ";"
		b.output("printf %s '" + last + "' | dd of=" + volumeDevice + " bs=4k conv=sync,fsync 2>/dev/null")
		if err := os.WriteFile(filepath.Join(b.d.dir(b.ref), fileCrash), []byte(c.point+"/"+c.victim), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := b.d.SnapshotVolume(b.ctx, v, agentlab.NewUID())
		t.Logf("%s, %s: %v", c.point, c.victim, err)
		b.ok(b.d.Stop(b.ctx, b.ref, 0))
		b.boot()
		if got := b.output("dd if=" + volumeDevice + " bs=4k count=1 iflag=direct 2>/dev/null | tr -d '\\0'"); strings.TrimSpace(got) != last {
			t.Fatalf("after a crash of %s at %q the volume has %q, want %q", c.victim, c.point, got, last)
		}
	}
	b.ok(b.d.DetachVolume(b.ctx, b.ref, v))
	if out, err := exec.CommandContext(t.Context(), b.d.host.QEMUImg(), "check", filepath.Join(b.d.volumes(), v.UID, fileRoot)).CombinedOutput(); err != nil {
		t.Errorf("qemu-img check: %v, %s", err, out)
	}
}

// Two QEMUs never have a volume open, even if the files of two sandboxes name it.
func TestVolumeHasOneWriter(t *testing.T) {
	f := warmFixture(t)
	one, two := newBox(t, f, nil), newBox(t, f, func(sp *backend.Spec) { *sp = f.spec(2) })
	v := newTestVolume(t, one.d)
	one.ok(one.d.AttachVolume(one.ctx, one.ref, v))
	one.boot()
	if err := durable.Copy(filepath.Join(one.d.dir(one.ref), vmdir.FileVolume), filepath.Join(two.d.dir(two.ref), vmdir.FileVolume), 0o600, durable.None); err != nil {
		t.Fatal(err)
	}
	err := two.d.Start(two.ctx, two.ref)
	if err == nil || !strings.Contains(err.Error(), "lock") {
		t.Fatalf("the second start: %v", err)
	}
	if err := os.Remove(filepath.Join(two.d.dir(two.ref), vmdir.FileVolume)); err != nil {
		t.Fatal(err)
	}
	one.output("echo hello | dd of=" + volumeDevice + " bs=4k conv=sync,fsync 2>/dev/null")
	pid, err := noted(one.d.dir(one.ref), shimPID)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, bootTimeout, "the volume is free", func() error {
		return one.d.DetachVolume(one.ctx, one.ref, v)
	})
	two.ok(two.d.AttachVolume(two.ctx, two.ref, v))
	two.boot()
	if got := two.output("head -c 5 " + volumeDevice); got != "hello" {
		t.Errorf("the volume has %q", got)
	}
}
