package qemu

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// Inspect implements backend.Driver.
func (d *Driver) Inspect(_ context.Context, ref backend.Ref) (backend.Instance, error) {
	if err := validRef(ref); err != nil {
		return backend.Instance{}, err
	}
	in, err := d.inspect(ref)
	if err == nil || agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return in, err
	}
	switch _, terr := os.Lstat(d.trash(ref)); {
	case terr == nil:
		return trashed(ref), nil
	case !errors.Is(terr, fs.ErrNotExist):
		return in, fault(terr, "cannot look for sandbox %d", ref.VMID)
	}
	return in, err
}

func trashed(ref backend.Ref) backend.Instance {
	return backend.Instance{Ref: ref, Power: backend.PowerPartial, Reason: "its destruction was cut short"}
}

func (d *Driver) inspect(ref backend.Ref) (backend.Instance, error) {
	dir := d.dir(ref)
	in := backend.Instance{Ref: ref, Power: backend.PowerPartial, Reason: "its making was cut short"}
	switch st, err := os.Lstat(dir); {
	case errors.Is(err, fs.ErrNotExist):
		return in, absent(ref)
	case err != nil:
		return in, fault(err, "cannot look at sandbox %d", ref.VMID)
	case !st.IsDir():
		return in, absent(ref)
	}
	h, err := readHandle(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return in, nil
	}
	if err != nil {
		return in, asError(err, "cannot read sandbox %d", ref.VMID)
	}
	if h.Spec.Ref() != ref {
		return in, absent(ref)
	}
	in.Name, in.Spec = h.Spec.Name, &h.Spec
	if _, err := os.Lstat(filepath.Join(dir, fileRoot)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return in, nil
		}
		return in, fault(err, "cannot look at the disk of sandbox %d", ref.VMID)
	}
	in.IP = vnet.DefaultGuest.String()
	return in, d.power(dir, &in)
}

// power completes an instance by how its last run stands.
func (d *Driver) power(dir string, in *backend.Instance) error {
	// A shim writes how it ended before it lets the lock go, so a free lock
	// makes the state final, unless a start came between the two looks.
	var st runState
	for range 2 {
		held, err := lockHeld(filepath.Join(dir, fileShimLock))
		if err != nil {
			return fault(err, "cannot look at the shim's lock")
		}
		if st, err = readState(dir); err != nil && !held {
			return err
		}
		if held {
			in.Power, in.Reason = backend.PowerRunning, st.Paused
			return nil
		}
	}
	in.Power, in.Reason = endOf(st)
	in.HostRestarted = in.Power == backend.PowerCrashed && in.Reason == hostRestarted
	in.Expired = st.Expired
	return nil
}

// hostRestarted is the reason of a run that a restart of the host has ended.
const hostRestarted = "the host was restarted"

// endOf tells how a run has ended whose shim is gone.
func endOf(st runState) (backend.Power, string) {
	switch {
	case st.Phase == "", st.Phase == phaseStopped, st.Expired:
		return backend.PowerStopped, ""
	case st.Phase == phaseCrashed:
		return backend.PowerCrashed, st.Reason
	case st.Phase == phaseStopping && st.Reason == "" && st.Boot == bootID(): // what it was told to do has happened all the same
		return backend.PowerStopped, ""
	case st.Boot != bootID():
		return backend.PowerCrashed, hostRestarted
	}
	return backend.PowerCrashed, "its supervisor process was killed, and QEMU with it"
}

// readState reads state.json; a sandbox that never ran has none.
func readState(dir string) (runState, error) {
	var st runState
	path := filepath.Join(dir, fileState)
	if info, err := os.Stat(path); err == nil && info.Size() == 0 {
		return runState{Phase: phaseRunning}, nil // a power cut lost what was not yet on the disk
	}
	err := readJSON(path, &st)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return st, fault(err, "cannot read %s", fileState)
	}
	return st, nil
}

// List implements backend.Driver. A directory that cannot be read is told of
// as partial, with the reason, so that it is not taken for absent.
func (d *Driver) List(ctx context.Context) ([]backend.Instance, error) {
	entries, err := os.ReadDir(d.sandboxes())
	if err != nil {
		return nil, fault(err, "cannot read %s", d.sandboxes())
	}
	var list []backend.Instance
	seen := map[backend.Ref]bool{}
	var trash []backend.Ref
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "listing sandboxes: %w", context.Cause(ctx))
		}
		if name, ok := strings.CutPrefix(e.Name(), trashPrefix); ok {
			if ref, ok := parseDirName(name); ok && e.IsDir() {
				trash = append(trash, ref)
			}
			continue
		}
		ref, ok := parseDirName(e.Name())
		if !ok || !e.IsDir() {
			continue
		}
		in, err := d.inspect(ref)
		switch agentlab.CodeOf(err) {
		case "":
		case agentlab.CodeNotFound: // gone meanwhile, or not ours
			continue
		default:
			in.Power, in.Reason = backend.PowerPartial, agentlab.OneLine(err.Error(), maxReason)
		}
		seen[ref] = true
		list = append(list, in)
	}
	for _, ref := range trash {
		if !seen[ref] {
			list = append(list, trashed(ref))
		}
	}
	return list, nil
}
