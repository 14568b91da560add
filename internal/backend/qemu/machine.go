package qemu

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Bounds of the log of QEMU's stderr: bytes, and bytes per second.
const qemuLogMax, qemuLogRate = 256 << 10, 16 << 10

// qmpPatience is how long QEMU may take to become ready (in the background:
// templateStartPatience), or to execute a command.
const qmpPatience = 20 * time.Second

// machine is the QEMU process of a sandbox. It implements supervisor.VM.
type machine struct {
	dir   string
	cfg   startConfig
	hooks supervisor.Hooks

	cmd       *exec.Cmd
	log       *bounded.Log // what QEMU writes to stderr
	stderr    bounded.Tail
	qmp       *qemuvm.QMP
	done      chan struct{}
	oomBefore uint64
	saved     savedFiles         // open until the supervisor ends
	devices   *deviceState       // nil before the first save that needs it
	crash     func(point string) // called at each crash point; tests set it

	volumes volumeSlot

	mu       sync.Mutex
	handle   handle // only its network changes
	shutdown string // reason of the last SHUTDOWN event
	saving   *saving
}

// openVM implements supervisor.Kind.
func openVM(dir string, h supervisor.Hooks) (supervisor.VM, error) {
	m := &machine{dir: dir, hooks: h, stderr: bounded.Tail{Max: 4 << 10}, done: make(chan struct{})}
	if err := supervisor.ReadStart(dir, &m.cfg); err != nil {
		return nil, err
	}
	var err error
	if m.handle, err = readHandle(dir); err != nil {
		return nil, asError(err, "cannot read %s", fileConfig)
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
func (m *machine) Launch(context.Context) (supervisor.Wires, error) {
	var ours [4]net.Conn
	var theirs [4]*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close() // QEMU has duplicates
		}
	}()
	var err error
	for i := range ours {
		if err == nil {
			ours[i], theirs[i], err = socketPair()
		}
	}
	var ended <-chan struct{}
	if err != nil {
		err = fault(err, "cannot create a socket for QEMU")
	} else {
		ended, err = m.start(theirs[:])
	}
	if err != nil {
		for _, c := range ours {
			if c != nil {
				_ = c.Close()
			}
		}
		return supervisor.Wires{}, err
	}
	m.qmp = qemuvm.NewQMP(ours[3], m.onEvent)
	go func() {
		<-ended
		select { // its last events are needed for the reason
		case <-m.qmp.Done():
		case <-time.After(2 * time.Second):
		}
		_ = m.qmp.Close()
		_ = m.log.Close()
		close(m.done)
	}()
	return supervisor.Wires{Network: ours[0], Control: ours[1], Console: ours[2]}, nil
}

