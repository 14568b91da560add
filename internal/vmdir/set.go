package vmdir

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// Set is the sandboxes of a driver, each in a directory of Root.
type Set struct {
	Root string // absolute path

	locks lock.Keyed[string] // by uid; held by calls that change a sandbox
}

// Begin waits for the sandbox's lock in this process. Every method that changes
// a sandbox holds it.
func (s *Set) Begin(ctx context.Context, ref backend.Ref) (unlock func(), err error) {
	unlock, err = s.locks.Lock(ctx, ref.UID)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeBusy, "another operation on the sandbox is in progress: %w", err)
	}
	return unlock, nil
}

// Find returns the sandbox with a UID. If there is none, Dir and Trash are "".
func (s *Set) Find(uid string) (Found, error) {
	if uid == "" {
		return Found{}, nil
	}
	all, err := Find(s.Root, uid)
	if err != nil || len(all) == 0 {
		return Found{}, err
	}
	return all[0], nil
}

// Load finds a sandbox whose Create has written its mark.
func (s *Set) Load(ref backend.Ref) (Found, error) {
	f, err := s.Find(ref.UID)
	switch {
	case err != nil:
		return f, err
	case f.Dir == "":
		return f, Absent(ref.UID)
	case errors.Is(f.Err, fs.ErrNotExist):
		return f, agentlab.Errorf(agentlab.CodeUnavailable, "the creation of sandbox %d was interrupted", f.VMID)
	case f.Err != nil:
		return f, AsError(f.Err, "cannot read sandbox %d", f.VMID)
	}
	return f, nil
}

// List implements backend.Driver. A sandbox that cannot be read is partial, with
// the reason, so that it is not taken for absent.
func (s *Set) List(ctx context.Context, state func(Found) (backend.Instance, error)) ([]backend.Instance, error) {
	all, err := Find(s.Root, "")
	if err != nil {
		return nil, err
	}
	var list []backend.Instance
	for _, f := range all {
		if err := ctx.Err(); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "listing sandboxes: %w", context.Cause(ctx))
		}
		in, err := state(f)
		if err != nil {
			in.Power, in.Reason = backend.PowerPartial, agentlab.Reason(err.Error())
		}
		list = append(list, in)
	}
	return list, nil
}

// Claim finds or begins the sandbox of a Create, whose caller holds its lock. begin
// makes the directory and the mark of a new one (Mark); update gives one that exists
// the name and the policy of spec, which are newer.
func (s *Set) Claim(spec backend.Spec, begin func(dir string) (Handle, error), update func(Found) error) (Found, error) {
	name := Name(spec.VMID, spec.UID)
	if _, _, ok := ParseName(name); !ok {
		return Found{}, agentlab.Errorf(agentlab.CodeInvalid, "%d-%q does not name a sandbox", spec.VMID, spec.UID)
	}
	f, err := s.Find(spec.UID)
	if err != nil {
		return f, err
	}
	switch {
	case f.Dir == "":
		f.Dir = filepath.Join(s.Root, name)
		if _, err := os.Lstat(f.Dir); err == nil {
			return f, agentlab.Errorf(agentlab.CodeExists, "%s is not a sandbox's directory", f.Dir).WithHint("move it away")
		}
		f.Handle, err = begin(f.Dir)
	case filepath.Base(f.Dir) != name, f.Err == nil && !sameMachine(f.Spec, spec):
		return f, agentlab.Errorf(agentlab.CodeExists, "sandbox %d exists with another specification", f.VMID)
	case errors.Is(f.Err, fs.ErrNotExist):
		f.Handle, err = begin(f.Dir)
	case f.Err != nil:
		return f, AsError(f.Err, "cannot read sandbox %d", f.VMID)
	case !sameSpec(f.Spec, spec):
		f.Spec.Name = spec.Name
		err = update(f)
	}
	return f, err
}

// Mark creates the directory and FileConfig of a sandbox. at is called at points where
// the process may die without harm.
func (h Handle) Mark(dir string, at func(point string)) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return Fault(err, "cannot create the directory of sandbox %d", h.Spec.VMID)
	}
	at("directory made")
	if err := h.Write(dir); err != nil {
		return err
	}
	at("mark written")
	return nil
}

// Instance returns the state of a sandbox whose creation or destruction was interrupted.
// It reports true for one with a mark, whose state the driver must examine.
func (f Found) Instance() (in backend.Instance, marked bool, err error) {
	in = backend.Instance{Ref: backend.Ref{UID: f.UID}, VMID: f.VMID, Power: backend.PowerPartial, Reason: "its creation was interrupted"}
	switch {
	case f.Dir == "":
		in.Reason = "its destruction was interrupted"
		return in, false, nil
	case errors.Is(f.Err, fs.ErrNotExist):
		return in, false, nil
	case f.Err != nil:
		return in, false, AsError(f.Err, "cannot read sandbox %d", f.VMID)
	}
	return in, true, nil
}

// CheckNetwork rejects an invalid policy, and a mode that the driver does not know.
func CheckNetwork(driver string, n agentlab.Network) error {
	if err := backend.CheckMode(driver, n); err != nil {
		return err
	}
	_, err := egress.New(n)
	return err
}

// sameSpec compares two specifications as FileConfig has them.
func sameSpec(a, b backend.Spec) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}

// sameMachine reports whether two differ at most in what can change: the name, when
// the warm pool hands a sandbox out, and the network.
func sameMachine(a, b backend.Spec) bool {
	a.Name, b.Name = "", ""
	a.Network, b.Network = agentlab.Network{}, agentlab.Network{}
	return sameSpec(a, b)
}
