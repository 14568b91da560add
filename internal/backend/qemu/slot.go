package qemu

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// A microVM has no hot-plug: every VM has a place for a volume, a disk of size 0.
// QEMU reopens the node of this disk with another file below it, and reports the
// new size to the guest. A copy of a template is no exception: it gets its volume
// after its memory was loaded, before its CPUs run.

// Names of devices and nodes in QEMU.
const (
	deviceRoot   = "root"
	deviceVolume = "volume"
	nodeSlot     = "volume"
	nodeNoVolume = "no-volume"

	// nodeData is the prefix of the nodes of a volume, and nodeFile of those of its
	// files.
	nodeData, nodeFile = "data-", "datafile-"
)

// volumeSlot is what a machine has in the place of its volume.
type volumeSlot struct {
	mu   sync.Mutex
	dir  string // of the volume; "" is none
	node string // to which the guest writes; "" if it is not known
}

// in returns the directory of the volume; "" is none.
func (v *volumeSlot) in() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.dir
}

func (v *volumeSlot) set(dir, node string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.dir, v.node = dir, node
}

// plugAttached gives a VM that starts the volume of its sandbox.
func (m *machine) plugAttached(ctx context.Context) error {
	a, err := readAttachment(m.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return vmdir.AsError(err, "cannot read %s", fileVolume)
	}
	return m.SetVolume(ctx, a.Dir)
}

// SetVolume implements supervisor.VolumeHolder. QEMU executes a command even if the
// caller gives up, so the end of ctx does not end the wait for its answer.
func (m *machine) SetVolume(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), qmpPatience, errors.New("QEMU did not answer"))
	defer cancel()
	_, size, err := m.drive(ctx, deviceVolume)
	if err != nil {
		return err
	}
	m.volumes.mu.Lock()
	done := size > 0 && dir == m.volumes.dir && m.volumes.node != ""
	m.volumes.mu.Unlock()
	if done {
		return nil
	}
	if size > 0 || dir == "" {
		if err := m.unplug(ctx); err != nil || dir == "" {
			return err
		}
	}
	return m.plug(ctx, dir)
}

// plug puts a volume in the empty slot.
func (m *machine) plug(ctx context.Context, dir string) error {
	if err := refuseDisks(dir, ""); err != nil {
		return agentlab.Errorf(agentlab.CodeDenied, "the volume is not attached: %w", err).
			WithHint("if the files of AgentLab were not modified, this is a bug in AgentLab")
	}
	size, err := virtualSize(filepath.Join(dir, fileRoot))
	var chain []string
	if err == nil {
		chain, err = diskFiles{dir: dir, size: size}.chain()
	}
	if err != nil {
		return fault(err, "cannot read the volume")
	}
	if err := m.dropNodes(ctx); err != nil { // of an attempt that failed
		return err
	}
	node, err := m.addDisk(ctx, dir, chainNode(dir, chain))
	if err == nil {
		err = m.fillSlot(ctx, node, size)
	}
	if err != nil {
		_ = m.unplug(ctx)
		return fault(err, "cannot attach the volume")
	}
	m.volumes.set(dir, node)
	return nil
}

// unplug makes the slot empty. What the guest has written is then in the files.
func (m *machine) unplug(ctx context.Context) error {
	m.volumes.mu.Lock()
	m.volumes.node = ""
	m.volumes.mu.Unlock()
	if err := m.fillSlot(ctx, nodeNoVolume, 0); err != nil {
		return fault(err, "cannot detach the volume")
	}
	if err := m.dropNodes(ctx); err != nil {
		return err
	}
	m.volumes.set("", "")
	return nil
}

// fillSlot makes the guest's disk read from a node of size bytes.
func (m *machine) fillSlot(ctx context.Context, node string, size int64) error {
	slot := map[string]any{"driver": "raw", "node-name": nodeSlot, "file": node, "discard": "unmap"}
	if err := m.QMP.Execute(ctx, "blockdev-reopen", map[string]any{"options": []any{slot}}, nil); err != nil {
		return err
	}
	// The size is that of the node already. This command reports it to the guest.
	return m.QMP.Execute(ctx, "block_resize", map[string]any{"node-name": nodeSlot, "size": size}, nil)
}

