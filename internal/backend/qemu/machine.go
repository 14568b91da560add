package qemu

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// qmpPatience is how long QEMU may take to become ready (in the background:
// templateStartPatience), or to execute a command.
const qmpPatience = 20 * time.Second

// machine is the QEMU process of a sandbox. It implements supervisor.VM.
type machine struct {
	dir   string
	cfg   startConfig
	hooks supervisor.Hooks

	*qemuvm.Process                    // nil before Launch
	saved           savedFiles         // open until the supervisor ends
	devices         *deviceState       // nil before the first save that needs it
	crash           func(point string) // called at each crash point; tests set it

	volumes qemuvm.Slot

	mu     sync.Mutex
	handle handle // only its network changes
	saving *saving
}

// openVM implements supervisor.Kind.
func openVM(dir string, h supervisor.Hooks) (supervisor.VM, error) {
	m := &machine{dir: dir, hooks: h}
	if err := supervisor.ReadStart(dir, &m.cfg); err != nil {
		return nil, err
	}
	var err error
	if m.handle, err = vmdir.ReadHandle(dir); err != nil {
		return nil, vmdir.AsError(err, "cannot read %s", vmdir.FileConfig)
	}
	return m, nil
}

// at is called at points where the supervisor or QEMU may be killed without harm.
func (m *machine) at(point string) {
	if m.crash != nil {
		m.crash(point)
	}
}

// Launch implements supervisor.VM.
func (m *machine) Launch(context.Context) (wires supervisor.Wires, err error) {
	c := qemuvm.Command{
		Files: supervisor.Dir{Path: m.dir, Process: processName}, Program: m.cfg.QEMU, Args: vmArgs(m.handle, m.cfg, qemuFDs),
		Background: m.cfg.Background, Log: m.hooks.Log, Event: m.onEvent,
	}
	if c.Lock, err = c.Files.LockProcess(); err != nil {
		return wires, err
	}
	defer func() { _ = c.Lock.Close() }() // as Start does
	if err := refuseHostMounts(m.dir, m.handle, m.cfg, c.Args); err != nil {
		return wires, err
	}
	if err := qemuvm.MakeNoVolume(m.dir); err != nil {
		return wires, err
	}
	if m.cfg.Load {
		if m.saved, err = openSaved(m.dir); err != nil {
			return wires, err
		}
		defer func() {
			if err != nil {
				m.saved.close()
			}
		}()
		c.Inherit = []*os.File{m.saved.devices}
		// The memory of a saved guest has no huge pages. Without them for its
		// translated code, QEMU occupies less. This process has the same setting.
		noHugePages()
		filter := &holeFilter{}
		if err := unix.Fstat(int(m.saved.memory.Fd()), &filter.memory); err != nil {
			return wires, fault(err, "cannot check the saved memory")
		}
		c.OnThread = filter.start
	}
	m.Process, wires, err = qemuvm.Start(c)
	return wires, err
}

// Ready implements supervisor.VM. QEMU answers when its devices exist and the
// guest's CPUs run.
func (m *machine) Ready(ctx context.Context) error {
	patience := qmpPatience
	if m.cfg.Background {
		patience = templateStartPatience
	}
	qctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("QEMU did not become ready"))
	defer cancel()
	err := m.QMP.Negotiate(qctx)
	switch {
	case err != nil:
	case m.cfg.Load:
		err = m.load(qctx)
	default:
		err = vmdir.PlugAttached(qctx, m.dir, m.SetVolume)
	}
	if err == nil {
		err = m.QMP.Running(qctx)
	}
	if err == nil {
		if m.cfg.Accel != qemuvm.AccelKVM && !m.cfg.Load {
			go m.watchLAPIC(context.WithoutCancel(ctx))
		}
		return nil
	}
	return m.NotReady(err)
}

