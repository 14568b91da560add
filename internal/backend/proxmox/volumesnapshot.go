package proxmox

import (
	"context"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// A snapshot of a volume is one of its holder. Proxmox deletes it with the holder.

// savedMark is the description of a snapshot of a volume.
func (d *Driver) savedMark(v *volume, uid string) string {
	return "Snapshot of a volume of AgentLab.\nagentlab-snapshot: " + uid + "\n" + d.volumeMark(v)
}

func (d *Driver) ourSaved(v *volume, s pve.Snapshot) (uid string, ours bool) {
	uid, ours = strings.CutPrefix(s.Name, tagUID)
	return uid, ours && strings.TrimSpace(string(s.Description)) == strings.TrimSpace(d.savedMark(v, uid))
}

// findSaved returns a snapshot of a volume, nil if there is none.
func (d *Driver) findSaved(ctx context.Context, v *volume, uid string) (*pve.Snapshot, error) {
	if err := validUID(uid); err != nil {
		return nil, err
	}
	all, err := d.pve.Snapshots(ctx, v.Node, v.VMID)
	if err != nil {
		return nil, err
	}
	for _, s := range all {
		if found, ours := d.ourSaved(v, s); ours && found == uid {
			return &s, nil
		}
	}
	return nil, nil
}

func (d *Driver) wholeSaved(ctx context.Context, v *volume, uid string) (*pve.Snapshot, error) {
	s, err := d.findSaved(ctx, v, uid)
	if err == nil && (s == nil || s.State != "") {
		err = agentlab.Errorf(agentlab.CodeNotFound, "volume %s has no snapshot %s that is complete", v.UID, uid)
	}
	return s, err
}

func (v *volume) dropSaved(uid string) {
	v.Snapshots = slices.DeleteFunc(v.Snapshots, func(s savedVolume) bool { return s.UID == uid })
}

// savedView returns a snapshot as a backend.VolumeSnapshot.
func (d *Driver) savedView(v *volume, s pve.Snapshot) backend.VolumeSnapshot {
	uid, _ := d.ourSaved(v, s)
	out := backend.VolumeSnapshot{
		Ref: backend.VolumeSnapshotRef{UID: uid, Of: backend.VolumeRef{UID: v.UID}}, Partial: s.State != "",
	}
	for _, e := range v.Snapshots {
		if e.UID == uid && !out.Partial {
			out.SizeGB = e.SizeGB
		}
	}
	return out
}

// SnapshotVolume implements backend.Volumes.
func (d *Driver) SnapshotVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.VolumeSnapshot, error) {
	none := backend.VolumeSnapshot{}
	unlock, err := d.holdVolumes(ctx, ref.UID)
	if err != nil {
		return none, err
	}
	defer unlock()
	v, ho, err := d.unattached(ctx, ref.UID)
	if err == nil {
		err = d.notAnotherVolumes(v, uid)
	}
	if err != nil {
		return none, err
	}
	found, err := d.findSaved(ctx, v, uid)
	if err != nil || found != nil && found.State == "" {
		if err != nil {
			return none, err
		}
		return d.savedView(v, *found), nil
	}
	if err := d.freeHolder(ctx, v, ho); err != nil {
		return none, err
	}
	if found != nil {
		if err := d.removeSaved(ctx, v, *found); err != nil {
			return none, err
		}
	}
	v.dropSaved(uid)
	v.Snapshots = append(v.Snapshots, savedVolume{UID: uid, SizeGB: ho.sizeGB})
	err = d.changeVolume(ctx, v, func() (pve.UPID, error) {
		return d.pve.Save(ctx, v.Node, v.VMID, snapshotName(uid), d.savedMark(v, uid), false)
	})
	if err == nil {
		return backend.VolumeSnapshot{Ref: backend.VolumeSnapshotRef{UID: uid, Of: backend.VolumeRef{UID: v.UID}}, SizeGB: ho.sizeGB}, nil
	}
	if v.Change == nil {
		if found, ferr := d.findSaved(ctx, v, uid); ferr == nil && found == nil {
			v.dropSaved(uid)
			if serr := d.saveVolume(v); serr != nil {
				return none, serr
			}
		}
	}
	return none, err
}

// notAnotherVolumes returns an error if a snapshot is one of another volume.
func (d *Driver) notAnotherVolumes(v *volume, uid string) error {
	all, err := d.volumes()
	for _, o := range all {
		if o.UID != v.UID && slices.ContainsFunc(o.Snapshots, func(s savedVolume) bool { return s.UID == uid }) {
			return agentlab.Errorf(agentlab.CodeExists, "snapshot %s is one of volume %s", uid, o.UID)
		}
	}
	return err
}

// VolumeSnapshots implements backend.Volumes.
func (d *Driver) VolumeSnapshots(ctx context.Context) ([]backend.VolumeSnapshot, error) {
	if err := d.adoptVolumes(ctx, ""); err != nil {
		return nil, err
	}
	all, err := d.volumes()
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(v *volume) bool { return len(v.Snapshots) == 0 })
	return each(all, func(v *volume) (out []backend.VolumeSnapshot, err error) {
		ho, err := d.holderOf(ctx, v)
		if err != nil || !ho.ours {
			return nil, err
		}
		list, err := d.pve.Snapshots(ctx, v.Node, v.VMID)
		for _, s := range list {
			if _, ours := d.ourSaved(v, s); ours {
				out = append(out, d.savedView(v, s))
			}
		}
		return out, err
	})
}

