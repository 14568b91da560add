package proxmox

import (
	"context"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

func (m mortal) CreateVolume(ctx context.Context, s backend.VolumeSpec) (v backend.Volume, err error) {
	defer survive(&err)
	return m.Driver.CreateVolume(ctx, s)
}

func (m mortal) DeleteVolume(ctx context.Context, ref backend.VolumeRef) (err error) {
	defer survive(&err)
	return m.Driver.DeleteVolume(ctx, ref)
}

func (m mortal) GrowVolume(ctx context.Context, ref backend.VolumeRef, gb int) (err error) {
	defer survive(&err)
	return m.Driver.GrowVolume(ctx, ref, gb)
}

func (m mortal) AttachVolume(ctx context.Context, ref backend.Ref, v backend.VolumeRef) (err error) {
	defer survive(&err)
	return m.Driver.AttachVolume(ctx, ref, v)
}

func (m mortal) DetachVolume(ctx context.Context, ref backend.Ref, v backend.VolumeRef) (err error) {
	defer survive(&err)
	return m.Driver.DetachVolume(ctx, ref, v)
}

func (m mortal) SnapshotVolume(ctx context.Context, ref backend.VolumeRef, uid string) (s backend.VolumeSnapshot, err error) {
	defer survive(&err)
	return m.Driver.SnapshotVolume(ctx, ref, uid)
}

func (m mortal) RestoreVolume(ctx context.Context, s backend.VolumeSnapshotRef) (err error) {
	defer survive(&err)
	return m.Driver.RestoreVolume(ctx, s)
}

func (m mortal) CloneVolume(ctx context.Context, ref backend.VolumeRef, uid string) (v backend.Volume, err error) {
	defer survive(&err)
	return m.Driver.CloneVolume(ctx, ref, uid)
}

func (m mortal) CloneVolumeSnapshot(ctx context.Context, s backend.VolumeSnapshotRef, uid string) (v backend.Volume, err error) {
	defer survive(&err)
	return m.Driver.CloneVolumeSnapshot(ctx, s, uid)
}

func (m mortal) DeleteVolumeSnapshot(ctx context.Context, s backend.VolumeSnapshotRef) (err error) {
	defer survive(&err)
	return m.Driver.DeleteVolumeSnapshot(ctx, s)
}

// A full storage makes no volume and no copy of one, and keeps what it has.
func TestVolumeFull(t *testing.T) {
	w := newWorld(t, worldConfig{})
	d, ctx := w.driver, t.Context()
	spec := backend.VolumeSpec{UID: testUID(1), SizeGB: 1}
	_, err := d.CreateVolume(ctx, spec)
	ok(t, "CreateVolume", err)
	w.node.Fill("local-zfs", true)
	_, err = d.CreateVolume(ctx, backend.VolumeSpec{UID: testUID(2), SizeGB: 1})
	wantCode(t, "CreateVolume", err, agentlab.CodeNoSpace)
	_, err = d.CloneVolume(ctx, backend.VolumeRef{UID: spec.UID}, testUID(3))
	wantCode(t, "CloneVolume", err, agentlab.CodeNoSpace)
	_, err = d.SnapshotVolume(ctx, backend.VolumeRef{UID: spec.UID}, testUID(4))
	wantCode(t, "SnapshotVolume", err, agentlab.CodeNoSpace)
	saved, err := d.VolumeSnapshots(ctx)
	ok(t, "VolumeSnapshots", err)
	if len(saved) != 0 {
		t.Errorf("a snapshot without space: %+v", saved)
	}
	ok(t, "DeleteVolume", d.DeleteVolume(ctx, backend.VolumeRef{UID: testUID(2)}))
	w.node.Fill("local-zfs", false)
	all, err := d.ListVolumes(ctx)
	ok(t, "ListVolumes", err)
	if len(all) != 1 || all[0].Ref.UID != spec.UID || all[0].Partial {
		t.Errorf("volumes are %+v", all)
	}
	ok(t, "DeleteVolume", d.DeleteVolume(ctx, backend.VolumeRef{UID: spec.UID}))
	if left := w.left(t); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// The files of all volumes and of the sandbox were lost: the VMs say what there is.
func TestVolumeLostFile(t *testing.T) {
	w := newWorld(t, worldConfig{})
	d, ctx, sb := w.driver, t.Context(), w.spec(1)
	ok(t, "Create", d.Create(ctx, sb))
	spec := backend.VolumeSpec{UID: testUID(1), SizeGB: 2}
	v, err := d.CreateVolume(ctx, spec)
	ok(t, "CreateVolume", err)
	_, err = d.SnapshotVolume(ctx, v.Ref, testUID(2))
	ok(t, "SnapshotVolume", err)
	ok(t, "AttachVolume", d.AttachVolume(ctx, sb.Ref(), v.Ref))
	lose := func() {
		r, err := d.readVolume(spec.UID)
		ok(t, "read", err)
		ok(t, "lose", d.forgetVolume(r))
	}
	lose()
	wantCode(t, "DeleteVolume", d.DeleteVolume(ctx, v.Ref), agentlab.CodeConflict)
	lose()
	saved, err := d.VolumeSnapshots(ctx)
	ok(t, "VolumeSnapshots", err)
	if len(saved) != 1 || saved[0].SizeGB != 2 {
		t.Errorf("snapshots are %+v", saved)
	}
	lose()
	ok(t, "Destroy", d.Destroy(ctx, sb.Ref()))
	now, err := d.InspectVolume(ctx, v.Ref)
	ok(t, "InspectVolume", err)
	if now.SizeGB != 2 || now.Partial || now.AttachedTo != (backend.Ref{}) {
		t.Errorf("the volume is %+v", now)
	}
	lose()
	again, err := d.CreateVolume(ctx, spec)
	ok(t, "CreateVolume", err)
	if again.Ref != v.Ref {
		t.Errorf("a second volume: %+v", again)
	}
	ok(t, "DeleteVolume", d.DeleteVolume(ctx, v.Ref))
	if left := w.left(t); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// A start does not accept a disk of another VM in place of the volume, nor one that
// nobody attached.
func TestVolumeAudit(t *testing.T) {
	w := newWorld(t, worldConfig{})
	d, ctx, sb := w.driver, t.Context(), w.spec(1)
	ok(t, "Create", d.Create(ctx, sb))
	v, err := d.CreateVolume(ctx, backend.VolumeSpec{UID: testUID(1), SizeGB: 1})
	ok(t, "CreateVolume", err)
	w.node.AddVolume(t, "local-zfs", 1500, "vm-1500-disk-0", 1<<30)
	w.node.Edit(sb.VMID, map[string]string{volumeSlot: "local-zfs:vm-1500-disk-0,size=1G"})
	wantCode(t, "Start", d.Start(ctx, sb.Ref()), agentlab.CodeDenied)
	w.node.Edit(sb.VMID, map[string]string{volumeSlot: "local-zfs:vm-" + v.Ref.Handle + "-disk-0,size=1G"})
	wantCode(t, "Start", d.Start(ctx, sb.Ref()), agentlab.CodeDenied)
	ok(t, "AttachVolume", d.AttachVolume(ctx, sb.Ref(), v.Ref))
	ok(t, "Start", d.Start(ctx, sb.Ref()))
	ok(t, "Destroy", d.Destroy(ctx, sb.Ref()))
	now, err := d.InspectVolume(ctx, v.Ref)
	ok(t, "InspectVolume", err)
	if now.Partial || now.SizeGB != 1 {
		t.Errorf("the volume is %+v", now)
	}
}

// Two VMs have the numbers that volumes would get, one of them a disk without a VM.
func TestVolumeNumbers(t *testing.T) {
	w := newWorld(t, worldConfig{})
	d, ctx := w.driver, t.Context()
	untouched := w.foreign(t, 1999, "other", map[string]string{})
	disk := w.node.AddVolume(t, "local-zfs", 1998, "vm-1998-disk-0", 1<<30)
	v, err := d.CreateVolume(ctx, backend.VolumeSpec{UID: testUID(1), SizeGB: 1})
	ok(t, "CreateVolume", err)
	if v.Ref.Handle != "1997" {
		t.Errorf("the volume is in VM %s", v.Ref.Handle)
	}
	ok(t, "DeleteVolume", d.DeleteVolume(ctx, v.Ref))
	untouched(t)
	if all := w.node.Volumes(1998); len(all) != 1 || all[0] != disk {
		t.Errorf("the other disk is gone: %q", all)
	}
}
