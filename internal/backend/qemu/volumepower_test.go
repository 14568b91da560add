package qemu

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// powerCut ends everything in a method for a volume: the process at the point, then the
// others.
type powerCut struct {
	method backendtest.Method
	point  string
	victim string // "daemon", or a process of the VM that has the volume
}

func powerCuts() (all []powerCut) {
	for method, points := range map[backendtest.Method][]string{
		backendtest.MethodSnapshotVolume:      {"volume snapshot begun", "volume saved", "volume snapshot complete"},
		backendtest.MethodRestoreVolume:       {"volume restore staged", "volume restored"},
		backendtest.MethodCloneVolume:         {"volume marked", "volume frozen", "volume made"},
		backendtest.MethodCloneVolumeSnapshot: {"volume marked", "volume made"},
		backendtest.MethodGrowVolume:          {"volume not grown", "volume grown"},
	} {
		for _, point := range points {
			all = append(all, powerCut{method, point, "daemon"})
		}
	}
	for _, point := range []string{"volume frozen", "volume switched"} {
		for _, victim := range []string{"supervisor", "QEMU"} {
			all = append(all, powerCut{backendtest.MethodSnapshotVolume, point, victim})
		}
	}
	slices.SortFunc(all, func(a, b powerCut) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) }) // the seed selects by the order
	return all
}

