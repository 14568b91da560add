package qemu

import (
	"context"
	"os"
	"path/filepath"
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
	f, err := d.load(ref)
	if agentlab.CodeOf(err) == agentlab.CodeUnavailable { // half made: nothing runs
		return nil
	}
	if err != nil {
		return err
	}
	s := d.supervised(f)
	if err := s.Halt(ctx, grace); err != nil {
		return asError(err, "stopping sandbox %d", f.vmid)
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
	f, err := d.find(ref.UID)
	if err != nil {
		return err
	}
	if f.dir == "" {
		return empty(f.trash)
	}
	if err := d.supervised(f).Halt(ctx, 0); err != nil {
		return asError(err, "destroying sandbox %d", f.vmid)
	}
	d.at("halted")
	if err := empty(f.trash); err != nil {
		return err
	}
	trash := filepath.Join(d.sandboxes(), trashPrefix+filepath.Base(f.dir))
	if err := os.Rename(f.dir, trash); err != nil {
		return fault(err, "cannot move sandbox %d to the trash", f.vmid)
	}
	d.at("in the trash")
	return empty(trash)
}

// empty removes a directory; "" is none.
func empty(trash string) error {
	if err := os.RemoveAll(trash); err != nil {
		return fault(err, "cannot empty %s", trash)
	}
	return nil
}
