package fake

import (
	"context"
	"fmt"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// AttachVolume implements backend.Volumes.
func (d *Driver) AttachVolume(ctx context.Context, ref backend.Ref, to backend.VolumeRef) error {
	if err := d.point(ctx, OpAttachVolume, Before, ref); err != nil {
		return err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return err
	}
	err = d.h.change(to.UID, func(v *volume) error {
		switch {
		case v.UID == "":
			return noVolume(to.UID)
		case v.Sandbox == ref.UID:
			return nil
		}
		if err := v.free(); err != nil {
			return err
		}
		if other := d.h.attached(ref.UID); other != nil {
			return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d has volume %s", in.rec.Spec.VMID, other.UID).WithHint("detach that one first")
		}
		if err := in.mayHotplug(); err != nil {
			return err
		}
		v.Sandbox = ref.UID
		return nil
	})
	if err != nil {
		return err
	}
	return d.point(ctx, OpAttachVolume, After, ref)
}

// DetachVolume implements backend.Volumes.
func (d *Driver) DetachVolume(ctx context.Context, ref backend.Ref, from backend.VolumeRef) error {
	if err := d.point(ctx, OpDetachVolume, Before, ref); err != nil {
		return err
	}
	if v, err := d.h.inspectVolume(from.UID); err == nil && v.AttachedTo.UID == ref.UID {
		in, err := d.h.find(ref)
		if err != nil {
			return err
		}
		err = d.h.change(from.UID, func(v *volume) error {
			if v.Sandbox != ref.UID {
				return nil
			}
			if err := in.mayHotplug(); err != nil {
				return err
			}
			v.Sandbox = ""
			return nil
		})
		if err != nil {
			return err
		}
	}
	return d.point(ctx, OpDetachVolume, After, ref)
}

// mayHotplug returns an error if the power state of an instance does not allow that
// a volume is attached or detached.
func (in *instance) mayHotplug() error {
	switch p := in.view().Power; {
	case p == backend.PowerStopped, p == backend.PowerCrashed, p == backend.PowerRunning && !in.h.cfg.NoVolumeHotplug:
		return nil
	default:
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is %s", in.rec.Spec.VMID, p).WithHint("stop the sandbox first")
	}
}

// attached returns the volume of an instance, nil if it has none. The caller holds
// h.volMu.
func (h *Host) attached(uid string) *volume {
	for _, v := range h.store.volumes {
		if v.Sandbox == uid {
			return v
		}
	}
	return nil
}

// freeOfVolume returns an error if an instance has a volume.
func (h *Host) freeOfVolume(uid string) error {
	h.volMu.Lock()
	defer h.volMu.Unlock()
	if v := h.attached(uid); v != nil {
		return agentlab.Errorf(agentlab.CodeConflict, "the sandbox has volume %s", v.UID).WithHint("detach the volume first")
	}
	return nil
}

// detachAll detaches the volume of an instance that is being removed.
func (h *Host) detachAll(uid string) error {
	h.volMu.Lock()
	v := h.attached(uid)
	h.volMu.Unlock()
	if v == nil {
		return nil
	}
	return h.change(v.UID, func(v *volume) error {
		if v.Sandbox == uid {
			v.Sandbox = ""
		}
		return nil
	})
}

// volumeFiles changes or reads the files of the volume of a guest. It returns false
// if the guest has none.
func (h *Host) volumeFiles(uid string, fn func(v *volume)) bool {
	h.volMu.Lock()
	v := h.attached(uid)
	h.volMu.Unlock()
	if v == nil {
		return false
	}
	found := false
	err := h.change(v.UID, func(v *volume) error {
		if found = v.Sandbox == uid; found {
			files := make(map[string]string, len(v.Files))
			for path, text := range v.Files { // a snapshot may have the same map
				files[path] = text
			}
			v.Files = files
			fn(v)
		}
		return nil
	})
	if err != nil {
		h.log.Error("fake guest", "uid", uid, "err", err)
	}
	return found
}

// files changes or reads the files of the guest: those in volumePath are on its
// volume, if it has one.
func (p *process) files(path string, fn func(map[string]string)) {
	in := p.g.in
	if strings.HasPrefix(path, volumePath) && in.h.volumeFiles(in.rec.Spec.UID, func(v *volume) { fn(v.Files) }) {
		return
	}
	in.files(fn)
}

// volumeRaw is the content of a volume as the program volume has it.
const volumeRaw = volumePath + "volume"

// volume is the program "volume": it writes a text at the begin of the guest's
// volume, or prints it, or the size of the volume in bytes.
func (p *process) volume(args []string) int {
	code := 2
	found := p.g.in.h.volumeFiles(p.g.in.rec.Spec.UID, func(v *volume) {
		switch {
		case len(args) == 2 && args[0] == "write":
			v.Files[volumeRaw], code = args[1], 0
		case len(args) == 1 && args[0] == "read":
			fmt.Fprint(p.out, v.Files[volumeRaw])
			code = 0
		case len(args) == 1 && args[0] == "size":
			fmt.Fprintln(p.out, int64(v.SizeGB)<<30)
			code = 0
		}
	})
	if !found {
		return 3
	}
	return code
}