// RestoreVolume implements backend.Volumes.
func (d *Driver) RestoreVolume(ctx context.Context, snapshot backend.VolumeSnapshotRef) error {
	unlock, err := d.holdVolumes(ctx, snapshot.Of.UID)
	if err != nil {
		return err
	}
	defer unlock()
	v, ho, err := d.withSnapshots(ctx, snapshot)
	if err != nil {
		return err
	}
	if err := d.notAttached(ctx, v); err != nil {
		return err
	}
	s, err := d.wholeSaved(ctx, v, snapshot.UID)
	if err != nil {
		return err
	}
	if err := d.freeHolder(ctx, v, ho); err != nil {
		return err
	}
	was := v.Restoring
	v.Restoring = snapshot.UID
	sent := false
	err = d.changeVolume(ctx, v, func() (task pve.UPID, err error) {
		task, err = d.pve.Rollback(ctx, v.Node, v.VMID, s.Name)
		sent = err == nil
		return task, err
	})
	switch {
	case err == nil:
		d.at("volume rolled back")
		v.Restoring = ""
		return d.saveVolume(v)
	case v.Change == nil && was == "" && (!sent || refusedRollback(err)):
		v.Restoring = ""
		if serr := d.saveVolume(v); serr != nil {
			return serr
		}
	}
	if agentlab.CodeOf(err) == agentlab.CodeConflict && strings.Contains(err.Error(), "is not most recent snapshot") {
		return agentlab.Errorf(agentlab.CodeConflict, "the snapshot is not the newest of volume %s: %w", v.UID, err).
			WithHint("storage %s can return only to the newest snapshot: delete the newer ones first", v.Storage)
	}
	return err
}

// withSnapshots returns the volume of a snapshot, which may be partial.
func (d *Driver) withSnapshots(ctx context.Context, snapshot backend.VolumeSnapshotRef) (*volume, holder, error) {
	v, err := d.readVolume(snapshot.Of.UID)
	if err != nil {
		return nil, holder{}, err
	}
	if v == nil || v.Phase != volumeMade {
		return nil, holder{}, noVolume(snapshot.Of.UID)
	}
	if err := d.settleVolume(ctx, v); err != nil {
		return nil, holder{}, err
	}
	ho, err := d.holderOf(ctx, v)
	if err == nil && !ho.ours {
		err = noVolume(v.UID)
	}
	return v, ho, err
}

// CloneVolume implements backend.Volumes.
func (d *Driver) CloneVolume(ctx context.Context, ref backend.VolumeRef, uid string) (backend.Volume, error) {
	unlock, err := d.holdVolumes(ctx, ref.UID, uid)
	if err != nil {
		return backend.Volume{}, err
	}
	defer unlock()
	return d.make(ctx, uid, func() (*volume, error) {
		v, ho, err := d.unattached(ctx, ref.UID)
		if err == nil {
			err = d.freeHolder(ctx, v, ho)
		}
		if err != nil {
			return nil, err
		}
		return &volume{UID: uid, Node: v.Node, Storage: v.Storage, Source: &volumeSource{VMID: v.VMID}}, nil
	})
}

// CloneVolumeSnapshot implements backend.Volumes.
func (d *Driver) CloneVolumeSnapshot(ctx context.Context, snapshot backend.VolumeSnapshotRef, uid string) (backend.Volume, error) {
	unlock, err := d.holdVolumes(ctx, snapshot.Of.UID, uid)
	if err != nil {
		return backend.Volume{}, err
	}
	defer unlock()
	return d.make(ctx, uid, func() (*volume, error) {
		v, ho, err := d.withSnapshots(ctx, snapshot)
		if err == nil {
			_, err = d.wholeSaved(ctx, v, snapshot.UID)
		}
		if err == nil {
			err = d.freeHolder(ctx, v, ho)
		}
		if err != nil {
			return nil, err
		}
		return &volume{UID: uid, Node: v.Node, Storage: v.Storage, Source: &volumeSource{VMID: v.VMID, Snapshot: snapshotName(snapshot.UID)}}, nil
	})
}

// DeleteVolumeSnapshot implements backend.Volumes.
func (d *Driver) DeleteVolumeSnapshot(ctx context.Context, snapshot backend.VolumeSnapshotRef) error {
	unlock, err := d.holdVolumes(ctx, snapshot.Of.UID)
	if err != nil {
		return err
	}
	defer unlock()
	v, ho, err := d.withSnapshots(ctx, snapshot)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return nil
	case err != nil:
		return err
	}
	s, err := d.findSaved(ctx, v, snapshot.UID)
	if err != nil {
		return err
	}
	if s != nil {
		if err := d.freeHolder(ctx, v, ho); err != nil {
			return err
		}
		if err := d.removeSaved(ctx, v, *s); err != nil {
			return err
		}
	}
	d.at("snapshot of the volume deleted")
	v.dropSaved(snapshot.UID)
	return d.saveVolume(v)
}

func (d *Driver) removeSaved(ctx context.Context, v *volume, s pve.Snapshot) error {
	return d.changeVolume(ctx, v, func() (pve.UPID, error) {
		return d.pve.DeleteSnapshot(ctx, v.Node, v.VMID, s.Name, s.State != "")
	})
}
