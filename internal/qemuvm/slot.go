package qemuvm

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// A microVM has no hot-plug: every VM has a place for a volume, a disk of size 0.
// QEMU reopens the node of this disk with another file below it, and reports the
// new size to the guest. A copy of a template is no exception: it gets its volume
// after its memory was loaded, before its CPUs run.

// Names of the slot in QEMU, and the file in the directory of a VM that QEMU has in the
// place of a volume.
const (
	SlotDevice   = "volume"
	SlotNode     = "volume"
	NodeNoVolume = "no-volume"
	FileNoVolume = "no-volume" // empty

	// nodeData is the prefix of the nodes of a volume, and nodeFile of those of its
	// files.
	nodeData, nodeFile = "data-", "datafile-"
)

// slotPatience is how long QEMU may take to execute a command for the slot.
const slotPatience = 20 * time.Second

// SlotArgs are the options of QEMU for the slot, which is empty.
var SlotArgs = []string{
	"-blockdev", "driver=file,node-name=" + NodeNoVolume + ",filename=" + FileNoVolume,
	"-blockdev", "driver=raw,node-name=" + SlotNode + ",file=" + NodeNoVolume + ",discard=unmap",
	"-device", "virtio-blk-device,id=" + SlotDevice + ",drive=" + SlotNode + ",serial=" + backend.VolumeSerial + ",werror=enospc,rerror=report",
}

// MakeNoVolume makes FileNoVolume in the directory of a VM.
func MakeNoVolume(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, FileNoVolume), nil, 0o600); err != nil {
		return fault(err, "cannot create %s", FileNoVolume)
	}
	return nil
}

// Disk is a file with the content of a disk.
type Disk struct {
	Path string // absolute
	Size int64  // in bytes, as the guest sees it
	// Format is the format of the file, with its options, for blockdev-add.
	Format map[string]any
}

// Slot is what a VM has in the place of its volume.
type Slot struct {
	mu   sync.Mutex
	dir  string // of the volume; "" is none
	node string // to which the guest writes; "" if it is not known
}

// Volume returns the directory of the volume, "" is none, and the node to which the
// guest writes, "" if it is not known.
func (v *Slot) Volume() (dir, node string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.dir, v.node
}

// Note sets the results of Volume.
func (v *Slot) Note(dir, node string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.dir, v.node = dir, node
}

// Set makes the volume in a directory the one of the guest; "" takes it away. read
// returns its disk. QEMU executes a command even if the caller gives up, so the end of
// ctx does not end the wait for its answer.
func (v *Slot) Set(ctx context.Context, q *QMP, dir string, read func(dir string) (Disk, error)) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), slotPatience, errors.New("QEMU did not answer"))
	defer cancel()
	_, size, err := q.Drive(ctx, SlotDevice)
	if err != nil {
		return err
	}
	now, node := v.Volume()
	if size > 0 && dir == now && node != "" {
		return nil
	}
	if size > 0 || dir == "" {
		if err := v.empty(ctx, q); err != nil || dir == "" {
			return err
		}
	}
	disk, err := read(dir)
	if err != nil {
		return err
	}
	return v.fill(ctx, q, dir, disk)
}

// fill puts a volume in the empty slot.
func (v *Slot) fill(ctx context.Context, q *QMP, dir string, disk Disk) error {
	if err := q.dropDisks(ctx); err != nil { // of an attempt that failed
		return err
	}
	node, err := q.OpenDisk(ctx, disk)
	if err == nil {
		err = q.fillSlot(ctx, node, disk.Size)
	}
	if err != nil {
		_ = v.empty(ctx, q)
		return fault(err, "cannot attach the volume")
	}
	v.Note(dir, node)
	return nil
}

