package qemu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// A volume (vmdir.Volumes) is StateDir/volumes/<uid>/: volume.json, root.qcow2 with its
// layers, and a directory for each of its snapshots. Its size is in root.qcow2 only, so
// that a restoration is one step.

// disks is the driver for vmdir.Volumes.
type disks struct{ *Driver }

func (d *Driver) volumes() string { return filepath.Join(d.cfg.StateDir, "volumes") }

// Opened implements vmdir.VolumeSource.
func (d disks) Opened(ctx context.Context, ref backend.Ref) (found, func(), error) {
	return d.open(ctx, ref)
}

// SupervisedIn implements vmdir.VolumeSource.
func (d disks) SupervisedIn(f found) supervisor.Dir { return d.supervised(f) }

// Power implements vmdir.VolumeSource.
func (d disks) Power(f found, in *backend.Instance) error { return d.power(f, in) }

// Ready implements vmdir.Disks.
func (d disks) Ready(ctx context.Context) error { return d.host.Ready(ctx) }

// Room implements vmdir.Disks.
func (d disks) Room() error { return d.roomForVolume() }

// CheckPlace implements vmdir.Disks.
func (d disks) CheckPlace(string) error { return nil }

// Claim implements vmdir.Disks: no other program uses the volumes.
func (d disks) Claim(string, string) error { return nil }

// Make implements vmdir.Disks.
func (d disks) Make(ctx context.Context, path string, size int64) error {
	return createOverlay(ctx, d.host.QEMUImg(), path, "", "", size)
}

// Size implements vmdir.Disks.
func (d disks) Size(dir string) (int64, error) { return virtualSize(filepath.Join(dir, fileRoot)) }

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

// Bytes implements vmdir.Disks.
func (d disks) Bytes(dir string) (int64, error) {
	names, err := layersIn(dir)
	if err != nil {
		return 0, err
	}
	u, err := diskUseOf(dir, names)
	return u.all, err
}

// Grow implements vmdir.Disks. What the disk reads from is not opened.
func (d disks) Grow(ctx context.Context, dir string, size int64) error {
	if err := refuseDisks(dir, ""); err != nil {
		return fault(err, "cannot read the volume")
	}
	disk := `json:{"driver":"qcow2","file":{"driver":"file","filename":"` + fileRoot + `"},"backing":null}`
	if err := runQEMUImg(ctx, d.host.QEMUImg(), dir, "resize", "-q", disk, strconv.FormatInt(size, 10)); err != nil {
		return err
	}
	return durable.SyncPath(filepath.Join(dir, fileRoot))
}

// roomForVolume returns an error if the disk of the host has no room for more.
func (d *Driver) roomForVolume() error {
	return qemuvm.RoomFor("a volume", d.cfg.StateDir, d.cfg.PauseBelow, 1<<20)
}

// SetVolume implements supervisor.VolumeHolder.
func (m *machine) SetVolume(ctx context.Context, dir string) error {
	return m.volumes.Set(ctx, m.QMP, dir, volumeDisk)
}

// volumeDisk returns the disk of a volume for QEMU.
func volumeDisk(dir string) (qemuvm.Disk, error) {
	if err := refuseDisks(dir, ""); err != nil {
		return qemuvm.Disk{}, agentlab.Errorf(agentlab.CodeDenied, "the volume is not attached: %w", err).
			WithHint("if the files of AgentLab were not modified, this is a bug in AgentLab")
	}
	size, err := virtualSize(filepath.Join(dir, fileRoot))
	var chain []string
	if err == nil {
		chain, err = diskFiles{dir: dir, size: size}.chain()
	}
	if err != nil {
		return qemuvm.Disk{}, fault(err, "cannot read the volume")
	}
	return overlay(dir, size, chainNode(dir, chain)), nil
}

// overlay describes root.qcow2 in dir, which reads from backing.
func overlay(dir string, size int64, backing any) qemuvm.Disk {
	return qemuvm.Disk{Path: filepath.Join(dir, fileRoot), Size: size, Format: map[string]any{"driver": "qcow2", "backing": backing}}
}

// chainNode describes the layers in dir for QEMU: no name in the files counts.
func chainNode(dir string, chain []string) any {
	var node any
	for i := len(chain) - 1; i >= 0; i-- {
		node = map[string]any{"driver": "qcow2", "backing": node, "file": map[string]any{"driver": "file", "filename": filepath.Join(dir, chain[i])}}
	}
	return node
}

// SaveVolume implements supervisor.VolumeHolder.
func (m *machine) SaveVolume(ctx context.Context, dir, to string) error {
	now, node := m.volumes.Volume()
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
	next, err := m.QMP.OpenDisk(qctx, overlay(dir, size, nil))
	if err == nil {
		m.volumes.Note(dir, "") // until QEMU has answered
		err = m.QMP.Execute(qctx, "blockdev-snapshot", map[string]any{"node": node, "overlay": next}, nil)
	}
	refused := err != nil && errors.As(err, new(qemuvm.RefusedError))
	switch {
	case err == nil:
		m.volumes.Note(dir, next)
	case refused: // QEMU writes to the layer: it becomes root.qcow2 again
		err = errors.Join(err, m.QMP.DropUnused(qctx), unfreezeDisk(dir, layer))
		m.volumes.Note(dir, node)
	}
	if err != nil {
		return fault(err, "cannot save the volume")
	}
	m.at("volume switched")
	return linkDisk(qctx, m.cfg.QEMUImg, dir, to, layer, size, durable.Content)
}