// start starts the process. It inherits the other ends of the sockets, and the
// lock that shows that it is alive.
func (m *machine) start(theirs []*os.File) (ended <-chan struct{}, err error) {
	files := supervisor.Dir{Path: m.dir, Process: processName}
	lock, err := files.LockProcess()
	if err != nil {
		return nil, err
	}
	defer func() { _ = lock.Close() }() // QEMU still holds it
	args := vmArgs(m.handle, m.cfg, qemuFDs)
	if err := refuseHostMounts(m.dir, m.handle, m.cfg, args); err != nil {
		return nil, err
	}
	m.log, err = bounded.OpenLog(filepath.Join(m.dir, fileQEMULog), qemuLogMax, qemuLogRate, time.Now)
	if err != nil {
		return nil, fault(err, "cannot open %s", fileQEMULog)
	}
	defer func() {
		if err != nil {
			_ = m.log.Close()
		}
	}()
	m.hooks.Log.Info("starting qemu", "path", m.cfg.QEMU, "args", args)
	if err := os.WriteFile(filepath.Join(m.dir, fileNoVolume), nil, 0o600); err != nil {
		return nil, fault(err, "cannot create %s", fileNoVolume)
	}
	cmd := exec.Command(m.cfg.QEMU, args...) //nolint:noctx // our own arguments; no context ends it
	cmd.Dir = m.dir
	// One arena for all threads: each further one costs about a megabyte.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "MALLOC_ARENA_MAX=1"}
	cmd.ExtraFiles = append(theirs, lock)
	var filter *holeFilter
	if m.cfg.Load {
		if m.saved, err = openSaved(m.dir); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				m.saved.close()
			}
		}()
		cmd.ExtraFiles = append(cmd.ExtraFiles, m.saved.devices)
		// The memory of a saved guest has no huge pages. Without them for its
		// translated code, QEMU occupies less. This process has the same setting.
		noHugePages()
		filter = &holeFilter{}
		if err := unix.Fstat(int(m.saved.memory.Fd()), &filter.memory); err != nil {
			return nil, fault(err, "cannot check the saved memory")
		}
	}
	cmd.Stderr = io.MultiWriter(m.log, &m.stderr)
	cmd.WaitDelay = 2 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	m.cmd, m.oomBefore = cmd, qemuvm.OOMKills()
	if ended, err = startUnprivileged(cmd, filter, m.cfg.Background); err != nil {
		return nil, fault(err, "cannot start QEMU (%s)", m.cfg.QEMU)
	}
	if err := files.NoteProcess(cmd.Process.Pid); err != nil {
		_ = cmd.Process.Kill()
		<-ended
		return nil, err
	}
	process := "/proc/" + strconv.Itoa(cmd.Process.Pid)
	score := "300" // if the host runs out of memory, a VM is killed before its supervisor
	if m.cfg.Background {
		score = "1000" // and one in the background before all others
		// The priority of a process counts within its session only, and the
		// session has one of its own.
		_ = os.WriteFile(process+"/autogroup", []byte("19"), 0)
	}
	_ = os.WriteFile(process+"/oom_score_adj", []byte(score), 0)
	return ended, nil
}

