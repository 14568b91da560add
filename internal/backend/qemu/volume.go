package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// A volume is StateDir/volumes/<uid>/: volume.json, root.qcow2 with its layers, and a
// directory for each of its snapshots. It is complete when root.qcow2 exists; the
// size of the volume is in that file only, so that a restoration is one step. A
// volume that is being deleted is first renamed to .trash-<uid>. The sandbox that has
// a volume names it in its own directory (attachment), so that a sandbox that is
// destroyed has none.

// volumeVersion is the format of volume.json, attachment and the files beside them.
const volumeVersion = 1

// volumeMark is volume.json in the directory of a volume.
type volumeMark struct {
	Version int       `json:"version"`
	UID     string    `json:"uid"`
	Created time.Time `json:"created"`
}

// attachment is volume.json in the directory of a sandbox.
type attachment struct {
	Version int    `json:"version"`
	UID     string `json:"uid"` // of the volume
	Dir     string `json:"dir"` // of the volume
}

func (d *Driver) volumes() string { return filepath.Join(d.cfg.StateDir, "volumes") }

// foundVolume is a volume in the state directory.
type foundVolume struct {
	uid    string
	dir    string // it may not exist
	exists bool
	trash  bool  // it was being deleted
	whole  bool  // it can be used
	size   int64 // in bytes, if whole
	err    error // why it cannot be read
}

// findVolume looks for the volume with a uid. A directory whose volume.json is that
// of another volume does not count; the err then has agentlab.CodeExists.
func (d *Driver) findVolume(uid string) (foundVolume, error) {
	v := foundVolume{uid: uid, dir: filepath.Join(d.volumes(), uid)}
	if !snapshotName.MatchString(uid) {
		return v, nil
	}
	exists, err := lexists(v.dir)
	if err == nil && !exists {
		v.trash, err = lexists(d.volumeTrash(uid))
		v.exists = v.trash
		return v, err
	}
	if err != nil {
		return v, err
	}
	v.exists = true
	v.whole, v.size, v.err = readVolume(v.dir, uid)
	if agentlab.CodeOf(v.err) == agentlab.CodeExists {
		v.exists = false
	}
	return v, nil
}

// readVolume returns the size of the volume in dir, and whether it is complete.
func readVolume(dir, uid string) (whole bool, size int64, err error) {
	var mark volumeMark
	err = durable.ReadJSON(filepath.Join(dir, fileVolume), &mark)
	switch {
	case err == nil && mark.UID != uid:
		return false, 0, agentlab.Errorf(agentlab.CodeExists, "%s is not a volume's directory", dir).WithHint("move it away")
	case err == nil && mark.Version != volumeVersion:
		return false, 0, agentlab.Errorf(agentlab.CodeUnsupported, "volume %s has format %d; this program supports format %d", uid, mark.Version, volumeVersion)
	case err == nil:
		size, err = virtualSize(filepath.Join(dir, fileRoot))
	}
	if errors.Is(err, fs.ErrNotExist) { // its creation was interrupted
		return false, 0, nil
	}
	if err != nil {
		return false, 0, vmdir.AsError(err, "cannot read volume %s", uid)
	}
	return true, size, nil
}

func (d *Driver) volumeTrash(uid string) string {
	return filepath.Join(d.volumes(), vmdir.TrashPrefix+uid)
}

func lexists(path string) (bool, error) {
	if _, err := os.Lstat(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, fault(err, "cannot check %s", path)
	}
	return true, nil
}

// virtualSize returns the size of the disk of a volume, as its header has it. The
// QEMU of a guest wrote the header, so its content is not to be trusted.
func virtualSize(path string) (int64, error) {
	h, err := readQcow2(path)
	if err != nil {
		return 0, err
	}
	if h.Size == 0 || h.Size%(1<<30) != 0 || h.Size > backend.MaxVolumeGB<<30 {
		return 0, fmt.Errorf("%s is not a disk that AgentLab made", path)
	}
	return int64(h.Size), nil
}

// usable returns an error with code not_found or conflict if the volume cannot be
// used.
func (v foundVolume) usable() error {
	switch {
	case !v.exists:
		return agentlab.Errorf(agentlab.CodeNotFound, "there is no volume %q on this host", v.uid)
	case v.err != nil:
		return v.err
	case !v.whole:
		return agentlab.Errorf(agentlab.CodeConflict, "volume %s is partial: %s", v.uid, v.reason()).WithHint("repeat what was interrupted, or delete the volume")
	}
	return nil
}

// reason returns why the volume is partial.
func (v foundVolume) reason() string {
	switch {
	case v.err != nil:
		return agentlab.Reason(v.err.Error())
	case v.trash:
		return "its deletion was interrupted"
	default:
		return "its creation was interrupted"
	}
}

