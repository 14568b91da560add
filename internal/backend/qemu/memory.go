package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Files of a guest whose memory is in a directory: that of a sandbox, a template
// or a snapshot. None of them changes after memory.json was written; they are
// linked into other directories and replaced as a whole.
const (
	fileMemory      = "memory"      // the guest's RAM; sparse
	fileDevices     = "devices"     // state of the devices, as package migration returns it
	fileMemoryState = "memory.json" // savedMemory; written last and removed first

	// fileMemoryUsed is the memory.json of a guest that continues from its saved
	// memory. It exists from before the guest's CPUs run until the guest has its
	// identity: a sandbox without a VM that has it has lost its memory.
	fileMemoryUsed = "memory.used"
)

// memoryVersion is the format of memory.json and the files beside it.
const memoryVersion = 1

// savedMemory is memory.json. The memory belongs to the disk beside it: once the
// guest's CPUs run again, it is useless, and loading it would damage the disk.
type savedMemory struct {
	Version  int       `json:"version"`
	Machine  string    `json:"machine"`        // machineKey; only the same machine can load it
	DiskSize int64     `json:"disk_size"`      // that the guest has seen, in bytes
	Boot     string    `json:"boot,omitempty"` // boot ID of the host outside of which it is not valid; "" is none
	Saved    time.Time `json:"saved"`
	// Fork means that the sandbox is not suspended: it was created from a snapshot,
	// and its first start needs the memory.
	Fork bool `json:"fork,omitempty"`
	// Reused means that a guest may have continued from this memory before: its
	// random values are known, until it gets new ones with its identity.
	Reused bool `json:"reused,omitempty"`
}

// own reports whether a guest with the memory has its identity, and random values
// that no other guest has.
func (s savedMemory) own() bool { return s.Boot == "" && !s.Fork && !s.Reused }

// readMemory reads memory.json in dir; without one the error is fs.ErrNotExist.
func readMemory(dir string) (savedMemory, error) {
	var s savedMemory
	if err := durable.ReadJSON(filepath.Join(dir, fileMemoryState), &s); err != nil {
		return s, err
	}
	if s.Version != memoryVersion {
		return s, agentlab.Errorf(agentlab.CodeUnsupported, "%s has format %d; this program supports format %d",
			filepath.Join(dir, fileMemoryState), s.Version, memoryVersion)
	}
	return s, nil
}

// loadable reports whether the machine with a key can load the memory now.
func (s savedMemory) loadable(key string) bool {
	return s.Machine == key && (s.Boot == "" || s.Boot == supervisor.BootID())
}

// dropMemory removes the files of a guest's memory from dir. How says what has
// to survive a power cut: if memory.json came back, the next start would load a
// memory that no longer belongs to the disk.
func dropMemory(dir string, how durable.Sync) error {
	if err := vmdir.RemoveFiles(dir, how, fileMemoryUsed, fileMemoryState); err != nil {
		return err
	}
	return vmdir.RemoveFiles(dir, durable.None, fileMemory, fileDevices)
}

// renameMemory renames memory.json, or back, so that it survives a power cut.
func renameMemory(dir, from, to string) error {
	if err := os.Rename(filepath.Join(dir, from), filepath.Join(dir, to)); err != nil {
		return fault(err, "cannot rename %s", filepath.Join(dir, from))
	}
	if err := durable.SyncPath(dir); err != nil {
		return fault(err, "cannot sync %s", dir)
	}
	return nil
}

// memoryLost reports whether a sandbox without a VM has lost the memory with which
// its guest continued: the VM ended before the guest had its identity. The sandbox
// must not boot by itself as if its guest had never run.
func memoryLost(dir string) bool {
	if _, err := os.Lstat(filepath.Join(dir, fileMemoryUsed)); errors.Is(err, fs.ErrNotExist) {
		return false
	}
	_, err := readMemory(dir) // it was saved again later
	return errors.Is(err, fs.ErrNotExist)
}

// lostError is the error for a start of a sandbox that has lost its memory.
func lostError(vmid int) error {
	return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d has lost its saved memory: its VM ended while the guest continued", vmid).
		WithHint("'agentlab sandbox stop %d' accepts that and keeps its disk; 'agentlab sandbox start %[1]d' then boots it", vmid)
}

// machineKey returns the key of a sandbox's machine on this host.
func (d *Driver) machineKey(ctx context.Context, h handle, c startConfig) (string, error) {
	v, err := d.host.Version(ctx)
	if err != nil {
		return "", err
	}
	stamp, err := qemuvm.StampOf(c.QEMU)
	if err != nil {
		return "", fault(err, "cannot check %s", c.QEMU)
	}
	return machineKey(h, c, v.Text, stamp), nil
}

// machineKey identifies the machine of a sandbox: a memory can be loaded by no
// other. stamp is that of QEMU's program.
func machineKey(h handle, c startConfig, qemu string, stamp qemuvm.FileStamp) string {
	text, _ := json.Marshal([]any{
		memoryVersion, qemuvm.SlotDevice, qemu, stamp.Size, stamp.Mtime, processor(c.Accel),
		h.Image.Ref, h.Image.Kernel, filepath.Base(c.Initrd), c.Args(), h.Spec.Resources.Cores, h.Spec.Resources.MemoryMB,
	})
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

// processor identifies what a saved guest needs of the host's processor. A guest
// on KVM has found its model and its features, and uses them.
func processor(a qemuvm.Accel) string {
	if a != qemuvm.AccelKVM {
		return qemuvm.HostCPU()
	}
	return qemuvm.CPUFields("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
}

// onDisk reports whether a sandbox without a VM is suspended to disk. The copy of
// a template or a snapshot, which the sandbox has not needed yet, does not count.
func onDisk(dir string) bool {
	saved, err := readMemory(dir)
	return err == nil && saved.Boot == "" && !saved.Fork || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// memoryOf reports whether a sandbox starts with a saved memory. A copy of a
// template that this host cannot load is removed: the sandbox boots. A sandbox
// that is suspended to disk, or is a fork, keeps its memory.
func (d *Driver) memoryOf(f found, cfg startConfig) (bool, error) {
	saved, err := readMemory(f.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if memoryLost(f.Dir) {
			return false, lostError(f.VMID)
		}
	case err != nil:
		return false, vmdir.AsError(err, "cannot read the memory of sandbox %d", f.VMID)
	case saved.loadable(cfg.Key):
		return true, nil
	case saved.Boot == "":
		return false, agentlab.Errorf(agentlab.CodeUnsupported, "sandbox %d cannot be continued: its memory was saved with another processor, QEMU or version of AgentLab", f.VMID).
			WithHint("'agentlab sandbox stop %d' discards its memory and keeps its disk", f.VMID)
	}
	return false, dropMemory(f.Dir, durable.Content)
}

// blocksOf returns how many bytes a file occupies on the disk.
func blocksOf(path string) (int64, error) {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return st.Blocks * 512, err
}
