package qemu

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// checkVolume prints what a check of the volume's file system finds, and its exit code.
// It changes nothing, and does not use the journal.
const checkVolume = `for d in /sys/block/*; do
	if [ "$(cat $d/serial 2>/dev/null)" = ` + guestapi.VolumeSerial + ` ]; then e2fsck -fn /dev/${d##*/} 2>&1; echo "exit $?"; fi
done`

func cleanVolume(check string) bool {
	return strings.HasSuffix(check, "exit 0") && !strings.Contains(check, "journal")
}

// fill writes to the workspace without end, so that a guest is always about to write.
const fill = `mkdir -p /work/many; i=0; while :; do i=$((i+1)); echo $i >/work/many/$((i % 200)); done`

// look attaches a copy of a snapshot to another guest, and returns what check prints,
// what the file has, and whether the mount has repaired the file system.
func (b *box) look(snap backend.VolumeSnapshotRef) (check, text string, repaired bool) {
	b.Helper()
	v := backend.VolumeRef{UID: agentlab.NewUID()}
	_, err := b.d.CloneVolumeSnapshot(b.ctx, snap, v.UID)
	b.ok(err)
	b.ok(b.d.AttachVolume(b.ctx, b.ref, v))
	check = b.output(checkVolume)
	ws, err := b.client().Mount(b.ctx, guestapi.WorkspaceRequest{Bytes: 1 << 30})
	b.ok(err)
	text = b.output("cat /work/file")
	b.ok(b.client().Unmount(b.ctx))
	if after := b.output(checkVolume); !cleanVolume(after) {
		b.Errorf("the file system is not clean after it was mounted: %s", after)
	}
	b.ok(b.d.DetachVolume(b.ctx, b.ref, v))
	b.ok(b.d.DeleteVolume(b.ctx, v))
	return check, text, ws.Repaired
}

// A snapshot of a running guest's volume that was taken with a freeze has all that the
// guest had written, and a file system that needs no repair. One without a freeze has
// what was synced, and its journal repairs it. The guest goes on in both cases.
func TestVolumeIsSavedWhileItIsWritten(t *testing.T) {
	f := warmFixture(t)
	one, two := newBox(t, f, nil), newBox(t, f, func(sp *backend.Spec) { *sp = f.spec(2) })
	v := newTestVolume(t, one.d)
	one.ok(one.d.AttachVolume(one.ctx, one.ref, v))
	one.boot()
	guest := one.client()
	if err := guest.Freeze(one.ctx, time.Minute); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("a workspace that is not mounted is frozen: %v", err)
	}
	mount := func() {
		_, err := one.client().Mount(one.ctx, guestapi.WorkspaceRequest{Bytes: 1 << 30, Format: true})
		one.ok(err)
	}
	mount()
	writer := one.sh(fill)
	defer writer.Close()
	save := func() backend.VolumeSnapshotRef {
		snap, err := one.d.SnapshotVolume(one.ctx, v, agentlab.NewUID())
		one.ok(err)
		return snap.Ref
	}
	one.output("echo written >/work/file")
	one.ok(guest.Freeze(one.ctx, time.Minute))
	frozen := save()
	if held, err := guest.Thaw(one.ctx); err != nil || !held {
		t.Errorf("the freeze was held: %t, %v", held, err)
	}
	one.output("echo synced >/work/file && sync /work/file")
	crash := save()

	// This one is not thawed by the controller.
	one.ok(guest.Freeze(one.ctx, time.Second))
	one.output("echo later >/work/file && sync /work/file")
	if held, err := guest.Thaw(one.ctx); err != nil || held {
		t.Errorf("the freeze has not ended by itself: %t, %v", held, err)
	}

	// A power cut while it is frozen.
	one.ok(guest.Freeze(one.ctx, time.Minute))
	one.signal(qemuPID, syscall.SIGKILL)
	one.awaitPower(backend.PowerCrashed)
	one.boot()
	mount()
	if got := one.output("echo again >>/work/file; cat /work/file"); got != "later\nagain" {
		t.Errorf("after the power cut the file has %q", got)
	}

	two.boot()
	if check, text, repaired := two.look(frozen); !cleanVolume(check) || text != "written" || repaired {
		t.Errorf("with a freeze the file has %q, repaired %t: %s", text, repaired, check)
	}
	if check, text, _ := two.look(crash); cleanVolume(check) || text != "synced" {
		t.Errorf("without a freeze the file has %q: %s", text, check)
	}
}