// A power cut while the volume of a workspace is saved, restored, copied or enlarged
// loses nothing that its guest has synced. The file system can be mounted and is clean
// then, the operation can be completed, and nothing else is left.
func TestWorkspaceSurvivesPowerCut(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	b.ctx = t.Context() // a full run has many boots
	p := &powerTest{box: b, v: newTestVolume(t, b.d), gb: 1}
	b.boot()
	for i, c := range sample.Cover(t, powerCuts(), func(c powerCut) []string { return []string{string(c.method)} }) {
		t.Logf("%s, %s at %q", c.method, c.victim, c.point)
		p.cut(i, c)
	}
	b.ok(b.d.DeleteVolume(b.ctx, p.v))
	if left, err := os.ReadDir(b.d.volumes()); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// powerTest is a volume, and a running sandbox that has it at times.
type powerTest struct {
	*box
	v  backend.VolumeRef
	gb int
}

// cut writes to the volume, cuts the power in the method, and checks what is there
// after the method was called again. The sandbox runs before and after it.
func (p *powerTest) cut(i int, c powerCut) {
	p.Helper()
	call := doomed{
		Fixed: p.f, Method: c.method, Point: c.point,
		Volume: backend.VolumeSpec{UID: agentlab.NewUID()}, // of a copy
		Saved:  backend.VolumeSnapshotRef{UID: agentlab.NewUID(), Of: p.v},
	}
	p.ok(p.d.AttachVolume(p.ctx, p.ref, p.v))
	p.mount()
	saved, text := fmt.Sprintf("saved %d", i), fmt.Sprintf("text %d", i)
	switch c.method {
	case backendtest.MethodRestoreVolume, backendtest.MethodCloneVolumeSnapshot:
		p.output("echo " + saved + " >/work/file && sync /work/file")
		_, err := p.d.SnapshotVolume(p.ctx, p.v, call.Saved.UID)
		p.ok(err)
	case backendtest.MethodGrowVolume:
		p.gb++
		call.Volume = backend.VolumeSpec{UID: p.v.UID, SizeGB: p.gb}
	}
	writer := p.sh(fill)
	defer writer.Close()
	p.output("echo " + text + " >/work/file && sync /work/file")
	if c.method == backendtest.MethodSnapshotVolume { // of the running guest
		p.interrupt(call, c)
		p.powerOff()
		p.ok(p.d.DetachVolume(p.ctx, p.ref, p.v))
	} else {
		p.powerOff()
		p.ok(p.d.DetachVolume(p.ctx, p.ref, p.v))
		p.interrupt(call, c)
	}
	p.ok(call.volumes(p.ctx, p.d))
	p.boot()
	want, copied := text, ""
	switch c.method {
	case backendtest.MethodRestoreVolume:
		want = saved
	case backendtest.MethodSnapshotVolume:
		copied = text
	case backendtest.MethodCloneVolume:
		copied = text
	case backendtest.MethodCloneVolumeSnapshot:
		copied = saved
	}
	p.has(p.v, want)
	p.hasCopy(call, c, copied)
	p.clean()
}

// interrupt makes the call in a process that dies in it, or kills a process of the VM
// in it.
func (p *powerTest) interrupt(call doomed, c powerCut) {
	p.Helper()
	if c.victim == "daemon" {
		if err := call.dieIn(); err == nil {
			p.Fatalf("%s does not come to %q", c.method, c.point)
		}
		return
	}
	p.ok(os.WriteFile(filepath.Join(p.d.dir(p.ref), fileCrash), []byte(c.point+"/"+c.victim), 0o600))
	_, err := p.d.SnapshotVolume(p.ctx, p.v, call.Saved.UID)
	p.Logf("the daemon gets %v", err)
}

// powerOff kills what still runs of the VM.
func (p *powerTest) powerOff() {
	p.Helper()
	dir := p.d.dir(p.ref)
	for _, name := range []string{shimPID, qemuPID} {
		pid, err := noted(dir, name)
		if cwd, _ := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); err == nil && cwd == dir { // not another process that has the number now
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	p.awaitPower(backend.PowerCrashed)
}

func (p *powerTest) mount() guestapi.Workspace {
	p.Helper()
	ws, err := p.client().Mount(p.ctx, guestapi.WorkspaceRequest{Bytes: int64(p.gb) << 30, Format: true})
	p.ok(err)
	if ws.Bytes < int64(p.gb)*900<<20 {
		p.Errorf("the file system has %d bytes, the volume %d GiB", ws.Bytes, p.gb)
	}
	return ws
}

// has mounts a volume, and checks its file and its file system.
func (p *powerTest) has(v backend.VolumeRef, want string) {
	p.Helper()
	p.ok(p.d.AttachVolume(p.ctx, p.ref, v))
	if ws := p.mount(); ws.New {
		p.Error("the file system was created again")
	}
	if got := p.output("cat /work/file"); got != want {
		p.Errorf("the file has %q, want %q", got, want)
	}
	p.ok(p.client().Unmount(p.ctx))
	if check := p.output(checkVolume); !cleanVolume(check) {
		p.Errorf("the file system is not clean: %s", check)
	}
	p.ok(p.d.DetachVolume(p.ctx, p.ref, v))
}

// hasCopy checks the snapshot or the copy that the method has made, and deletes it.
func (p *powerTest) hasCopy(call doomed, c powerCut, want string) {
	p.Helper()
	v := backend.VolumeRef{UID: call.Volume.UID}
	if c.method == backendtest.MethodSnapshotVolume {
		_, err := p.d.CloneVolumeSnapshot(p.ctx, call.Saved, v.UID)
		p.ok(err)
	}
	if want != "" {
		p.has(v, want)
		p.ok(p.d.DeleteVolume(p.ctx, v))
	}
	p.ok(p.d.DeleteVolumeSnapshot(p.ctx, call.Saved))
}

// clean checks that there is nothing but the volume.
func (p *powerTest) clean() {
	p.Helper()
	volumes, err := p.d.ListVolumes(p.ctx)
	p.ok(err)
	if len(volumes) != 1 || volumes[0].Partial || volumes[0].SizeGB != p.gb || volumes[0].AttachedTo != (backend.Ref{}) {
		p.Errorf("volumes: %+v", volumes)
	}
	snaps, err := p.d.VolumeSnapshots(p.ctx)
	p.ok(err)
	if len(snaps) != 0 {
		p.Errorf("snapshots: %+v", snaps)
	}
	dirs, err := os.ReadDir(p.d.volumes())
	p.ok(err)
	files, err := os.ReadDir(filepath.Join(p.d.volumes(), p.v.UID))
	p.ok(err)
	for _, f := range files {
		if name := f.Name(); name != fileRoot && name != vmdir.FileVolume && name != dirSnapshots && !strings.HasPrefix(name, layerPrefix) {
			p.Errorf("left in the directory of the volume: %s", name)
		}
	}
	if len(dirs) != 1 {
		p.Errorf("left: %v", dirs)
	}
}
