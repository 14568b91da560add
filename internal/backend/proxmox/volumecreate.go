package proxmox

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// ValidateVolume implements backend.Volumes. Whether a storage exists is not known
// without asking the node.
func (d *Driver) ValidateVolume(spec backend.VolumeSpec) error {
	if err := spec.Check(); err != nil {
		return err
	}
	return validUID(spec.UID)
}

// CreateVolume implements backend.Volumes.
func (d *Driver) CreateVolume(ctx context.Context, spec backend.VolumeSpec) (backend.Volume, error) {
	if err := d.ValidateVolume(spec); err != nil {
		return backend.Volume{}, err
	}
	unlock, err := d.holdVolumes(ctx, spec.UID)
	if err != nil {
		return backend.Volume{}, err
	}
	defer unlock()
	return d.make(ctx, spec.UID, func() (*volume, error) {
		node, st, err := d.volumeStorage(ctx, spec.Storage)
		return &volume{UID: spec.UID, Node: node, Storage: st.Name, SizeGB: spec.SizeGB, storageType: st.Type}, err
	})
}

// make returns a volume that exists, completes a partial one, and makes a new one
// otherwise, for which plan returns all but the number.
func (d *Driver) make(ctx context.Context, uid string, plan func() (*volume, error)) (backend.Volume, error) {
	v, err := d.readVolume(uid)
	if err != nil {
		return backend.Volume{}, err
	}
	if v != nil && v.Restoring != "" && v.Phase == volumeMade {
		return backend.Volume{}, agentlab.Errorf(agentlab.CodeConflict, "the restoration of volume %s was interrupted", uid).
			WithHint("restore one of its snapshots, or delete the volume")
	}
	if v != nil && v.Phase == volumeDeleting {
		if err := d.deleteVolume(ctx, v); err != nil {
			return backend.Volume{}, err
		}
		v = nil
	}
	isNew := v == nil
	if isNew {
		if v, err = plan(); err != nil {
			return backend.Volume{}, err
		}
		v.Phase = volumeMaking
		if err := d.claimVolume(ctx, v, nil); err != nil {
			return backend.Volume{}, err
		}
		d.at("volume noted")
	} else if v.Phase != volumeMade {
		if err := d.destroyStrays(ctx, v); err != nil {
			return backend.Volume{}, err
		}
	}
	empty := v.Source == nil
	if v.Phase != volumeMade {
		if err := d.completeVolume(ctx, v, isNew); err != nil {
			return backend.Volume{}, err
		}
	}
	if isNew && empty { // all of it is known
		return backend.Volume{Ref: backend.VolumeRef{UID: v.UID, Handle: strconv.Itoa(v.VMID)}, Storage: v.Storage, SizeGB: v.SizeGB}, nil
	}
	return d.view(ctx, v)
}

// volumeStorage returns the node and the storage of a new volume.
func (d *Driver) volumeStorage(ctx context.Context, name string) (node string, _ pve.Storage, err error) {
	none := pve.Storage{}
	for _, n := range d.onlineNodes(ctx) {
		storage := cmp.Or(name, d.cfg.Storage)
		if storage == "" {
			if storage, err = d.templateStorage(ctx, n); err != nil {
				return "", none, err
			}
		}
		list, err := d.pve.Storages(ctx, n.Name)
		if err != nil {
			return "", none, err
		}
		if i := slices.IndexFunc(list, func(s pve.Storage) bool { return s.Name == storage && s.Holds("images") }); i >= 0 {
			return n.Name, list[i], nil
		}
	}
	return "", none, agentlab.Errorf(agentlab.CodeUnsupported, "no node has a storage %q for disks of VMs that the API token may use", clip(name)).
		WithField("storage").WithHint("run on the node: pvesm status --content images")
}

// templateStorage returns the storage on which the templates of a node are.
func (d *Driver) templateStorage(ctx context.Context, n *Node) (string, error) {
	for _, vmid := range n.Templates {
		t, err := d.template(ctx, n.Name, vmid)
		if err != nil {
			return "", err
		}
		volid, _ := driveVolume(t.cfg[t.disk])
		storage, _, _ := strings.Cut(volid, ":")
		return storage, nil
	}
	return "", agentlab.Errorf(agentlab.CodeUnavailable, "node %s has no template, whose storage would be the default for volumes", n.Name).
		WithField("proxmox.storage").WithHint("set proxmox.storage in config.yaml, or name the storage of the volume")
}

// claimVolume gives a volume an unused number, and writes its state.
func (d *Driver) claimVolume(ctx context.Context, v *volume, tried []int) error {
	d.claiming.Lock()
	defer d.claiming.Unlock()
	n, err := d.otherNumber(ctx, append(tried, 0))
	if err != nil {
		return err
	}
	v.VMID, v.Proved = n, false
	return d.saveVolume(v)
}

// renumber gives up a number that another VM got.
func (d *Driver) renumber(ctx context.Context, v *volume) error {
	d.log.Warn("the number of a new volume belongs to another VM or disk", "vmid", v.VMID, "volume", v.UID)
	return d.claimVolume(ctx, v, []int{v.VMID})
}

