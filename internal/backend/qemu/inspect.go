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
	return in, d.supervised(ref).Power(&in)
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
