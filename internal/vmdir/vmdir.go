// Package vmdir stores sandboxes and volumes of drivers whose VMs have a supervisor on
// this host. A sandbox is a directory with its specification, its disk and the files of
// package supervisor; a volume is a directory with a disk (Volumes).
//
// The directory's name is the mark that the sandbox is AgentLab's: its number and
// its UID. A sandbox that is being destroyed has the name of its directory with
// TrashPrefix, so that the rest after a crash is not read as a sandbox.
package vmdir

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// FileConfig is the file with the Handle of a sandbox. It is written first; later
// only the network in it changes.
const FileConfig = "config.json"

// TrashPrefix begins the name of the directory of a sandbox that is being
// destroyed.
const TrashPrefix = ".trash-"

// Version is the format of FileConfig. ReadHandle reads every older format and
// rejects a newer one.
const Version = 1

// ImageFiles are the parts of an image; all paths are absolute.
type ImageFiles struct {
	Ref      string `json:"ref"`       // name@digest
	RootDisk string `json:"root_disk"` // raw, never changed
	Kernel   string `json:"kernel"`    // ELF
	Modules  string `json:"modules"`   // newc archive of kernel modules
}

// Handle is the content of FileConfig: the sandbox's specification and image.
type Handle struct {
	Version int          `json:"version"`
	Spec    backend.Spec `json:"spec"`
	Image   ImageFiles   `json:"image"`
	Created time.Time    `json:"created"`
}

// ReadHandle reads FileConfig in dir. If there is none the error is
// fs.ErrNotExist.
func ReadHandle(dir string) (Handle, error) {
	var h Handle
	h.Spec.Resources.Nested = agentlab.NestedAuto // of handles that are older than the setting
	if err := durable.ReadJSON(filepath.Join(dir, FileConfig), &h); err != nil {
		return h, err
	}
	if h.Version < 1 || h.Version > Version {
		return h, agentlab.Errorf(agentlab.CodeUnsupported, "%s has format %d; this program supports formats up to %d",
			filepath.Join(dir, FileConfig), h.Version, Version).WithHint("use the newer version of AgentLab that wrote it")
	}
	return h, nil
}

// Write writes h to FileConfig in dir.
func (h Handle) Write(dir string) error {
	if err := durable.ReplaceJSON(filepath.Join(dir, FileConfig), h, durable.Content); err != nil {
		return Fault(err, "cannot write %s of sandbox %d", FileConfig, h.Spec.VMID)
	}
	return nil
}

// StoreNetwork writes h with another network to dir.
func (h *Handle) StoreNetwork(dir string, n agentlab.Network) error {
	next := *h
	next.Spec.Network = n
	if err := next.Write(dir); err != nil {
		return err
	}
	*h = next
	return nil
}

// DiskSize returns the size of the root disk in bytes.
func (h Handle) DiskSize() (int64, error) {
	st, err := os.Stat(h.Image.RootDisk)
	if err != nil {
		return 0, h.ImageGone(err)
	}
	size := st.Size()
	if gb := h.Spec.Resources.RootSizeGB; gb > 0 {
		if err := backend.CheckDisk(gb, size); err != nil {
			return 0, err
		}
		size = int64(gb) << 30
	}
	return size, nil
}

// ImageGone returns the error for a file of the image that cannot be read.
func (h Handle) ImageGone(err error) error {
	if !errors.Is(err, fs.ErrNotExist) {
		return Fault(err, "cannot read image %s", h.Image.Ref)
	}
	return agentlab.Errorf(agentlab.CodeNotFound, "image %s no longer exists: %w", h.Image.Ref, err).
		WithHint("build it again with 'agentlab image build', and create a new sandbox if its digest has changed")
}

// sandboxName matches the directory name of a sandbox: number and UID.
var sandboxName = lazyre.New(`^([1-9][0-9]{0,9})-([a-z2-9]{26})$`)