// load waits until QEMU has read the devices of a saved guest, and starts its
// CPUs. From then on the saved memory no longer belongs to the disk.
func (m *machine) load(ctx context.Context) error {
	saved, err := readMemory(m.dir)
	if err != nil {
		return vmdir.AsError(err, "cannot read %s", fileMemoryState)
	}
	m.at("launched")
	for loaded := false; !loaded; {
		var st struct {
			Status string `json:"status"`
		}
		if err := m.QMP.Execute(ctx, "query-status", nil, &st); err != nil {
			return err
		}
		if loaded = st.Status != "inmigrate"; !loaded {
			time.Sleep(time.Millisecond)
		}
	}
	m.at("loaded")
	if err := vmdir.PlugAttached(ctx, m.dir, m.SetVolume); err != nil {
		return err
	}
	if err := m.runLoaded(ctx, saved); err != nil {
		return err
	}
	node, size, err := m.rootDisk(ctx)
	if err != nil || size == saved.DiskSize {
		return err
	}
	return m.QMP.Execute(ctx, "block_resize", map[string]any{"node-name": node, "size": size}, nil)
}

// runLoaded starts the CPUs of a guest that QEMU has loaded. The copy of a template
// may boot instead, so nothing is noted for it.
func (m *machine) runLoaded(ctx context.Context, saved savedMemory) error {
	if saved.Boot != "" {
		if err := dropMemory(m.dir, durable.None); err != nil { // it is not valid after a power cut
			return err
		}
		return m.QMP.Execute(ctx, "cont", nil, nil)
	}
	if err := m.QMP.Execute(ctx, "query-status", nil, nil); err != nil {
		return err // QEMU has ended, so the memory is still whole
	}
	if err := renameMemory(m.dir, fileMemoryState, fileMemoryUsed); err != nil {
		return err
	}
	m.at("memory claimed")
	if err := m.QMP.Execute(ctx, "cont", nil, nil); err != nil {
		if errors.As(err, new(qemuvm.RefusedError)) { // nothing of the guest has run
			err = errors.Join(err, renameMemory(m.dir, fileMemoryUsed, fileMemoryState))
		}
		return err
	}
	m.at("continued")
	if err := vmdir.RemoveFiles(m.dir, durable.None, fileMemory, fileDevices); err != nil { // a stop removes them
		m.hooks.Log.Error("the saved memory was not removed", "err", err)
	}
	return nil
}

// reused reports whether the guest continues from a memory that is not its own,
// and has not got its identity.
func (m *machine) reused() bool {
	var used savedMemory
	err := durable.ReadJSON(filepath.Join(m.dir, fileMemoryUsed), &used)
	return err == nil && !used.own() || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// Continued implements supervisor.Continuer.
func (m *machine) Continued() error { return vmdir.RemoveFiles(m.dir, durable.Content, fileMemoryUsed) }

// Disks implements supervisor.VM.
func (m *machine) Disks() []string {
	disks := []string{filepath.Join(m.dir, fileRoot)}
	if dir, _ := m.volumes.Volume(); dir != "" {
		disks = append(disks, filepath.Join(dir, fileRoot))
	}
	return disks
}

// VMID implements supervisor.VM.
func (m *machine) VMID() int { return m.handle.Spec.VMID }

// Network implements supervisor.VM.
func (m *machine) Network() agentlab.Network {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.handle.Spec.Network
}

// StoreNetwork implements supervisor.VM. It writes the file without the lock:
// onEvent must not wait for a slow disk.
func (m *machine) StoreNetwork(n agentlab.Network) error {
	m.mu.Lock()
	next := m.handle
	m.mu.Unlock()
	if err := next.StoreNetwork(m.dir, n); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.handle.Spec.Network = n
	return nil
}

func (m *machine) onEvent(e qemuvm.QMPEvent) {
	switch e.Event {
	case "BLOCK_IO_ERROR":
		e.DiskError(m.hooks)
	case "RESUME":
		m.mu.Lock()
		held := m.saving != nil && !m.saving.to.Running // leaveSaved
		m.mu.Unlock()
		if !held {
			m.hooks.Paused("")
		}
	case "MIGRATION":
		m.mu.Lock()
		if m.saving != nil {
			select {
			case m.saving.status <- e.Data.Status:
			default: // more than QEMU has
			}
		}
		m.mu.Unlock()
	}
}