// unmarkedHolder returns the error for a VM that may be the holder of a volume and
// does not have the whole mark. It is neither used nor deleted, and not forgotten.
func (d *Driver) unmarkedHolder(v *volume) error {
	return agentlab.Errorf(agentlab.CodeUnknownOutcome, "cannot determine whether VM %d is still the holder of volume %s: its description lacks lines", v.VMID, v.UID).
		WithHint("on node %[1]s run qm config %[2]d; if it is the holder, restore its mark: qm set %[2]d --description \"$(printf '%[3]s')\"; "+
			"if it is not needed: qm set %[2]d --protection 0 && qm destroy %[2]d", v.Node, v.VMID, strings.ReplaceAll(d.holderMark(v), "\n", `\n`))
}

// completeVolume makes what a partial volume lacks. The number of a new one was found
// free just now: if it no longer is, the node refuses to make the holder.
func (d *Driver) completeVolume(ctx context.Context, v *volume, isNew bool) error {
	for i := range otherNumbers {
		if err := d.settleVolume(ctx, v); err != nil {
			return err
		}
		var ho holder
		if i > 0 || !isNew {
			var err error
			if ho, err = d.holderOf(ctx, v); err != nil {
				return err
			}
		}
		again, err := d.completeOnce(ctx, v, ho)
		if err != nil || !again {
			return err
		}
	}
	return agentlab.Errorf(agentlab.CodeExists, "the last of %d numbers for a volume, %d, is in use too", otherNumbers, v.VMID).WithHint("%s", ownRange)
}

func (d *Driver) completeOnce(ctx context.Context, v *volume, ho holder) (again bool, err error) {
	switch {
	case ho.traces:
		return false, d.unmarkedHolder(v)
	case ho.exists && !ho.ours:
		return true, d.renumber(ctx, v)
	case ho.ours && v.Source != nil && ho.cfg["lock"] == lockClone: // it died
		return true, d.destroyHolder(ctx, v, ho)
	case !ho.exists && v.Source != nil:
		err = d.cloneHolder(ctx, v)
	case !ho.exists:
		err = d.changeVolume(ctx, v, func() (pve.UPID, error) {
			return d.pve.Create(ctx, v.Node, v.VMID, d.cfg.Pool, d.holderOptions(v))
		})
	case v.Source != nil:
		if err := d.pve.Set(ctx, v.Node, v.VMID, pve.Changes{Set: d.holderOptions(v), Digest: ho.cfg.Digest()}); err != nil {
			return false, err
		}
		return false, d.volumeComplete(v)
	case ho.volid == "":
		return d.allocate(ctx, v)
	default:
		return false, d.volumeComplete(v)
	}
	if agentlab.CodeOf(err) == agentlab.CodeExists {
		return true, nil // the next look decides whose it is
	}
	return true, err
}

func (d *Driver) volumeComplete(v *volume) error {
	d.at("volume about to be complete")
	v.Phase, v.Source = volumeMade, nil
	return d.saveVolume(v)
}

// holderOptions are the options of a holder without its disk.
func (d *Driver) holderOptions(v *volume) map[string]string {
	return map[string]string{
		"name": "agentlab-volume-" + v.UID[:8], "description": d.holderMark(v), "tags": tagVolume,
		"memory": "16", "onboot": "0", "protection": "1",
	}
}

// allocate makes the disk of a holder that has none. Before that no disk on the
// storage has its number, so that all later ones are the volume's.
func (d *Driver) allocate(ctx context.Context, v *volume) (again bool, err error) {
	list, err := d.pve.Content(ctx, v.Node, v.Storage, "images", v.VMID)
	if err != nil {
		return false, err
	}
	if len(list) > 0 && !v.Proved {
		ho, err := d.holderOf(ctx, v)
		if err == nil && ho.ours {
			err = d.destroyHolder(ctx, v, ho)
		}
		if err != nil {
			return false, err
		}
		return true, d.renumber(ctx, v)
	}
	if !v.Proved {
		v.Proved = true
		if err := d.saveVolume(v); err != nil {
			return false, err
		}
	}
	disk := v.Storage + ":" + strconv.Itoa(v.SizeGB)
	if len(list) > 0 { // a killed task made it
		disk = list[0].VolID
	} else {
		if v.storageType == "" {
			st, err := d.pve.StorageStatus(ctx, v.Node, v.Storage)
			if err != nil {
				return false, err
			}
			v.storageType = st.Type
		}
		if slices.Contains(fileStorages, v.storageType) {
			disk += ",format=qcow2" // which has snapshots
		}
	}
	return true, d.changeVolume(ctx, v, func() (pve.UPID, error) {
		return d.pve.SetAsync(ctx, v.Node, v.VMID, pve.Changes{Set: map[string]string{holderSlot: disk}})
	})
}

// fileStorages are the types of storages on which disks are files.
var fileStorages = []string{"dir", "nfs", "cifs"}

// cloneHolder makes a holder with a copy of the disk of another one. If nothing was
// made, nothing stays.
func (d *Driver) cloneHolder(ctx context.Context, v *volume) error {
	err := d.changeVolume(ctx, v, func() (pve.UPID, error) {
		return d.pve.Clone(ctx, v.Node, v.Source.VMID, pve.CloneOptions{
			NewID: v.VMID, Name: "agentlab-volume-" + v.UID[:8], Description: d.holderMark(v), Pool: d.cfg.Pool, Full: true, Snapshot: v.Source.Snapshot,
		})
	})
	if err == nil || v.Change != nil || agentlab.CodeOf(err) == agentlab.CodeExists {
		return err
	}
	if ho, herr := d.holderOf(ctx, v); herr == nil && !ho.exists {
		if ferr := d.forgetVolume(v); ferr != nil {
			return ferr
		}
	}
	return err
}