// viewVolume returns the volume as the contract has it. owner is the UID of its sandbox.
func (d *Driver) viewVolume(v foundVolume, owner string) (backend.Volume, error) {
	out := backend.Volume{Ref: backend.VolumeRef{UID: v.uid}, Partial: !v.whole}
	if owner != "" {
		out.AttachedTo = backend.Ref{UID: owner}
	}
	if !v.whole {
		out.Reason = v.reason()
		return out, nil
	}
	out.SizeGB = int(v.size >> 30)
	names, err := layersIn(v.dir)
	if err == nil {
		var u diskUse
		u, err = diskUseOf(v.dir, names)
		out.Bytes = u.all
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return out, fault(err, "cannot check volume %s", v.uid)
	}
	return out, nil
}

// openVolume locks a volume. Every method that changes it holds the lock.
func (d *Driver) openVolume(ctx context.Context, uid string) (v foundVolume, unlock func(), err error) {
	unlock, err = d.locks.Lock(ctx, uid)
	if err != nil {
		return v, nil, agentlab.Errorf(agentlab.CodeBusy, "another operation on the volume is in progress: %w", err)
	}
	if v, err = d.findVolume(uid); err == nil {
		err = ctx.Err()
	}
	if err != nil {
		unlock()
		return v, nil, asUnavailable(err)
	}
	return v, unlock, nil
}

// asUnavailable adds a code to the error of a context.
func asUnavailable(err error) error {
	return vmdir.AsError(err, "given up")
}

// freeVolume is openVolume for a volume that no sandbox may have.
func (d *Driver) freeVolume(ctx context.Context, uid string) (v foundVolume, unlock func(), err error) {
	if v, unlock, err = d.openVolume(ctx, uid); err != nil {
		return v, nil, err
	}
	if err = d.detached(uid); err != nil {
		unlock()
	}
	return v, unlock, err
}

// ValidateVolume implements backend.Volumes.
func (d *Driver) ValidateVolume(spec backend.VolumeSpec) error {
	if err := spec.Check(); err != nil {
		return err
	}
	if spec.Storage != "" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "the qemu backend has no storages").WithField("storage").WithHint("remove it")
	}
	if !snapshotName.MatchString(spec.UID) {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q does not name a volume", spec.UID).WithField("uid")
	}
	return nil
}

// CreateVolume implements backend.Volumes.
func (d *Driver) CreateVolume(ctx context.Context, spec backend.VolumeSpec) (backend.Volume, error) {
	if err := d.ValidateVolume(spec); err != nil {
		return backend.Volume{}, err
	}
	v, unlock, err := d.openVolume(ctx, spec.UID)
	if err != nil {
		return backend.Volume{}, err
	}
	defer unlock()
	return d.newVolume(ctx, v, func(tmp string) error {
		return createOverlay(ctx, d.host.QEMUImg(), tmp, "", "", int64(spec.SizeGB)<<30)
	})
}

// newVolume creates a volume, unless there is one. disk makes its disk.
func (d *Driver) newVolume(ctx context.Context, v foundVolume, disk func(tmp string) error) (backend.Volume, error) {
	if err := d.makeVolume(ctx, v, disk); err != nil {
		return backend.Volume{}, err
	}
	v, err := d.findVolume(v.uid)
	if err == nil {
		err = v.usable()
	}
	if err != nil {
		return backend.Volume{}, err
	}
	owner, err := d.ownerOf(v.uid)
	if err != nil {
		return backend.Volume{}, err
	}
	return d.viewVolume(v, owner)
}

func (d *Driver) makeVolume(ctx context.Context, v foundVolume, disk func(tmp string) error) error {
	switch {
	case v.err != nil:
		return v.err
	case v.whole:
		return nil
	}
	if err := d.host.Ready(ctx); err != nil {
		return err
	}
	if err := d.roomForVolume(); err != nil {
		return err
	}
	if err := os.MkdirAll(v.dir, 0o700); err != nil {
		return fault(err, "cannot create the directory of volume %s", v.uid)
	}
	d.at("volume directory made")
	mark := volumeMark{Version: volumeVersion, UID: v.uid, Created: d.cfg.Now().UTC()}
	if err := durable.ReplaceJSON(filepath.Join(v.dir, fileVolume), mark, durable.Content); err != nil {
		return fault(err, "cannot write the mark of volume %s", v.uid)
	}
	if err := durable.SyncPath(d.volumes()); err != nil {
		return fault(err, "cannot sync %s", d.volumes())
	}
	d.at("volume marked")
	path := filepath.Join(v.dir, fileRoot)
	if err := disk(path + tmpSuffix); err != nil {
		return vmdir.AsError(err, "cannot create volume %s", v.uid)
	}
	if err := replaceDisk(path); err != nil {
		return err
	}
	d.at("volume made")
	return vmdir.Empty(d.volumeTrash(v.uid))
}

