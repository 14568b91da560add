package qemu

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// stopPatience is how long a shim may take beyond the guest's grace; after
// that it is killed, and QEMU dies with it.
const stopPatience = 6 * time.Second

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
	dir := d.dir(ref)
	if err := d.halt(ctx, dir, grace); err != nil {
		return asError(err, "stopping sandbox %d", ref.VMID)
	}
	d.at("halted")
	return d.settle(dir)
}

// settle writes down that a sandbox whose shim is gone is stopped by request,
// whatever its shim wrote or could not write.
func (d *Driver) settle(dir string) error {
	st, err := readState(dir)
	if err != nil {
		return err
	}
	if st.Phase == "" || st.Phase == phaseStopped && !st.Expired {
		return nil
	}
	st.Phase, st.Reason, st.Expired, st.Changed = phaseStopped, "", false, d.cfg.Now().UTC()
	if err := writeJSON(filepath.Join(dir, fileState), st); err != nil {
		return fault(err, "cannot write %s", fileState)
	}
	return nil
}

// halt returns when neither shim nor QEMU of the sandbox in dir lives.
func (d *Driver) halt(ctx context.Context, dir string, grace time.Duration) error {
	shimLock, qemuLock := filepath.Join(dir, fileShimLock), filepath.Join(dir, fileQEMULock)
	held, err := lockHeld(shimLock)
	if err != nil {
		return err
	}
	if held {
		sctx, cancel := context.WithTimeout(ctx, grace+stopPatience)
		err := shimClient(dir).stop(sctx, grace)
		if err == nil {
			err = waitFree(sctx, shimLock)
		}
		cancel()
		if ctx.Err() != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "stopping: %w", context.Cause(ctx))
		}
		if err != nil {
			d.log.Warn("killing a supervisor that does not answer", "dir", dir, "err", err)
		}
	}
	// What lives now does not listen. Before a shim has noted its process id
	// it cannot be killed, but then it is about to note it, or to end.
	kctx, cancel := context.WithTimeout(ctx, stopPatience)
	defer cancel()
	err = poll(kctx, func() (bool, error) {
		shim, err1 := lockHeld(shimLock)
		qemu, err2 := lockHeld(qemuLock)
		if err := errors.Join(err1, err2); err != nil || (!shim && !qemu) {
			return true, err
		}
		if shim {
			err1 = killNoted(dir, fileShimPID)
		}
		if qemu && !shim {
			err2 = killNoted(dir, fileQEMUPID)
		}
		return false, errors.Join(err1, err2)
	})
	if err != nil && kctx.Err() != nil && ctx.Err() == nil {
		return agentlab.Errorf(agentlab.CodeUnknownOutcome, "the sandbox's processes do not end")
	}
	return err
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
	if err := d.halt(ctx, dir, 0); err != nil {
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
