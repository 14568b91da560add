package fake

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// snapshot is the stored state of a saved instance. It never changes.
type snapshot struct {
	UID     string            `json:"uid"`
	Of      string            `json:"of"` // UID of the instance
	Partial bool              `json:"partial,omitempty"`
	Spec    backend.Spec      `json:"spec"`
	Disk    map[string]string `json:"disk,omitempty"`
	Guest   *guestRecord      `json:"guest,omitempty"` // nil: the memory was not saved
	Saved   time.Time         `json:"saved,omitzero"`
}

func (s *snapshot) view() backend.Snapshot {
	v := backend.Snapshot{
		Ref:    backend.SnapshotRef{UID: s.UID, Of: backend.Ref{UID: s.Of, Handle: "fake-" + s.Of}},
		Memory: s.Guest != nil, Saved: s.Saved, Partial: s.Partial,
	}
	if s.Partial {
		return v
	}
	text, _ := json.Marshal(s)
	v.Bytes = int64(len(text))
	v.Spec = &s.Spec
	return v
}

// SaveSnapshot implements backend.Snapshots.
func (d *Driver) SaveSnapshot(ctx context.Context, ref backend.Ref, uid string) (backend.Snapshot, error) {
	if err := d.point(ctx, OpSaveSnapshot, Before, ref); err != nil {
		return backend.Snapshot{}, err
	}
	s := d.h.snapshot(uid)
	if s != nil && s.Of != ref.UID {
		return backend.Snapshot{}, agentlab.Errorf(agentlab.CodeExists, "snapshot %s is one of another sandbox", uid)
	}
	if s == nil || s.Partial {
		in, err := d.h.find(ref)
		if err == nil {
			err = d.h.freeOfVolume(ref.UID)
		}
		if err != nil {
			return backend.Snapshot{}, err
		}
		if err := d.h.putSnapshot(&snapshot{UID: uid, Of: ref.UID, Partial: true}); err != nil {
			return backend.Snapshot{}, err
		}
		if err := d.point(ctx, OpSaveSnapshot, Half, ref); err != nil {
			return backend.Snapshot{}, err
		}
		if s, err = in.snapshot(uid); err != nil {
			return backend.Snapshot{}, err
		}
		if err := d.h.putSnapshot(s); err != nil {
			return backend.Snapshot{}, err
		}
	}
	return s.view(), d.point(ctx, OpSaveSnapshot, After, ref)
}

// RestoreSnapshot implements backend.Snapshots.
func (d *Driver) RestoreSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	if err := d.point(ctx, OpRestoreSnapshot, Before, ref.Of); err != nil {
		return err
	}
	s, err := d.h.whole(ref)
	if err != nil {
		return err
	}
	in, err := d.h.find(ref.Of)
	if err == nil {
		err = d.h.freeOfVolume(ref.Of.UID)
	}
	if err != nil {
		return err
	}
	if err := in.beginRestore(s); err != nil {
		return err
	}
	if err := d.point(ctx, OpRestoreSnapshot, Half, ref.Of); err != nil {
		return err
	}
	if err := in.complete(nil); err != nil {
		return err
	}
	return d.point(ctx, OpRestoreSnapshot, After, ref.Of)
}

// Snapshots implements backend.Snapshots.
func (d *Driver) Snapshots(ctx context.Context) ([]backend.Snapshot, error) {
	if err := d.point(ctx, OpSnapshots, Before, backend.Ref{}); err != nil {
		return nil, err
	}
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	var all []backend.Snapshot
	for _, s := range d.h.snapshots {
		all = append(all, s.view())
	}
	slices.SortFunc(all, func(a, b backend.Snapshot) int { return cmp.Compare(a.Ref.UID, b.Ref.UID) })
	return all, nil
}

// DeleteSnapshot implements backend.Snapshots.
func (d *Driver) DeleteSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	if err := d.point(ctx, OpDeleteSnapshot, Before, ref.Of); err != nil {
		return err
	}
	if s := d.h.snapshot(ref.UID); s != nil && s.Of == ref.Of.UID {
		if err := d.h.putSnapshot(&snapshot{UID: s.UID, Of: s.Of, Partial: true}); err != nil {
			return err
		}
		if err := d.point(ctx, OpDeleteSnapshot, Half, ref.Of); err != nil {
			return err
		}
		if err := d.h.removeSnapshot(s); err != nil {
			return err
		}
	}
	return d.point(ctx, OpDeleteSnapshot, After, ref.Of)
}

// source returns the snapshot from which an instance with spec starts; nil if it
// starts from an image, or is complete.
func (h *Host) source(spec backend.Spec) (*snapshot, error) {
	if spec.From == nil {
		return nil, nil
	}
	if in, err := h.find(spec.Ref()); err == nil && in.view().Power != backend.PowerPartial {
		return nil, nil
	}
	s, err := h.whole(*spec.From)
	if err != nil {
		return nil, err
	}
	return s, spec.CheckFrom(s.Spec)
}

// whole returns the snapshot that ref identifies, if it is not partial.
func (h *Host) whole(ref backend.SnapshotRef) (*snapshot, error) {
	s := h.snapshot(ref.UID)
	if s == nil || s.Partial || s.Of != ref.Of.UID {
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "there is no snapshot %s", ref.UID)
	}
	return s, nil
}

func (h *Host) snapshot(uid string) *snapshot {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.snapshots[uid]
}

func (h *Host) snapshotFile(uid string) string {
	return filepath.Join(h.cfg.Dir, "snapshots", strings.ReplaceAll(uid, "/", "_")+".json")
}

func (h *Host) putSnapshot(s *snapshot) error {
	if h.cfg.Dir != "" {
		if err := replaceJSON(h.snapshotFile(s.UID), s); err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "keep a snapshot: %w", err)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snapshots[s.UID] = s
	return nil
}

func (h *Host) removeSnapshot(s *snapshot) error {
	if h.cfg.Dir != "" {
		if err := os.Remove(h.snapshotFile(s.UID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return agentlab.Errorf(agentlab.CodeUnavailable, "remove a snapshot: %w", err)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.snapshots, s.UID)
	return nil
}

// dropSnapshots removes the snapshots of an instance.
func (h *Host) dropSnapshots(of string) error {
	h.mu.Lock()
	all := slices.Collect(maps.Values(h.snapshots))
	h.mu.Unlock()
	var errs []error
	for _, s := range all {
		if s.Of == of {
			errs = append(errs, h.removeSnapshot(s))
		}
	}
	return errors.Join(errs...)
}

// snapshot returns a copy of the instance's disk, and of its guest's memory.
func (in *instance) snapshot(uid string) (*snapshot, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Power == backend.PowerPartial {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d is half made", in.rec.Spec.VMID)
	}
	s := &snapshot{UID: uid, Of: in.rec.Spec.UID, Spec: in.rec.Spec, Disk: maps.Clone(in.rec.Disk), Saved: in.h.cfg.Clock().UTC()}
	if in.rec.Network != nil {
		s.Spec.Network = *in.rec.Network
	}
	if in.rec.Power == backend.PowerRunning || in.rec.Power == backend.PowerSuspended {
		guest := in.rec.Guest
		s.Guest = &guest
	}
	return s, nil
}

// beginRestore powers the instance off and makes it partial until complete is
// called.
func (in *instance) beginRestore(s *snapshot) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.rec.Restore = s
	return in.off(backend.PowerPartial, "its restoration was interrupted")
}

// replaceJSON replaces a file in one step.
func replaceJSON(file string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".tmp", data, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".tmp", file)
}