// Name returns the name of a sandbox's directory.
func Name(vmid int, uid string) string { return strconv.Itoa(vmid) + "-" + uid }

// ParseName returns the number and the UID in the name of a sandbox's directory.
func ParseName(name string) (vmid int, uid string, ok bool) {
	m := sandboxName.FindStringSubmatch(name)
	if m == nil {
		return 0, "", false
	}
	vmid, err := strconv.Atoi(m[1])
	return vmid, m[2], err == nil
}

// UIDName matches the UID of a sandbox, a volume or a snapshot, which names its directory.
var UIDName = lazyre.New(`^[a-z2-9]{26}$`)

// Found is a sandbox in a directory of sandboxes.
type Found struct {
	VMID  int // as the directory's name has it
	UID   string
	Dir   string // "" means that there is none
	Trash string // the rest of an interrupted destruction; "" means none
	Handle
	Err error // of reading the handle
}

// Find returns the sandbox in root with a UID, or all sandboxes if uid is "". Each
// has a directory, or only its trash. A directory with the handle of another sandbox
// is skipped.
func Find(root, uid string) ([]Found, error) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, Fault(err, "cannot read %s", root)
	}
	var all []Found
	trash := map[string]int{}   // index by uid
	for _, e := range entries { // trash comes first: its names begin with a dot
		name, trashed := strings.CutPrefix(e.Name(), TrashPrefix)
		var f Found
		var ok bool
		if f.VMID, f.UID, ok = ParseName(name); !ok || !e.IsDir() || uid != "" && f.UID != uid {
			continue
		}
		path := filepath.Join(root, e.Name())
		if trashed {
			f.Trash = path
			trash[f.UID] = len(all)
			all = append(all, f)
			continue
		}
		f.Dir = path
		if f.Handle, f.Err = ReadHandle(path); f.Err == nil && Name(f.Spec.VMID, f.Spec.UID) != name {
			continue
		}
		if i, ok := trash[f.UID]; ok && all[i].Dir == "" {
			f.Trash = all[i].Trash
			all[i] = f
			continue
		}
		all = append(all, f)
	}
	return all, nil
}

// Absent returns the error for a sandbox that is proven to be absent.
func Absent(uid string) error {
	return agentlab.Errorf(agentlab.CodeNotFound, "no sandbox on this host has the mark %q", uid)
}

// Empty removes the directory of a destroyed sandbox; "" is none.
func Empty(trash string) error {
	if trash == "" {
		return nil
	}
	if err := os.RemoveAll(trash); err != nil {
		return Fault(err, "cannot empty %s", trash)
	}
	return nil
}

// Discard renames the directory of a sandbox to trash in one step. The caller
// empties it.
func Discard(f Found) (trash string, err error) {
	trash = filepath.Join(filepath.Dir(f.Dir), TrashPrefix+filepath.Base(f.Dir))
	if err := os.Rename(f.Dir, trash); err != nil {
		return "", Fault(err, "cannot move sandbox %d to the trash", f.VMID)
	}
	return trash, nil
}

// RemoveFiles removes files of a directory that exist.
func RemoveFiles(dir string, how durable.Sync, names ...string) error {
	removed := false
	for _, name := range names {
		err := os.Remove(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return Fault(err, "cannot remove %s", filepath.Join(dir, name))
		}
		removed = removed || err == nil
	}
	if removed && how != durable.None {
		if err := durable.SyncPath(dir); err != nil {
			return Fault(err, "cannot sync %s", dir)
		}
	}
	return nil
}

// Fault adds the code to an error of the operating system.
func Fault(err error, format string, args ...any) *agentlab.Error {
	return fsfault.Own(err, "free disk space, or destroy sandboxes that are no longer needed", format, args...)
}

// AsError returns an *agentlab.Error unchanged and wraps any other error.
func AsError(err error, format string, args ...any) error {
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	return Fault(err, format, args...)
}