// replaceDisk gives a disk that is complete its name, so that it survives a power cut.
func replaceDisk(path string) error {
	err := durable.SyncPath(path + tmpSuffix)
	if err == nil {
		err = os.Rename(path+tmpSuffix, path)
	}
	if err == nil {
		err = durable.SyncPath(filepath.Dir(path))
	}
	if err != nil {
		return fault(err, "cannot replace %s", path)
	}
	return nil
}

// roomForVolume returns an error if the disk of the host has no room for more.
func (d *Driver) roomForVolume() error {
	return qemuvm.RoomFor("a volume", d.cfg.StateDir, d.cfg.PauseBelow, 1<<20)
}

// DeleteVolume implements backend.Volumes.
func (d *Driver) DeleteVolume(ctx context.Context, ref backend.VolumeRef) error {
	v, unlock, err := d.freeVolume(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	switch {
	case !v.exists:
		return nil
	case v.err != nil:
		return v.err
	}
	trash := d.volumeTrash(v.uid)
	if !v.trash {
		if err := vmdir.Empty(trash); err != nil {
			return err
		}
		if err := os.Rename(v.dir, trash); err != nil {
			return fault(err, "cannot move volume %s to the trash", v.uid)
		}
		d.at("volume in the trash")
	}
	return vmdir.Empty(trash)
}

// GrowVolume implements backend.Volumes.
func (d *Driver) GrowVolume(ctx context.Context, ref backend.VolumeRef, sizeGB int) error {
	if err := (backend.VolumeSpec{UID: ref.UID, SizeGB: sizeGB}).Check(); err != nil {
		return err
	}
	v, unlock, err := d.freeVolume(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	if err := v.usable(); err != nil {
		return err
	}
	size := int64(sizeGB) << 30
	if size < v.size {
		return agentlab.Errorf(agentlab.CodeInvalid, "the volume has %d GiB, and cannot become smaller", v.size>>30).WithField("size_gb").
			WithHint("use at least %d GiB", v.size>>30)
	}
	if size == v.size {
		return nil
	}
	if err := d.host.Ready(ctx); err != nil {
		return err
	}
	if err := refuseDisks(v.dir, ""); err != nil {
		return fault(err, "cannot read volume %s", v.uid)
	}
	d.at("volume not grown")
	// What the disk reads from is not opened.
	disk := `json:{"driver":"qcow2","file":{"driver":"file","filename":"` + fileRoot + `"},"backing":null}`
	if err := runQEMUImg(ctx, d.host.QEMUImg(), v.dir, "resize", "-q", disk, strconv.FormatInt(size, 10)); err != nil {
		return err
	}
	if err := durable.SyncPath(filepath.Join(v.dir, fileRoot)); err != nil {
		return fault(err, "cannot sync volume %s", v.uid)
	}
	d.at("volume grown")
	return nil
}

// InspectVolume implements backend.Volumes.
func (d *Driver) InspectVolume(_ context.Context, ref backend.VolumeRef) (backend.Volume, error) {
	v, err := d.findVolume(ref.UID)
	if err == nil && !v.exists {
		err = v.usable()
	}
	if err != nil {
		return backend.Volume{}, err
	}
	owner, err := d.ownerOf(ref.UID)
	if err != nil {
		return backend.Volume{}, err
	}
	return d.viewVolume(v, owner)
}

// ListVolumes implements backend.Volumes.
func (d *Driver) ListVolumes(ctx context.Context) ([]backend.Volume, error) {
	uids, err := d.volumeUIDs()
	if err != nil {
		return nil, err
	}
	owners, err := d.owners()
	if err != nil {
		return nil, err
	}
	var all []backend.Volume
	for _, uid := range uids {
		if err := ctx.Err(); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeUnavailable, "listing volumes: %w", context.Cause(ctx))
		}
		v, err := d.findVolume(uid)
		if err != nil {
			return nil, err
		}
		if !v.exists {
			continue
		}
		view, err := d.viewVolume(v, owners[uid])
		if err != nil {
			return nil, err
		}
		all = append(all, view)
	}
	return all, nil
}

// volumeUIDs returns the UIDs of all volumes, and of those in the trash.
func (d *Driver) volumeUIDs() ([]string, error) {
	entries, err := os.ReadDir(d.volumes())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fault(err, "cannot read %s", d.volumes())
	}
	seen := map[string]bool{}
	var uids []string
	for _, e := range entries {
		uid := strings.TrimPrefix(e.Name(), vmdir.TrashPrefix)
		if e.IsDir() && snapshotName.MatchString(uid) && !seen[uid] {
			seen[uid] = true
			uids = append(uids, uid)
		}
	}
	return uids, nil
}
