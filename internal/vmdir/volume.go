package vmdir

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// FileVolume is the mark of a volume in its directory, and names the volume of a
// sandbox in the directory of the sandbox (Attachment).
const FileVolume = "volume.json"

// volumeVersion is the format of FileVolume in both places.
const volumeVersion = 1

// Attachment is FileVolume in the directory of a sandbox.
type Attachment struct {
	Version int    `json:"version"`
	UID     string `json:"uid"` // of the volume
	Dir     string `json:"dir"` // of the volume
}

// volumeMark is FileVolume in the directory of a volume.
type volumeMark struct {
	Version int       `json:"version"`
	UID     string    `json:"uid"`
	Created time.Time `json:"created"`
}

// Disks is what a driver knows about the disks of its volumes. dir is the directory of
// a volume.
type Disks interface {
	// Ready returns an error if the host cannot make or change a disk.
	Ready(ctx context.Context) error
	// Room returns an error if the host has no space for another disk.
	Room() error
	// CheckPlace returns an error if dir, which may not exist, is in a place that must
	// not be touched.
	CheckPlace(dir string) error
	// Make makes an empty disk of size bytes in the file path.
	Make(ctx context.Context, path string, size int64) error
	// Size returns the size of the disk in dir, in bytes. Without a disk the error is
	// fs.ErrNotExist.
	Size(dir string) (int64, error)
	// Bytes returns what the disk in dir occupies.
	Bytes(dir string) (int64, error)
	// Grow makes the disk in dir larger, so that it survives a power cut.
	Grow(ctx context.Context, dir string, size int64) error
	// Claim shows other programs that a sandbox has the volume in dir, or with "" that none
	// has it. AgentLab itself reads FileVolume in the directory of the sandbox. If another
	// program has the volume the error has agentlab.CodeConflict.
	Claim(dir, sandbox string) error
}

// VolumeSource finds the sandboxes of a driver with volumes.
type VolumeSource interface {
	// Opened locks a sandbox whose Create is complete, for a method that changes it.
	Opened(ctx context.Context, ref backend.Ref) (Found, func(), error)
	// SupervisedIn returns the supervisor's view of a sandbox's directory.
	SupervisedIn(f Found) supervisor.Dir
	// Power sets the power state in in.
	Power(f Found, in *backend.Instance) error
}

// Volumes implements the methods of backend.Volumes, except copies of the content of a
// volume. A volume is the directory Root/<uid> with FileVolume and a disk: it is complete
// when the disk exists, and its size is in the disk only. A volume that is being deleted
// is first renamed to .trash-<uid>. The sandbox that has a volume names it in its own
// directory, so that a sandbox that is destroyed has none.
type Volumes struct {
	Driver string // name of the driver
	Root   string // absolute path
	Disk   string // name of the file with the disk
	Disks  Disks
	Set    *Set // the sandboxes
	Boxes  VolumeSource
	Now    func() time.Time
	At     func(point string) // called at points where the process may die without harm

	locks lock.Keyed[string] // by uid; held by calls that change a volume
}

// FoundVolume is a volume in a directory of volumes.
type FoundVolume struct {
	UID    string
	Dir    string // it may not exist
	Exists bool
	Trash  bool  // it was being deleted
	Whole  bool  // it can be used
	Size   int64 // in bytes, if Whole
	Err    error // why it cannot be read
}

// Find looks for the volume with a uid. A directory whose volume.json is that
// of another volume does not count; the Err then has agentlab.CodeExists.
func (d *Volumes) Find(uid string) (FoundVolume, error) {
	v := FoundVolume{UID: uid, Dir: filepath.Join(d.Root, uid)}
	if !UIDName.MatchString(uid) {
		return v, nil
	}
	err := d.Disks.CheckPlace(v.Dir)
	if err == nil {
		v.Exists, err = Exists(v.Dir)
	}
	if err == nil && !v.Exists {
		v.Trash, err = Exists(d.trash(uid))
		v.Exists = v.Trash
		return v, err
	}
	if err != nil {
		return v, err
	}
	v.Whole, v.Size, v.Err = d.read(v.Dir, uid)
	if agentlab.CodeOf(v.Err) == agentlab.CodeExists {
		v.Exists = false
	}
	return v, nil
}

// read returns the size of the volume in dir, and whether it is complete.
func (d *Volumes) read(dir, uid string) (whole bool, size int64, err error) {
	var mark volumeMark
	err = durable.ReadJSON(filepath.Join(dir, FileVolume), &mark)
	switch {
	case err == nil && mark.UID != uid:
		return false, 0, agentlab.Errorf(agentlab.CodeExists, "%s is not a volume's directory", dir).WithHint("move it away")
	case err == nil && mark.Version != volumeVersion:
		return false, 0, agentlab.Errorf(agentlab.CodeUnsupported, "volume %s has format %d; this program supports format %d", uid, mark.Version, volumeVersion)
	case err == nil:
		size, err = d.Disks.Size(dir)
	case errors.Is(err, fs.ErrNotExist): // the mark is written before the disk
		if _, serr := os.Lstat(filepath.Join(dir, d.Disk)); serr == nil {
			return false, 0, agentlab.Errorf(agentlab.CodeExists, "%s is a disk without the mark of AgentLab", dir).WithHint("move it away")
		}
	}
	if errors.Is(err, fs.ErrNotExist) { // its creation was interrupted
		return false, 0, nil
	}
	if err != nil {
		return false, 0, AsError(err, "cannot read volume %s", uid)
	}
	return true, size, nil
}

