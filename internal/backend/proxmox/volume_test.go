package proxmox

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
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

// The mark of a holder is found whatever white space Proxmox cuts from it. A holder
// whose description was edited is neither used nor deleted nor forgotten, until it has
// its mark again; nor does another VM get the volume.
func TestHolderMark(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		d, ctx := w.driver, t.Context()
		v, err := d.CreateVolume(ctx, backend.VolumeSpec{UID: testUID(1), SizeGB: 1})
		ok(t, "CreateVolume", err)
		vmid := 1999
		if v.Ref.Handle != "1999" || v.Partial {
			t.Fatalf("the volume is %+v", v)
		}
		mark := w.node.Config(vmid)["description"]
		w.node.Edit(vmid, map[string]string{"description": "\n" + mark + "\n\n"})
		if now, err := d.InspectVolume(ctx, v.Ref); err != nil || now.Partial {
			t.Errorf("with more white space: %+v, %v", now, err)
		}
		w.node.Edit(vmid, map[string]string{"description": "my notes on " + v.Ref.UID})
		err = d.DeleteVolume(ctx, v.Ref)
		wantCode(t, "DeleteVolume", err, agentlab.CodeUnknownOutcome)
		if hint := agentlab.HintOf(err); !strings.Contains(hint, "qm set 1999 --description") {
			t.Errorf("hint %q", hint)
		}
		_, err = d.CreateVolume(ctx, backend.VolumeSpec{UID: v.Ref.UID, SizeGB: 1})
		wantCode(t, "CreateVolume", err, agentlab.CodeUnknownOutcome)
		w.node.Edit(vmid, map[string]string{"description": mark})
		ok(t, "DeleteVolume", d.DeleteVolume(ctx, v.Ref))
		if left := w.left(t); len(left) != 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// residue makes the VMs that each attempt of an earlier version to create a volume
// left: empty holders with its mark, whose numbers it gave up.
func (w *world) residue(t *testing.T, uid string, vmids ...int) {
	t.Helper()
	d := w.driver
	for _, vmid := range vmids {
		options := d.holderOptions(&volume{UID: uid, VMID: vmid})
		options["description"] += "\n" // as they wrote it
		task, err := d.pve.Create(t.Context(), w.node.Name(), vmid, d.cfg.Pool, options)
		if err == nil {
			_, err = d.pve.Wait(t.Context(), task)
		}
		ok(t, "the VM of an earlier version", err)
	}
}

// What earlier versions left is a partial volume that can be deleted, with all its VMs,
// also while the state of the volume names one of them. Another volume, and a user's
// clone of a holder, stay.
func TestHoldersOfEarlierVersions(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		d, ctx, uid := w.driver, t.Context(), testUID(1)
		other, err := d.CreateVolume(ctx, backend.VolumeSpec{UID: testUID(2), SizeGB: 1})
		ok(t, "CreateVolume", err)
		clone := d.holderOptions(&volume{UID: uid, VMID: 1998})
		untouched := w.foreign(t, 1990, "clone", map[string]string{"description": clone["description"], "tags": clone["tags"]})

		w.residue(t, uid, 1996, 1997, 1998)
		all, err := d.ListVolumes(ctx)
		ok(t, "ListVolumes", err)
		i := slices.IndexFunc(all, func(v backend.Volume) bool { return v.Ref.UID == uid })
		if len(all) != 2 || i < 0 || !all[i].Partial || !strings.Contains(all[i].Reason, "VM 199") {
			t.Fatalf("volumes are %+v", all)
		}
		ok(t, "DeleteVolume", d.DeleteVolume(ctx, backend.VolumeRef{UID: uid}))
		if left := w.left(t, 1990, 1999); len(left) != 0 {
			t.Errorf("left: %q", left)
		}

		w.residue(t, uid, 1996, 1997, 1998)
		ok(t, "save", d.saveVolume(&volume{UID: uid, VMID: 1996, Node: w.node.Name(), Storage: "local-zfs", SizeGB: 1, Phase: volumeMaking}))
		v, err := d.CreateVolume(ctx, backend.VolumeSpec{UID: uid, SizeGB: 1})
		ok(t, "CreateVolume", err)
		if v.Partial || v.Ref.Handle != "1996" || w.node.Config(1997) != nil || w.node.Config(1998) != nil {
			t.Errorf("the volume is %+v", v)
		}
		w.residue(t, uid, 1997) // and the file of the volume is lost
		ok(t, "lose", d.forgetVolume(&volume{UID: uid}))
		if v, err = d.InspectVolume(ctx, v.Ref); err != nil || v.Ref.Handle != "1996" || v.Partial {
			t.Errorf("of two holders that without a disk counts: %+v, %v", v, err)
		}
		ok(t, "DeleteVolume", d.DeleteVolume(ctx, v.Ref))
		if w.node.Config(1996) != nil || w.node.Config(1997) != nil {
			t.Error("a holder is left")
		}
		ok(t, "DeleteVolume", d.DeleteVolume(ctx, other.Ref))
		untouched(t)
	})
}

