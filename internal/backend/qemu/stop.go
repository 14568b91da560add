package qemu

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Stop implements backend.Driver.
func (d *Driver) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := d.load(ref); err != nil {
		if agentlab.CodeOf(err) == agentlab.CodeUnavailable { // half made: nothing runs
			return nil
		}
		return err
	}
	s := d.supervised(ref)
	if err := s.Halt(ctx, grace); err != nil {
		return asError(err, "stopping sandbox %d", ref.VMID)
	}
	d.at("halted")
	return s.Settle(d.cfg.Now())
}

// Destroy implements backend.Driver. The directory goes to the trash in one
// step, so that what a crash leaves behind is never taken for a sandbox.
func (d *Driver) Destroy(ctx context.Context, ref backend.Ref) error {
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	dir, trash := d.dir(ref), d.trash(ref)
	switch st, err := os.Lstat(dir); {
	case errors.Is(err, fs.ErrNotExist):
		return d.empty(trash)
	case err != nil:
		return fault(err, "cannot look at sandbox %d", ref.VMID)
	case !st.IsDir():
		return d.empty(trash) // not ours
	}
	h, err := readHandle(dir)
	if err == nil && h.Spec.Ref() != ref {
		return d.empty(trash) // not ours
	}
	if err := d.supervised(ref).Halt(ctx, 0); err != nil {
		return asError(err, "destroying sandbox %d", ref.VMID)
	}
	d.at("halted")
	if err := d.empty(trash); err != nil {
		return err
	}
	if err := os.Rename(dir, trash); err != nil {
		return fault(err, "cannot move sandbox %d to the trash", ref.VMID)
	}
	d.at("in the trash")
	return d.empty(trash)
}

func (d *Driver) empty(trash string) error {
	if err := os.RemoveAll(trash); err != nil {
		return fault(err, "cannot empty %s", trash)
	}
	return nil
}
