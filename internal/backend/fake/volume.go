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

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// The storages of a host.
const (
	StorageDefault = "local"
	StoragePlain   = "plain" // it cannot save what is in a volume
)

// volumePath is where a guest has the files of its volume.
const volumePath = "/work/"

// volume is the stored state of a volume.
type volume struct {
	UID     string            `json:"uid"`
	SizeGB  int               `json:"size_gb"`
	Storage string            `json:"storage"`
	Files   map[string]string `json:"files,omitempty"`   // by path in the guest
	Sandbox string            `json:"sandbox,omitempty"` // UID of the instance that has it
	Partial string            `json:"partial,omitempty"` // why it is
	Restore bool              `json:"restore,omitempty"` // it is partial because of RestoreVolume
}

// savedVolume is the stored state of a snapshot of a volume.
type savedVolume struct {
	UID     string            `json:"uid"`
	Of      string            `json:"of"` // UID of the volume
	SizeGB  int               `json:"size_gb"`
	Storage string            `json:"storage"`
	Files   map[string]string `json:"files,omitempty"`
	Partial bool              `json:"partial,omitempty"`
}

func volumeRef(uid string) backend.VolumeRef {
	return backend.VolumeRef{UID: uid, Handle: "fake-volume-" + uid}
}

func noVolume(uid string) error {
	return agentlab.Errorf(agentlab.CodeNotFound, "there is no volume %s", uid)
}

func (v *volume) view() backend.Volume {
	out := backend.Volume{Ref: volumeRef(v.UID), SizeGB: v.SizeGB, Storage: v.Storage, Bytes: sizeOf(v.Files), Partial: v.Partial != "", Reason: v.Partial}
	if v.Sandbox != "" {
		out.AttachedTo = backend.Ref{UID: v.Sandbox, Handle: "fake-" + v.Sandbox}
	}
	return out
}

func (s *savedVolume) view() backend.VolumeSnapshot {
	return backend.VolumeSnapshot{Ref: backend.VolumeSnapshotRef{UID: s.UID, Of: volumeRef(s.Of)}, SizeGB: s.SizeGB, Partial: s.Partial}
}

func sizeOf(files map[string]string) int64 {
	text, _ := json.Marshal(files)
	return int64(len(text))
}

// free returns an error if the volume is partial, or attached.
func (v *volume) free() error {
	if v.Sandbox != "" {
		return agentlab.Errorf(agentlab.CodeConflict, "the volume is attached to sandbox %s", v.Sandbox).WithHint("detach it first")
	}
	return v.whole()
}

func (v *volume) whole() error {
	if v.Partial != "" {
		return agentlab.Errorf(agentlab.CodeConflict, "the volume is partial: %s", v.Partial).WithHint("repeat what was interrupted, or delete the volume")
	}
	return nil
}

// store is the state of a host's volumes and their snapshots, under h.volMu.
type store struct {
	volumes map[string]*volume
	saved   map[string]*savedVolume
	foreign map[string]bool // volumes of others, by UID
	full    bool            // there is no space left
}

func (h *Host) volumeFile(uid string) string {
	return filepath.Join(h.cfg.Dir, "volumes", strings.ReplaceAll(uid, "/", "_")+".json")
}

func (h *Host) savedFile(uid string) string {
	return filepath.Join(h.cfg.Dir, "volume-snapshots", strings.ReplaceAll(uid, "/", "_")+".json")
}

// loadVolumes reads the volumes in Config.Dir.
func (h *Host) loadVolumes() error {
	for _, f := range []string{h.volumeFile(""), h.savedFile("")} {
		if err := os.MkdirAll(filepath.Dir(f), 0o700); err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "the state directory of the fake backend: %w", err)
		}
	}
	return errors.Join(
		readAll(h.volumeFile("*"), func(v volume) { h.store.volumes[v.UID] = &v }),
		readAll(h.savedFile("*"), func(s savedVolume) { h.store.saved[s.UID] = &s }))
}

// keep writes v to a file, and then calls done.
func (h *Host) keep(file string, v any, done func()) error {
	if h.cfg.Dir != "" {
		if err := replaceJSON(file, v); err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "keep a volume: %w", err)
		}
	}
	done()
	return nil
}

