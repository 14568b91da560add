package proxmox

import (
	"context"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// The farm keeps the disks and the memory of its guests: a snapshot of a VM is
// one of the sandbox of the fake driver behind it.

var _ pvenode.Contents = (*farm)(nil)

// snapshotOf returns the sandbox behind a VM and the UID of a snapshot; ok is
// false for those of others.
func (f *farm) snapshotOf(vmid int, name string) (id vmID, ref backend.SnapshotRef, ok bool) {
	match := uidInDescription.FindStringSubmatch(f.node.Config(vmid)["description"])
	uid, ours := strings.CutPrefix(name, tagUID)
	if match == nil || !ours || validUID(uid) != nil {
		return id, ref, false
	}
	id = vmID{VMID: vmid, UID: match[1]}
	return id, backend.SnapshotRef{UID: uid, Of: backend.Ref{UID: id.UID}}, true
}

// Saved implements pvenode.Contents.
func (f *farm) Saved(vmid int, name string, _ bool) error {
	ctx := context.Background()
	if v, is, err := f.loose(ctx, vmid); is {
		if err == nil {
			_, err = f.drv.SnapshotVolume(ctx, v, strings.TrimPrefix(name, tagUID))
		}
		return err
	}
	id, ref, ok := f.snapshotOf(vmid, name)
	if !ok {
		return nil
	}
	if err := f.ensure(ctx, id, nil); err != nil {
		return err
	}
	f.mu.Lock()
	f.saved[ref.UID] = f.disks[id]
	f.mu.Unlock()
	_, err := f.drv.SaveSnapshot(ctx, ref.Of, ref.UID)
	return err
}

// RolledBack implements pvenode.Contents.
func (f *farm) RolledBack(vmid int, name string) error {
	if v, is, err := f.loose(context.Background(), vmid); is {
		if err == nil {
			err = f.drv.RestoreVolume(context.Background(), backend.VolumeSnapshotRef{UID: strings.TrimPrefix(name, tagUID), Of: v})
		}
		return err
	}
	id, ref, ok := f.snapshotOf(vmid, name)
	if !ok {
		return nil
	}
	f.note("roll back %d", vmid)
	f.mu.Lock()
	f.disks[id] = f.saved[ref.UID]
	f.mu.Unlock()
	return f.drv.RestoreSnapshot(context.Background(), ref)
}

// Deleted implements pvenode.Contents.
func (f *farm) Deleted(_ int, name string) {
	ctx := context.Background()
	saved, _ := f.drv.VolumeSnapshots(ctx)
	for _, s := range saved {
		if snapshotName(s.Ref.UID) == name {
			_ = f.drv.DeleteVolumeSnapshot(ctx, s.Ref)
		}
	}
	all, _ := f.drv.Snapshots(ctx)
	for _, s := range all {
		if snapshotName(s.Ref.UID) == name {
			_ = f.drv.DeleteSnapshot(ctx, s.Ref)
		}
	}
}

// Cloned implements pvenode.Contents.
func (f *farm) Cloned(vmid int, name string, to int) error {
	ctx := context.Background()
	if v, is, err := f.loose(ctx, vmid); is {
		match := volumeInDescription.FindStringSubmatch(f.node.Config(to)["description"])
		switch {
		case err != nil || match == nil || match[1] == v.UID:
		case name == "":
			_, err = f.drv.CloneVolume(ctx, v, match[1])
		default:
			_, err = f.drv.CloneVolumeSnapshot(ctx, backend.VolumeSnapshotRef{UID: strings.TrimPrefix(name, tagUID), Of: v}, match[1])
		}
		return err
	}
	_, ref, ok := f.snapshotOf(vmid, name)
	id, _, ours := f.snapshotOf(to, name)
	if !ok || !ours {
		return nil
	}
	f.mu.Lock()
	f.disks[id], f.copies[id] = f.saved[ref.UID], true
	f.mu.Unlock()
	spec := farmSpec(id)
	spec.From = &ref
	return f.drv.Create(context.Background(), spec)
}