func (d *Volumes) trash(uid string) string {
	return filepath.Join(d.Root, TrashPrefix+uid)
}

// Exists reports whether there is a file at path.
func Exists(path string) (bool, error) {
	if _, err := os.Lstat(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, Fault(err, "cannot check %s", path)
	}
	return true, nil
}

// Usable returns an error with code not_found or conflict if the volume cannot be
// used.
func (v FoundVolume) Usable() error {
	switch {
	case !v.Exists:
		return agentlab.Errorf(agentlab.CodeNotFound, "there is no volume %q on this host", v.UID)
	case v.Err != nil:
		return v.Err
	case !v.Whole:
		return agentlab.Errorf(agentlab.CodeConflict, "volume %s is partial: %s", v.UID, v.reason()).WithHint("repeat what was interrupted, or delete the volume")
	}
	return nil
}

// reason returns why the volume is partial.
func (v FoundVolume) reason() string {
	switch {
	case v.Err != nil:
		return agentlab.Reason(v.Err.Error())
	case v.Trash:
		return "its deletion was interrupted"
	default:
		return "its creation was interrupted"
	}
}

// view returns the volume as the contract has it. owner is the UID of its sandbox.
func (d *Volumes) view(v FoundVolume, owner string) (backend.Volume, error) {
	out := backend.Volume{Ref: backend.VolumeRef{UID: v.UID}, Partial: !v.Whole}
	if owner != "" {
		out.AttachedTo = backend.Ref{UID: owner}
	}
	if !v.Whole {
		out.Reason = v.reason()
		return out, nil
	}
	out.SizeGB = int(v.Size >> 30)
	var err error
	if out.Bytes, err = d.Disks.Bytes(v.Dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return out, Fault(err, "cannot check volume %s", v.UID)
	}
	return out, nil
}

// Open locks a volume. Every method that changes it holds the lock.
func (d *Volumes) Open(ctx context.Context, uid string) (v FoundVolume, unlock func(), err error) {
	unlock, err = d.locks.Lock(ctx, uid)
	if err != nil {
		return v, nil, agentlab.Errorf(agentlab.CodeBusy, "another operation on the volume is in progress: %w", err)
	}
	if v, err = d.Find(uid); err == nil {
		err = ctx.Err()
	}
	if err != nil {
		unlock()
		return v, nil, AsError(err, "given up")
	}
	return v, unlock, nil
}

// Free is Open for a volume that no sandbox may have.
func (d *Volumes) Free(ctx context.Context, uid string) (v FoundVolume, unlock func(), err error) {
	if v, unlock, err = d.Open(ctx, uid); err != nil {
		return v, nil, err
	}
	if err = d.Detached(uid); err == nil && v.Exists && !v.Trash {
		err = d.Disks.Claim(v.Dir, "")
	}
	if err != nil {
		unlock()
	}
	return v, unlock, err
}

// ValidateVolume implements backend.Volumes.
func (d *Volumes) ValidateVolume(spec backend.VolumeSpec) error {
	if err := spec.Check(); err != nil {
		return err
	}
	if spec.Storage != "" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "the %s backend has no storages", d.Driver).WithField("storage").WithHint("remove it")
	}
	if !UIDName.MatchString(spec.UID) {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q does not name a volume", spec.UID).WithField("uid")
	}
	return nil
}

// CreateVolume implements backend.Volumes.
func (d *Volumes) CreateVolume(ctx context.Context, spec backend.VolumeSpec) (backend.Volume, error) {
	if err := d.ValidateVolume(spec); err != nil {
		return backend.Volume{}, err
	}
	v, unlock, err := d.Open(ctx, spec.UID)
	if err != nil {
		return backend.Volume{}, err
	}
	defer unlock()
	return d.New(ctx, v, func(tmp string) error {
		return d.Disks.Make(ctx, tmp, int64(spec.SizeGB)<<30)
	})
}

// New creates a volume, unless there is one. disk makes its disk.
func (d *Volumes) New(ctx context.Context, v FoundVolume, disk func(tmp string) error) (backend.Volume, error) {
	if err := d.make(ctx, v, disk); err != nil {
		return backend.Volume{}, err
	}
	v, err := d.Find(v.UID)
	if err == nil {
		err = v.Usable()
	}
	if err != nil {
		return backend.Volume{}, err
	}
	owner, err := d.OwnerOf(v.UID)
	if err != nil {
		return backend.Volume{}, err
	}
	return d.view(v, owner)
}

