package vmdir

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Clone creates a volume whose disk is made by disk, with both volumes locked, if
// usable accepts the other one.
func (d *Volumes) Clone(ctx context.Context, from backend.VolumeRef, uid string, usable func(FoundVolume) error, disk func(src FoundVolume, dir, tmp string) error) (backend.Volume, error) {
	if err := d.ValidateVolume(backend.VolumeSpec{UID: uid, SizeGB: 1}); err != nil {
		return backend.Volume{}, err
	}
	if uid == from.UID {
		return backend.Volume{}, agentlab.Errorf(agentlab.CodeInvalid, "a volume cannot be its own clone").WithField("uid")
	}
	var found [2]FoundVolume
	order := []int{0, 1} // two clones in opposite directions must not wait for each other
	if uid < from.UID {
		order = []int{1, 0}
	}
	for _, i := range order {
		v, unlock, err := d.Open(ctx, []string{from.UID, uid}[i])
		if err != nil {
			return backend.Volume{}, err
		}
		defer unlock()
		found[i] = v
	}
	src, to := found[0], found[1]
	if !to.Whole {
		if err := usable(src); err != nil {
			return backend.Volume{}, err
		}
	}
	return d.New(ctx, to, func(tmp string) error { return disk(src, to.Dir, tmp) })
}

// Cloneable returns an error if a volume cannot be copied: a sandbox has it, or it is
// partial.
func (d *Volumes) Cloneable(v FoundVolume) error {
	if err := d.Detached(v.UID); err != nil {
		return err
	}
	return v.Usable()
}