// The VM of a sandbox was deleted manually: its volume is detached, also when another
// user's VM got the number, and another sandbox can have it.
func TestDetachOfDeletedVM(t *testing.T) {
	for name, taken := range map[string]bool{"free": false, "taken": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, worldConfig{admin: true})
			d, ctx, sb, next := w.driver, t.Context(), w.spec(1), w.spec(2)
			ok(t, "Create", d.Create(ctx, sb))
			ok(t, "Create", d.Create(ctx, next))
			v, err := d.CreateVolume(ctx, backend.VolumeSpec{UID: testUID(1), SizeGB: 1})
			ok(t, "CreateVolume", err)
			ok(t, "AttachVolume", d.AttachVolume(ctx, sb.Ref(), v.Ref))
			ok(t, "delete manually", w.admin(t, pve.Delete, w.vmPath(sb.VMID), nil))
			if taken {
				defer w.foreign(t, sb.VMID, "other", nil)(t)
			}
			ok(t, "DetachVolume", d.DetachVolume(ctx, sb.Ref(), v.Ref))
			ok(t, "AttachVolume", d.AttachVolume(ctx, next.Ref(), v.Ref))
			ok(t, "DetachVolume", d.DetachVolume(ctx, sb.Ref(), v.Ref))
			if now, err := d.InspectVolume(ctx, v.Ref); err != nil || now.AttachedTo.UID != next.UID {
				t.Errorf("the volume is %+v, %v", now, err)
			}
		})
	}
}

// Proxmox VE starts two VMs with one disk. A volume is neither attached to a sandbox nor
// started with it while its holder runs, or another VM that was not started by AgentLab.
func TestVolumeUsedElsewhere(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, admin: true})
		d, ctx, sb, back := w.driver, t.Context(), w.create(t, 1), w.create(t, 2)
		v, err := d.CreateVolume(ctx, backend.VolumeSpec{UID: testUID(1), SizeGB: 1})
		ok(t, "CreateVolume", err)
		holder, err := strconv.Atoi(v.Ref.Handle)
		ok(t, "handle", err)
		drive := "local-zfs:vm-" + v.Ref.Handle + "-disk-0,size=1G"
		w.node.AddForeignVM(t, 1990, "other", false, map[string]string{"scsi3": drive})
		w.node.Edit(back.VMID, map[string]string{volumeSlot: drive})
		power := func(vmid int, what string) {
			t.Helper()
			ok(t, what, w.admin(t, pve.Post, w.vmPath(vmid)+"/status/"+what, nil))
		}
		others := []int{holder, 1990, back.VMID}
		refused := func(what string, try func() error) {
			t.Helper()
			for _, vmid := range others {
				power(vmid, "start")
				err := try()
				wantCode(t, what, err, agentlab.CodeConflict)
				if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("VM %d runs", vmid)) || !strings.Contains(agentlab.HintOf(err), fmt.Sprintf("qm stop %d", vmid)) {
					t.Errorf("%s: %v, hint %q", what, err, agentlab.HintOf(err))
				}
				power(vmid, "stop")
			}
		}
		refused("AttachVolume", func() error { return d.AttachVolume(ctx, sb.Ref(), v.Ref) })
		ok(t, "AttachVolume", d.AttachVolume(ctx, sb.Ref(), v.Ref))
		refused("Start", func() error { return d.Start(ctx, sb.Ref()) })
		ok(t, "Start", d.Start(ctx, sb.Ref()))
	})
}
