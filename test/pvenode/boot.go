package pvenode

import (
	"context"
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/pvenode/machine"
)

// Machines makes the node's VMs real ones: put its methods Boot into
// Config.Boot and the value itself into Config.Files.
type Machines struct {
	// Dir is for sockets, scripts and consoles; a short path.
	Dir string
	// KVM uses the hardware's virtualization.
	KVM bool
}

// Boot starts a QEMU. Its cloud-init drive is written first, whatever it held.
func (m Machines) Boot(ctx context.Context, b Boot) (Guest, error) {
	spec := machine.Spec{VMID: b.VMID, Dir: m.Dir, Conf: b.Config, Disks: map[string]machine.Disk{}, KVM: m.KVM}
	for slot, d := range b.Disks {
		spec.Disks[slot] = machine.Disk{File: d.File, Format: d.Format, CDROM: d.CDROM}
		if b.Seed != nil && d.CDROM && strings.Contains(filepath.Base(d.File), "-cloudinit") {
			if err := machine.WriteSeed(ctx, d.File, d.Format, b.Seed); err != nil {
				return nil, err
			}
		}
	}
	run, err := machine.Start(ctx, spec)
	if failed, ok := errors.AsType[*machine.StartError](err); ok {
		return nil, errors.New(strings.TrimSpace(failed.Log))
	}
	if err != nil {
		return nil, err
	}
	return realGuest{run}, nil
}

// format is that of a volume's file, by its name.
func format(file string) string { return strings.TrimPrefix(filepath.Ext(file), ".") }

// Create implements Files.
func (Machines) Create(ctx context.Context, file, format string, size int64) error {
	return machine.CreateDisk(ctx, file, format, size)
}

// LinkedClone implements Files.
func (Machines) LinkedClone(ctx context.Context, base, file string) error {
	return machine.LinkedClone(ctx, base, format(base), file)
}

// FullClone implements Files.
func (Machines) FullClone(ctx context.Context, src, snap, file, to string) error {
	return machine.FullClone(ctx, src, format(src), snap, file, to)
}

// Snapshot implements Files.
func (Machines) Snapshot(ctx context.Context, option, file, name string) error {
	return machine.SnapshotDisk(ctx, option, file, name)
}

// Resize implements Files.
func (Machines) Resize(ctx context.Context, file string, size int64) error {
	return machine.ResizeDisk(ctx, file, format(file), size)
}

// Size implements Files.
func (Machines) Size(ctx context.Context, file string) (int64, error) {
	return machine.DiskSize(ctx, file, format(file))
}

// realGuest is a Guest that is a QEMU.
type realGuest struct{ m *machine.Machine }

// Times that Proxmox VE gives QEMU and the guest agent.
const (
	monitorTime = guard.Patience
	pingTime    = 3 * time.Second
	agentTime   = 10 * time.Second
)

func (g realGuest) tell(do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), monitorTime)
	defer cancel()
	return do(ctx)
}

// Status implements Guest.
func (g realGuest) Status() string {
	st := "running"
	_ = g.tell(func(ctx context.Context) error {
		s, err := g.m.Status(ctx)
		if err == nil {
			st = s
		}
		return err
	})
	return st
}

// Pause implements Guest.
func (g realGuest) Pause() error { return g.tell(g.m.Pause) }

// Resume implements Guest.
func (g realGuest) Resume() error { return g.tell(g.m.Resume) }

// Reset implements Guest.
func (g realGuest) Reset() error { return g.tell(g.m.Reset) }

// Powerdown implements Guest.
func (g realGuest) Powerdown() error { return g.tell(g.m.Powerdown) }

// Kill implements Guest.
func (g realGuest) Kill() { g.m.Kill() }

// Done implements Guest.
func (g realGuest) Done() <-chan struct{} { return g.m.Done() }

// Pid implements Guest.
func (g realGuest) Pid() int { return g.m.PID() }

// Agent implements Guest.
func (g realGuest) Agent(ctx context.Context, command string, args map[string]any) (json.RawMessage, error) {
	limit := agentTime
	if command == "guest-ping" {
		limit = pingTime
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if !g.m.AgentOpen(ctx) {
		return nil, ErrNoAgent
	}
	return g.ask(ctx, command, args)
}

func (g realGuest) ask(ctx context.Context, command string, args map[string]any) (json.RawMessage, error) {
	var given any
	if len(args) > 0 {
		given = args
	}
	out, err := g.m.Agent(ctx, command, given)
	switch {
	case errors.Is(err, machine.ErrAgent):
		return nil, ErrNoAgent
	case err != nil:
		return nil, &AgentError{Desc: err.Error()}
	}
	return out, nil
}
