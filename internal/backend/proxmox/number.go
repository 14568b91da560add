package proxmox

import (
	"context"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// The number of a VM is that of its sandbox, unless another VM or container on
// the nodes got it after it was allocated.

// otherNumbers is how many numbers are tried for a VM besides that of its
// sandbox.
const otherNumbers = 5

// otherNumber returns an unused number. It counts down, away from the numbers
// of the next sandboxes. Mostly the first one that no sandbox and no volume has is
// unused; only if it is not, the VMs of the cluster are listed. If many numbers in a row have VMs that are hidden from
// the token, it continues with numbers from the whole rest of the range.
func (d *Driver) otherNumber(ctx context.Context, tried []int) (int, error) {
	taken := map[int]bool{}
	if err := d.addOwn(taken); err != nil {
		return 0, err
	}
	for n := d.cfg.Last; n >= d.cfg.First; n-- {
		if taken[n] || slices.Contains(tried, n) {
			continue
		}
		if free, err := d.pve.Free(ctx, n); free || err != nil {
			return n, err
		}
		break
	}
	taken, err := d.taken(ctx, 0)
	if err != nil {
		return 0, err
	}
	var open []int
	for n := d.cfg.Last; n >= d.cfg.First; n-- {
		if !taken[n] && !slices.Contains(tried, n) {
			open = append(open, n)
		}
	}
	const looks = 50 // of either kind
	last := min(looks, len(open))
	row, rest := slices.Clone(open[:last]), open[last:]
	more := min(looks, len(rest))
	for i := range more {
		row = append(row, rest[i*len(rest)/more])
	}
	for _, n := range row {
		if free, err := d.pve.Free(ctx, n); free || err != nil {
			return n, err
		}
	}
	return 0, agentlab.Errorf(agentlab.CodeExists, "VMID %d and many others are in use", tried[0]).WithHint("%s", ownRange)
}

// ownRange is the hint for a number that is in use.
const ownRange = "the existing VM or volume was not changed; set vmid_range in config.yaml to a range that is not used for anything else on the nodes"

// claim writes a new handle, unless another one has its number.
func (d *Driver) claim(h *handle) error {
	d.claiming.Lock()
	defer d.claiming.Unlock()
	all, err := d.handles()
	if err != nil {
		return err
	}
	volumes, err := d.volumes()
	if err != nil {
		return err
	}
	if slices.ContainsFunc(volumes, func(v *volume) bool { return v.VMID == h.id().VMID }) {
		return numberInUse(h.id().VMID)
	}
	macs := map[string]bool{}
	for _, o := range all {
		if o.id().VMID == h.id().VMID {
			return numberInUse(h.id().VMID)
		}
		macs[o.MAC] = true
	}
	for salt := 0; h.MAC == "" || macs[h.MAC]; salt++ {
		h.MAC = macOf(h.Spec.UID, salt).String()
	}
	h.Port = portOf(h.id().VMID, d.firewalled(h))
	return d.save(h)
}

// numberFree notes which storages will have the volumes of a new sandbox. No
// volume there has the number of its VM yet, so all volumes with it later belong
// to the sandbox. If a volume has the number, numberFree returns exists, unless
// the volume belongs to the sandbox itself and its handle was lost. It does not
// look for VMs with the number: the clone fails if there is one.
func (d *Driver) numberFree(ctx context.Context, h *handle, t template) error {
	storages := d.storagesOf(t)
	for _, storage := range storages {
		left, err := d.pve.Content(ctx, h.Node, storage, "images", h.id().VMID)
		what := pve.UnreadableFile(err)
		if len(left) > 0 {
			what = left[0].VolID
		}
		switch {
		case what != "":
			return d.volumeInUse(ctx, h, what)
		case err != nil:
			return err
		}
	}
	h.Storages = storages
	return nil
}

// volumeInUse decides about a volume that has the number of a new VM.
func (d *Driver) volumeInUse(ctx context.Context, h *handle, volume string) error {
	s, err := d.lookup(ctx, h.id(), h)
	if err != nil || s.owned {
		return err
	}
	return numberTaken("VMID %d is in use by volume %s", h.id().VMID, clip(volume))
}

func numberInUse(vmid int) error {
	return numberTaken("VMID %d is in use, and not by this sandbox", vmid)
}

// numberError is the error for a number with which the VM of a sandbox cannot
// be made. Other errors may have code exists too.
type numberError struct{ error }

func (e *numberError) Unwrap() error { return e.error }

func numberTaken(format string, args ...any) error {
	return &numberError{agentlab.Errorf(agentlab.CodeExists, format, args...).WithHint("%s", ownRange)}
}

// Taken implements backend.Host: numbers of VMs and containers of the
// cluster and of templates. A token sees only those that it has rights on:
// Create detects others by its clone, and checks for volumes with the number
// itself. Volumes are not listed here, because a single damaged
// file of any user makes such a list fail.
func (d *Driver) Taken(ctx context.Context, first, last int) ([]int, error) {
	taken, err := d.taken(ctx, inventoryAge)
	if err != nil {
		return nil, err
	}
	var out []int
	for n := range taken {
		if n >= first && n <= last {
			out = append(out, n)
		}
	}
	return out, nil
}

func (d *Driver) taken(ctx context.Context, age time.Duration) (map[int]bool, error) {
	guests, err := d.guests(ctx, age)
	if err != nil {
		return nil, err
	}
	taken := map[int]bool{}
	for _, g := range guests {
		taken[int(g.VMID)] = true
	}
	return taken, d.addOwn(taken)
}

// addOwn adds the numbers of templates, sandboxes and volumes.
func (d *Driver) addOwn(taken map[int]bool) error {
	for _, n := range d.cfg.Nodes {
		for _, vmid := range n.Templates {
			taken[vmid] = true
		}
	}
	all, err := d.handles()
	if err != nil {
		return err
	}
	for _, h := range all {
		taken[h.Spec.VMID], taken[h.id().VMID] = true, true
	}
	volumes, err := d.volumes()
	for _, v := range volumes {
		taken[v.VMID] = true
	}
	return err
}