func (d *Volumes) make(ctx context.Context, v FoundVolume, disk func(tmp string) error) error {
	switch {
	case v.Err != nil:
		return v.Err
	case v.Whole:
		return nil
	}
	if err := d.Disks.Ready(ctx); err != nil {
		return err
	}
	if err := d.Disks.Room(); err != nil {
		return err
	}
	if err := os.MkdirAll(v.Dir, 0o700); err != nil {
		return Fault(err, "cannot create the directory of volume %s", v.UID)
	}
	d.At("volume directory made")
	mark := volumeMark{Version: volumeVersion, UID: v.UID, Created: d.Now().UTC()}
	if err := durable.ReplaceJSON(filepath.Join(v.Dir, FileVolume), mark, durable.Content); err != nil {
		return Fault(err, "cannot write the mark of volume %s", v.UID)
	}
	if err := durable.SyncPath(d.Root); err != nil {
		return Fault(err, "cannot sync %s", d.Root)
	}
	d.At("volume marked")
	path := filepath.Join(v.Dir, d.Disk)
	if err := disk(path + durable.Suffix); err != nil {
		return AsError(err, "cannot create volume %s", v.UID)
	}
	if err := ReplaceDisk(path); err != nil {
		return err
	}
	d.At("volume made")
	return Empty(d.trash(v.UID))
}

// ReplaceDisk gives a disk that is complete its name, so that it survives a power cut.
func ReplaceDisk(path string) error {
	err := durable.SyncPath(path + durable.Suffix)
	if err == nil {
		err = os.Rename(path+durable.Suffix, path)
	}
	if err == nil {
		err = durable.SyncPath(filepath.Dir(path))
	}
	if err != nil {
		return Fault(err, "cannot replace %s", path)
	}
	return nil
}

// DeleteVolume implements backend.Volumes.
func (d *Volumes) DeleteVolume(ctx context.Context, ref backend.VolumeRef) error {
	v, unlock, err := d.Free(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	switch {
	case !v.Exists:
		return nil
	case v.Err != nil:
		return v.Err
	}
	trash := d.trash(v.UID)
	if !v.Trash {
		if err := Empty(trash); err != nil {
			return err
		}
		if err := os.Rename(v.Dir, trash); err != nil {
			return Fault(err, "cannot move volume %s to the trash", v.UID)
		}
		d.At("volume in the trash")
	}
	return Empty(trash)
}

// GrowVolume implements backend.Volumes.
func (d *Volumes) GrowVolume(ctx context.Context, ref backend.VolumeRef, sizeGB int) error {
	if err := (backend.VolumeSpec{UID: ref.UID, SizeGB: sizeGB}).Check(); err != nil {
		return err
	}
	v, unlock, err := d.Free(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	if err := v.Usable(); err != nil {
		return err
	}
	size := int64(sizeGB) << 30
	if size < v.Size {
		return agentlab.Errorf(agentlab.CodeInvalid, "the volume has %d GiB, and cannot become smaller", v.Size>>30).WithField("size_gb").
			WithHint("use at least %d GiB", v.Size>>30)
	}
	if size == v.Size {
		return nil
	}
	if err := d.Disks.Ready(ctx); err != nil {
		return err
	}
	d.At("volume not grown")
	if err := d.Disks.Grow(ctx, v.Dir, size); err != nil {
		return AsError(err, "cannot enlarge volume %s", v.UID)
	}
	d.At("volume grown")
	return nil
}

// InspectVolume implements backend.Volumes.
func (d *Volumes) InspectVolume(_ context.Context, ref backend.VolumeRef) (backend.Volume, error) {
	v, err := d.Find(ref.UID)
	if err == nil && !v.Exists {
		err = v.Usable()
	}
	if err != nil {
		return backend.Volume{}, err
	}
	owner, err := d.OwnerOf(ref.UID)
	if err != nil {
		return backend.Volume{}, err
	}
	return d.view(v, owner)
}

// ListVolumes implements backend.Volumes.
func (d *Volumes) ListVolumes(ctx context.Context) ([]backend.Volume, error) {
	uids, err := d.uids()
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
		v, err := d.Find(uid)
		if err != nil {
			return nil, err
		}
		if !v.Exists {
			continue
		}
		view, err := d.view(v, owners[uid])
		if err != nil {
			return nil, err
		}
		all = append(all, view)
	}
	return all, nil
}

// uids returns the UIDs of all volumes, and of those in the trash.
func (d *Volumes) uids() ([]string, error) {
	if err := d.Disks.CheckPlace(d.Root); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(d.Root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, Fault(err, "cannot read %s", d.Root)
	}
	seen := map[string]bool{}
	var uids []string
	for _, e := range entries {
		uid := strings.TrimPrefix(e.Name(), TrashPrefix)
		if e.IsDir() && UIDName.MatchString(uid) && !seen[uid] {
			seen[uid] = true
			uids = append(uids, uid)
		}
	}
	return uids, nil
}