// socketPair returns two connected stream sockets, one of them for a child.
func socketPair() (net.Conn, *os.File, error) {
	pair, err := privatePair()
	if err != nil {
		return nil, nil, err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer func() { _ = ours.Close() }()
	conn, err := net.FileConn(ours)
	if err != nil {
		_ = theirs.Close()
		return nil, nil, err
	}
	return conn, theirs, nil
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
	var st struct {
		Running bool   `json:"running"`
		Status  string `json:"status"`
	}
	err := m.qmp.Negotiate(qctx)
	switch {
	case err != nil:
	case m.cfg.Load:
		err = m.load(qctx)
	default:
		err = m.plugAttached(qctx)
	}
	if err == nil {
		err = m.qmp.Execute(qctx, "query-status", nil, &st)
	}
	if err == nil && !st.Running {
		err = errors.New("the guest's CPUs do not run: " + agentlab.OneLine(st.Status, qemuvm.MaxReason))
	}
	if err == nil {
		if m.cfg.Accel != qemuvm.AccelKVM && !m.cfg.Load {
			go m.watchLAPIC(context.WithoutCancel(ctx))
		}
		return nil
	}
	select {
	case <-m.done: // its exit is a better reason than the broken connection
		return errors.New(m.End(supervisor.Seen{}).Reason)
	case <-time.After(500 * time.Millisecond):
		return fault(err, "QEMU did not become ready")
	}
}

// load waits until QEMU has read the devices of a saved guest, and starts its
// CPUs. From then on the saved memory no longer belongs to the disk.
func (m *machine) load(ctx context.Context) error {
	saved, err := readMemory(m.dir)
	if err != nil {
		return asError(err, "cannot read %s", fileMemoryState)
	}
	m.at("launched")
	for loaded := false; !loaded; {
		var st struct {
			Status string `json:"status"`
		}
		if err := m.qmp.Execute(ctx, "query-status", nil, &st); err != nil {
			return err
		}
		if loaded = st.Status != "inmigrate"; !loaded {
			time.Sleep(time.Millisecond)
		}
	}
	m.at("loaded")
	if err := m.plugAttached(ctx); err != nil {
		return err
	}
	if err := m.runLoaded(ctx, saved); err != nil {
		return err
	}
	node, size, err := m.rootDisk(ctx)
	if err != nil || size == saved.DiskSize {
		return err
	}
	return m.qmp.Execute(ctx, "block_resize", map[string]any{"node-name": node, "size": size}, nil)
}

// runLoaded starts the CPUs of a guest that QEMU has loaded. The copy of a template
// may boot instead, so nothing is noted for it.
func (m *machine) runLoaded(ctx context.Context, saved savedMemory) error {
	if saved.Boot != "" {
		if err := dropMemory(m.dir, durable.None); err != nil { // it is not valid after a power cut
			return err
		}
		return m.qmp.Execute(ctx, "cont", nil, nil)
	}
	if err := m.qmp.Execute(ctx, "query-status", nil, nil); err != nil {
		return err // QEMU has ended, so the memory is still whole
	}
	if err := renameMemory(m.dir, fileMemoryState, fileMemoryUsed); err != nil {
		return err
	}
	m.at("memory claimed")
	if err := m.qmp.Execute(ctx, "cont", nil, nil); err != nil {
		if errors.As(err, new(qemuvm.RefusedError)) { // nothing of the guest has run
			err = errors.Join(err, renameMemory(m.dir, fileMemoryUsed, fileMemoryState))
		}
		return err
	}
	m.at("continued")
	if err := removeFiles(m.dir, durable.None, fileMemory, fileDevices); err != nil { // a stop removes them
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
func (m *machine) Continued() error { return removeFiles(m.dir, durable.Content, fileMemoryUsed) }

// Done implements supervisor.VM.
func (m *machine) Done() <-chan struct{} { return m.done }

// End implements supervisor.VM.
func (m *machine) End(s supervisor.Seen) supervisor.End {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := qemuvm.Exit{Shutdown: m.shutdown, Stderr: m.stderr.String(), Console: s.Console, Answered: s.Answered, OOM: qemuvm.OOMKills() > m.oomBefore}
	if ws, ok := m.cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		e.Status = ws
	}
	return e.End()
}

// PowerButton implements supervisor.VM.
func (m *machine) PowerButton(ctx context.Context) error {
	return m.qmp.Execute(ctx, "system_powerdown", nil, nil)
}

// Quit implements supervisor.VM. QEMU flushes the metadata of its disk format.
func (m *machine) Quit(ctx context.Context) error { return m.qmp.Execute(ctx, "quit", nil, nil) }

// Kill implements supervisor.VM.
func (m *machine) Kill() { _ = m.cmd.Process.Kill() }

// Pause implements supervisor.VM.
func (m *machine) Pause(ctx context.Context) error { return m.qmp.Execute(ctx, "stop", nil, nil) }

// Continue implements supervisor.VM.
func (m *machine) Continue(ctx context.Context) error { return m.qmp.Execute(ctx, "cont", nil, nil) }

// Disks implements supervisor.VM.
func (m *machine) Disks() []string {
	disks := []string{filepath.Join(m.dir, fileRoot)}
	if dir := m.volumes.in(); dir != "" {
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
	if err := next.storeNetwork(m.dir, n); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.handle.Spec.Network = n
	return nil
}

func (m *machine) onEvent(e qemuvm.QMPEvent) {
	switch e.Event {
	case "SHUTDOWN":
		m.hooks.Log.Info("QEMU is shutting down", "guest", e.Data.Guest, "reason", e.Data.Reason)
		m.mu.Lock()
		m.shutdown = e.Data.Reason
		m.mu.Unlock()
	case "BLOCK_IO_ERROR":
		m.hooks.Log.Error("disk error", "device", e.Data.Device, "reason", e.Data.Reason, "nospace", e.Data.NoSpace, "action", e.Data.Action)
		if e.Data.NoSpace && e.Data.Action == "stop" {
			m.hooks.Paused("the host's disk is full")
		}
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