// addDisk opens root.qcow2 in dir, which reads from backing. It has the only lock
// for writing: a second QEMU cannot open it. The file has a node of its own: QEMU
// would otherwise open it again by its name, which a snapshot gives to another file,
// when the disk becomes read-only.
func (m *machine) addDisk(ctx context.Context, dir string, backing any) (node string, err error) {
	id := agentlab.NewUID()[:16]
	for _, n := range []map[string]any{
		{"driver": "file", "node-name": nodeFile + id, "filename": filepath.Join(dir, fileRoot), "discard": "unmap", "locking": "on"},
		{"driver": "qcow2", "node-name": nodeData + id, "file": nodeFile + id, "backing": backing, "discard": "unmap", "detect-zeroes": "unmap"},
	} {
		if err := m.QMP.Execute(ctx, "blockdev-add", n, nil); err != nil {
			return "", err
		}
	}
	return nodeData + id, nil
}

// chainNode describes the layers in dir for QEMU: no name in the files counts.
func chainNode(dir string, chain []string) any {
	var node any
	for i := len(chain) - 1; i >= 0; i-- {
		node = map[string]any{"driver": "qcow2", "backing": node, "file": map[string]any{"driver": "file", "filename": filepath.Join(dir, chain[i])}}
	}
	return node
}

// dropNodes closes the files of a volume that no device uses.
func (m *machine) dropNodes(ctx context.Context) error {
	for {
		var nodes []struct {
			Name string `json:"node-name"`
		}
		if err := m.QMP.Execute(ctx, "query-named-block-nodes", map[string]any{"flat": true}, &nodes); err != nil {
			return fault(err, "cannot list the disks in QEMU")
		}
		dropped, left := false, error(nil)
		for _, n := range nodes {
			if !strings.HasPrefix(n.Name, nodeData) && !strings.HasPrefix(n.Name, nodeFile) {
				continue
			}
			if err := m.QMP.Execute(ctx, "blockdev-del", map[string]any{"node-name": n.Name}, nil); err != nil {
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

// SaveVolume implements supervisor.VolumeHolder.
func (m *machine) SaveVolume(ctx context.Context, dir, to string) error {
	m.volumes.mu.Lock()
	now, node := m.volumes.dir, m.volumes.node
	m.volumes.mu.Unlock()
	if now != dir || node == "" {
		return agentlab.Errorf(agentlab.CodeConflict, "the VM does not have the volume").WithHint("attach the volume again")
	}
	size, err := virtualSize(filepath.Join(dir, fileRoot))
	if err != nil {
		return fault(err, "cannot read the volume")
	}
	layer, err := freezeDisk(ctx, m.cfg.QEMUImg, dir, size)
	if err != nil {
		return err
	}
	m.at("volume frozen")
	qctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), qmpPatience, errors.New("QEMU did not answer"))
	defer cancel()
	next, err := m.addDisk(qctx, dir, nil)
	if err == nil {
		m.volumes.set(dir, "") // until QEMU has answered
		err = m.QMP.Execute(qctx, "blockdev-snapshot", map[string]any{"node": node, "overlay": next}, nil)
	}
	refused := err != nil && errors.As(err, new(qemuvm.RefusedError))
	switch {
	case err == nil:
		m.volumes.set(dir, next)
	case refused: // QEMU writes to the layer: it becomes root.qcow2 again
		err = errors.Join(err, m.dropUnused(qctx), unfreezeDisk(dir, layer))
		m.volumes.set(dir, node)
	}
	if err != nil {
		return fault(err, "cannot save the volume")
	}
	m.at("volume switched")
	return linkDisk(qctx, m.cfg.QEMUImg, dir, to, layer, size, durable.Content)
}

// dropUnused closes what a failed SaveVolume has opened; the volume is in use.
func (m *machine) dropUnused(ctx context.Context) error {
	if err := m.dropNodes(ctx); err != nil && agentlab.CodeOf(err) != agentlab.CodeBusy {
		return err
	}
	return nil
}
