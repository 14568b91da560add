package proxmox

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// volumeVersion is the version of the format of volume.
const volumeVersion = 1

// volumePhase is the phase of the creation or deletion of a volume.
type volumePhase string

const (
	volumeMaking   volumePhase = "making"
	volumeMade     volumePhase = "made"
	volumeDeleting volumePhase = "deleting"
)

// volume is the stored state of a volume, from before its first call until it is
// deleted completely: the file StateDir/volumes/<uid>.json.
type volume struct {
	Version int         `json:"version"`
	UID     string      `json:"uid"`
	VMID    int         `json:"vmid"` // of its holder
	Node    string      `json:"node"`
	Storage string      `json:"storage"`
	SizeGB  int         `json:"size_gb"` // that it is created with
	Phase   volumePhase `json:"phase"`
	// Proved: when the holder had no disk yet, the storage had none with its number.
	Proved bool          `json:"proved,omitempty"`
	Source *volumeSource `json:"source,omitempty"` // of which it is a copy; nil if it was empty

	Attached  *attachment     `json:"attached,omitempty"`
	Snapshots []savedVolume   `json:"snapshots,omitempty"`
	Change    *snapshotChange `json:"change,omitempty"`    // it was sent, and its result is not known
	Restoring string          `json:"restoring,omitempty"` // the snapshot to which a rollback began and did not succeed

	storageType string // "" unless this call has read it
}

// volumeSource is what a volume is a copy of.
type volumeSource struct {
	VMID     int    `json:"vmid"`               // holder of the other volume
	Snapshot string `json:"snapshot,omitempty"` // its name in Proxmox; "" is the present content
}

// attachment is the sandbox that has a volume. A sandbox that is created again
// with the same UID does not have it.
type attachment struct {
	UID     string    `json:"uid"`
	VMID    int       `json:"vmid"`
	Created time.Time `json:"created"`
}

// savedVolume is what a volume has about a snapshot.
type savedVolume struct {
	UID    string `json:"uid"`
	SizeGB int    `json:"size_gb"`
}

func noVolume(uid string) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeNotFound, "there is no volume %s", uid)
}

func (d *Driver) volumeDir() string { return filepath.Join(d.dir, "volumes") }

func (d *Driver) volumeFile(uid string) string { return filepath.Join(d.volumeDir(), uid+".json") }

// readVolume returns the state of a volume, nil if there is none.
func (d *Driver) readVolume(uid string) (*volume, error) {
	if !uidForm.MatchString(uid) {
		return nil, nil
	}
	var v volume
	err := durable.ReadJSON(d.volumeFile(uid), &v)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fault(err, "cannot read the state of volume %s", uid)
	case v.Version > volumeVersion || v.UID != uid:
		return nil, agentlab.Errorf(agentlab.CodeInternal, "%s is of a newer version of AgentLab, or damaged", d.volumeFile(uid))
	}
	return &v, nil
}

// volumes returns the states of all volumes.
func (d *Driver) volumes() ([]*volume, error) {
	entries, err := os.ReadDir(d.volumeDir())
	if err != nil {
		return nil, fault(err, "cannot read %s", d.volumeDir())
	}
	var out []*volume
	for _, e := range entries {
		uid, is := strings.CutSuffix(e.Name(), ".json")
		if !is || !uidForm.MatchString(uid) {
			continue
		}
		v, err := d.readVolume(uid)
		if err != nil {
			return nil, err
		}
		if v != nil { // it may have been deleted in the meantime
			out = append(out, v)
		}
	}
	return out, nil
}

func (d *Driver) saveVolume(v *volume) error {
	v.Version = volumeVersion
	if err := durable.ReplaceJSON(d.volumeFile(v.UID), v, durable.Name); err != nil {
		return fault(err, "cannot write the state of volume %s", v.UID)
	}
	return nil
}

func (d *Driver) forgetVolume(v *volume) error {
	if err := os.Remove(d.volumeFile(v.UID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault(err, "cannot remove the state of volume %s", v.UID)
	}
	if err := durable.SyncPath(d.volumeDir()); err != nil {
		return fault(err, "cannot remove the state of volume %s", v.UID)
	}
	return nil
}

// holdVolumes is lockVolumes for volumes whose files may be lost.
func (d *Driver) holdVolumes(ctx context.Context, uids ...string) (unlock func(), err error) {
	for _, uid := range uids {
		if err := d.adoptVolumes(ctx, uid); err != nil {
			return nil, err
		}
	}
	return d.lockVolumes(ctx, uids...)
}

// lockVolumes waits for the locks of volumes, which come before those of sandboxes.
func (d *Driver) lockVolumes(ctx context.Context, uids ...string) (unlock func(), err error) {
	slices.Sort(uids)
	var held []func()
	unlock = func() {
		for _, u := range held {
			u()
		}
	}
	for _, uid := range slices.Compact(uids) {
		err := validUID(uid)
		if err == nil {
			var u func()
			if u, err = d.volumeLocks.Lock(ctx, uid); err == nil {
				held = append(held, u)
				continue
			}
			err = agentlab.Errorf(agentlab.CodeBusy, "the call was cancelled before it began: %w", err)
		}
		unlock()
		return nil, err
	}
	return unlock, nil
}

// each calls get for all volumes, a few at once.
func each[T any](all []*volume, get func(*volume) ([]T, error)) ([]T, error) {
	found, errs := make([][]T, len(all)), make([]error, len(all))
	atOnce := make(chan struct{}, 4)
	var wg sync.WaitGroup
	for i, v := range all {
		wg.Go(func() {
			atOnce <- struct{}{}
			found[i], errs[i] = get(v)
			<-atOnce
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return slices.Concat(found...), nil
}