// drop removes a file, and then calls done.
func (h *Host) drop(file string, done func()) error {
	if h.cfg.Dir != "" {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return agentlab.Errorf(agentlab.CodeUnavailable, "remove a volume: %w", err)
		}
	}
	done()
	return nil
}

// change replaces the state of a volume by what fn makes of it; v is the zero value
// if there is none, and nothing is stored if it stays so.
func (h *Host) change(uid string, fn func(v *volume) error) error {
	h.volMu.Lock()
	defer h.volMu.Unlock()
	var next volume
	if v := h.store.volumes[uid]; v != nil {
		next = *v
	}
	if err := fn(&next); err != nil || next.UID == "" {
		return err
	}
	return h.keep(h.volumeFile(uid), &next, func() { h.store.volumes[uid] = &next })
}

// room returns an error if there is no space left. The caller holds h.volMu.
func (h *Host) room() error {
	if h.store.full {
		return agentlab.Errorf(agentlab.CodeNoSpace, "the storage is full").WithHint("free space")
	}
	return nil
}

// FillVolumes fills the storages of volumes, or frees their space.
func (h *Host) FillVolumes(full bool) {
	h.volMu.Lock()
	defer h.volMu.Unlock()
	h.store.full = full
}

// PutForeignVolume takes the place of a volume for one without AgentLab's mark.
func (h *Host) PutForeignVolume(uid string) {
	h.volMu.Lock()
	defer h.volMu.Unlock()
	h.store.foreign[uid] = true
}

// ForeignVolume reports whether the volume of PutForeignVolume still exists.
func (h *Host) ForeignVolume(uid string) bool {
	h.volMu.Lock()
	defer h.volMu.Unlock()
	return h.store.foreign[uid]
}

// volumePoint is point for a method of a volume: the Spec of a Hook has its UID.
func (d *Driver) volumePoint(ctx context.Context, op Op, at Point, uid string) error {
	return d.pointOf(ctx, op, at, backend.Spec{UID: uid})
}

// ValidateVolume implements backend.Volumes.
func (d *Driver) ValidateVolume(spec backend.VolumeSpec) error {
	if err := spec.Check(); err != nil {
		return err
	}
	if !slices.Contains([]string{"", StorageDefault, StoragePlain}, spec.Storage) {
		return agentlab.Errorf(agentlab.CodeUnsupported, "there is no storage %q", spec.Storage).WithField("storage").
			WithHint("use %s or %s", StorageDefault, StoragePlain)
	}
	return nil
}

// CreateVolume implements backend.Volumes.
func (d *Driver) CreateVolume(ctx context.Context, spec backend.VolumeSpec) (backend.Volume, error) {
	if err := d.volumePoint(ctx, OpCreateVolume, Before, spec.UID); err != nil {
		return backend.Volume{}, err
	}
	if err := d.ValidateVolume(spec); err != nil {
		return backend.Volume{}, err
	}
	return d.newVolume(ctx, OpCreateVolume, spec.UID, func() (volume, error) {
		return volume{SizeGB: spec.SizeGB, Storage: cmp.Or(spec.Storage, StorageDefault)}, nil
	})
}

// newVolume creates a volume unless there is one. content is called with h.volMu,
// before the mark is written and again before the volume is complete.
func (d *Driver) newVolume(ctx context.Context, op Op, uid string, content func() (volume, error)) (backend.Volume, error) {
	exists := false
	err := d.h.change(uid, func(v *volume) error {
		switch {
		case d.h.store.foreign[uid]:
			return agentlab.Errorf(agentlab.CodeExists, "there is a volume %s that is not ours", uid)
		case v.Restore:
			return v.whole()
		case v.UID != "" && v.Partial == "":
			exists = true
			return nil
		}
		if err := d.h.room(); err != nil {
			return err
		}
		if _, err := content(); err != nil {
			return err
		}
		*v = volume{UID: uid, Partial: "its creation was interrupted"}
		return nil
	})
	if err == nil && !exists {
		err = d.volumePoint(ctx, op, Half, uid)
		if err == nil {
			err = d.h.change(uid, func(v *volume) error {
				made, err := content()
				if v.UID == "" {
					err = agentlab.Errorf(agentlab.CodeConflict, "the volume was deleted").WithHint("create it again")
				}
				if made.UID = uid; err == nil && v.Partial != "" { // not by a parallel call
					*v = made
				}
				return err
			})
		}
	}
	if err != nil {
		return backend.Volume{}, err
	}
	if err := d.volumePoint(ctx, op, After, uid); err != nil {
		return backend.Volume{}, err
	}
	return d.h.inspectVolume(uid)
}