// empty makes the slot empty. What the guest has written is then in the files.
func (v *Slot) empty(ctx context.Context, q *QMP) error {
	v.mu.Lock()
	v.node = ""
	v.mu.Unlock()
	if err := q.fillSlot(ctx, NodeNoVolume, 0); err != nil {
		return fault(err, "cannot detach the volume")
	}
	if err := q.dropDisks(ctx); err != nil {
		return err
	}
	v.Note("", "")
	return nil
}

// Drive returns the node that a device of the guest uses, and its size in bytes.
func (q *QMP) Drive(ctx context.Context, device string) (node string, size int64, err error) {
	var drives []struct {
		Device   string `json:"qdev"`
		Inserted *struct {
			Node  string `json:"node-name"`
			Image struct {
				Size int64 `json:"virtual-size"`
			} `json:"image"`
		} `json:"inserted"`
	}
	if err := q.Execute(ctx, "query-block", nil, &drives); err != nil {
		return "", 0, fault(err, "cannot find the guest's disk in QEMU")
	}
	for _, d := range drives {
		if d.Device == device && d.Inserted != nil {
			return d.Inserted.Node, d.Inserted.Image.Size, nil
		}
	}
	return "", 0, agentlab.Errorf(agentlab.CodeInternal, "QEMU has no disk in device %s", device)
}

// fillSlot makes the guest's disk read from a node of size bytes.
func (q *QMP) fillSlot(ctx context.Context, node string, size int64) error {
	slot := map[string]any{"driver": "raw", "node-name": SlotNode, "file": node, "discard": "unmap"}
	if err := q.Execute(ctx, "blockdev-reopen", map[string]any{"options": []any{slot}}, nil); err != nil {
		return err
	}
	// The node has the size already. This command reports it to the guest.
	return q.Execute(ctx, "block_resize", map[string]any{"node-name": SlotNode, "size": size}, nil)
}

// OpenDisk opens a disk, and returns its node. It has the only lock for writing: a second
// QEMU cannot open it. The file has a node of its own: QEMU would otherwise open it again
// by its name, which a snapshot gives to another file, when the disk becomes read-only.
func (q *QMP) OpenDisk(ctx context.Context, d Disk) (node string, err error) {
	id := agentlab.NewUID()[:16]
	data := map[string]any{"node-name": nodeData + id, "file": nodeFile + id, "discard": "unmap", "detect-zeroes": "unmap"}
	maps.Copy(data, d.Format)
	for _, n := range []map[string]any{
		{"driver": "file", "node-name": nodeFile + id, "filename": d.Path, "discard": "unmap", "locking": "on"},
		data,
	} {
		if err := q.Execute(ctx, "blockdev-add", n, nil); err != nil {
			return "", err
		}
	}
	return nodeData + id, nil
}

// dropDisks closes the files of a volume that no device uses.
func (q *QMP) dropDisks(ctx context.Context) error {
	for {
		var nodes []struct {
			Name string `json:"node-name"`
		}
		if err := q.Execute(ctx, "query-named-block-nodes", map[string]any{"flat": true}, &nodes); err != nil {
			return fault(err, "cannot list the disks in QEMU")
		}
		dropped, left := false, error(nil)
		for _, n := range nodes {
			if !strings.HasPrefix(n.Name, nodeData) && !strings.HasPrefix(n.Name, nodeFile) {
				continue
			}
			if err := q.Execute(ctx, "blockdev-del", map[string]any{"node-name": n.Name}, nil); err != nil {
				left = err
			} else {
				dropped = true
			}
		}
		switch {
		case left == nil:
			return nil
		case !dropped:
			return agentlab.Errorf(agentlab.CodeBusy, "QEMU still uses the volume: %w", left).WithHint("stop the sandbox")
		}
	}
}

// DropUnused closes the disks that OpenDisk has opened and no device uses.
func (q *QMP) DropUnused(ctx context.Context) error {
	if err := q.dropDisks(ctx); err != nil && agentlab.CodeOf(err) != agentlab.CodeBusy {
		return err
	}
	return nil
}