// DeleteVolume implements backend.Volumes.
func (d *Driver) DeleteVolume(ctx context.Context, ref backend.VolumeRef) error {
	if err := d.volumePoint(ctx, OpDeleteVolume, Before, ref.UID); err != nil {
		return err
	}
	if _, err := d.h.inspectVolume(ref.UID); err == nil {
		err := d.h.change(ref.UID, func(v *volume) error {
			if err := v.free(); err != nil && v.Partial == "" {
				return err
			}
			v.Partial, v.Restore = "its deletion was interrupted", false
			return nil
		})
		if err != nil {
			return err
		}
		if err := d.volumePoint(ctx, OpDeleteVolume, Half, ref.UID); err != nil {
			return err
		}
		if err := d.h.removeVolume(ref.UID); err != nil {
			return err
		}
	}
	return d.volumePoint(ctx, OpDeleteVolume, After, ref.UID)
}

// removeVolume removes a volume and its snapshots.
func (h *Host) removeVolume(uid string) error {
	h.volMu.Lock()
	defer h.volMu.Unlock()
	for _, s := range slices.Collect(maps.Values(h.store.saved)) {
		if s.Of != uid {
			continue
		}
		if err := h.drop(h.savedFile(s.UID), func() { delete(h.store.saved, s.UID) }); err != nil {
			return err
		}
	}
	return h.drop(h.volumeFile(uid), func() { delete(h.store.volumes, uid) })
}

// GrowVolume implements backend.Volumes.
func (d *Driver) GrowVolume(ctx context.Context, ref backend.VolumeRef, sizeGB int) error {
	if err := d.volumePoint(ctx, OpGrowVolume, Before, ref.UID); err != nil {
		return err
	}
	if err := (backend.VolumeSpec{UID: ref.UID, SizeGB: sizeGB}).Check(); err != nil {
		return err
	}
	err := d.h.change(ref.UID, func(v *volume) error {
		switch {
		case v.UID == "":
			return noVolume(ref.UID)
		case sizeGB < v.SizeGB:
			return agentlab.Errorf(agentlab.CodeInvalid, "the volume has %d GiB, and cannot become smaller", v.SizeGB).WithField("size_gb")
		}
		if err := v.free(); err != nil {
			return err
		}
		v.SizeGB = sizeGB
		return nil
	})
	if err != nil {
		return err
	}
	return d.volumePoint(ctx, OpGrowVolume, After, ref.UID)
}

// InspectVolume implements backend.Volumes.
func (d *Driver) InspectVolume(ctx context.Context, ref backend.VolumeRef) (backend.Volume, error) {
	if err := d.volumePoint(ctx, OpInspectVolume, Before, ref.UID); err != nil {
		return backend.Volume{}, err
	}
	return d.h.inspectVolume(ref.UID)
}

func (h *Host) inspectVolume(uid string) (backend.Volume, error) {
	h.volMu.Lock()
	defer h.volMu.Unlock()
	v := h.store.volumes[uid]
	if v == nil {
		return backend.Volume{}, noVolume(uid)
	}
	return v.view(), nil
}

// ListVolumes implements backend.Volumes.
func (d *Driver) ListVolumes(ctx context.Context) ([]backend.Volume, error) {
	if err := d.volumePoint(ctx, OpListVolumes, Before, ""); err != nil {
		return nil, err
	}
	d.h.volMu.Lock()
	defer d.h.volMu.Unlock()
	var all []backend.Volume
	for _, uid := range slices.Sorted(maps.Keys(d.h.store.volumes)) {
		all = append(all, d.h.store.volumes[uid].view())
	}
	return all, nil
}
