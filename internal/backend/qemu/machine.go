package qemu

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/boundedlog"
)

// qmpPatience is how long QEMU may take to get ready, or to end when told.
const qmpPatience = 20 * time.Second

// machine is the QEMU process of a sandbox. It implements VM.
type machine struct {
	dir   string
	cfg   startConfig
	hooks Hooks

	cmd       *exec.Cmd
	log       *boundedlog.Log // what QEMU writes to stderr
	stderr    tail
	qmp       *qmp
	done      chan struct{}
	oomBefore uint64

	mu       sync.Mutex
	handle   handle // only its network changes
	shutdown string // reason of the last SHUTDOWN event
}

// newMachine is the Kind of this driver.
func newMachine(dir string, h Hooks) (VM, error) {
	m := &machine{dir: dir, hooks: h, stderr: tail{max: 4 << 10}, done: make(chan struct{})}
	if err := readJSON(filepath.Join(dir, fileStart), &m.cfg); err != nil {
		return nil, fault(err, "cannot read %s", fileStart)
	}
	var err error
	if m.handle, err = readHandle(dir); err != nil {
		return nil, asError(err, "cannot read %s", fileConfig)
	}
	return m, nil
}

// Launch implements VM.
func (m *machine) Launch(context.Context) (Wires, error) {
	var ours [4]net.Conn
	var theirs [4]*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close() // QEMU has its own by now
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
		err = fault(err, "cannot make a socket for QEMU")
	} else {
		ended, err = m.start(theirs[:])
	}
	if err != nil {
		for _, c := range ours {
			if c != nil {
				_ = c.Close()
			}
		}
		return Wires{}, err
	}
	m.qmp = newQMP(ours[3], m.onEvent)
	go func() {
		<-ended
		_ = waitDone(m.qmp.done, m.qmp) // its last words are part of the reason
		_ = m.log.Close()
		close(m.done)
	}()
	return Wires{Network: ours[0], Control: ours[1], Console: ours[2]}, nil
}

// start starts the process. It inherits the other ends of our sockets and the
// lock that proves it alive.
func (m *machine) start(theirs []*os.File) (ended <-chan struct{}, err error) {
	lock, err := openLock(filepath.Join(m.dir, fileQEMULock))
	if err != nil {
		return nil, fault(err, "cannot open QEMU's lock")
	}
	defer func() { _ = lock.Close() }() // QEMU holds it on
	if err := m.awaitOldQEMU(lock); err != nil {
		return nil, err
	}
	args := vmArgs(m.handle, m.cfg, qemuFDs)
	if err := refuseHostMounts(m.dir, m.handle, m.cfg, args); err != nil {
		return nil, err
	}
	m.log, err = boundedlog.Open(filepath.Join(m.dir, fileQEMULog), qemuLogMax, qemuLogRate, time.Now)
	if err != nil {
		return nil, fault(err, "cannot open %s", fileQEMULog)
	}
	defer func() {
		if err != nil {
			_ = m.log.Close()
		}
	}()
	m.hooks.Log.Info("starting qemu", "path", m.cfg.QEMU, "args", args)
	cmd := exec.Command(m.cfg.QEMU, args...) //nolint:gosec,noctx // our own arguments; its end is not a context's
	cmd.Dir = m.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	cmd.ExtraFiles = append(theirs, lock)
	cmd.Stderr = io.MultiWriter(m.log, &m.stderr)
	cmd.WaitDelay = 2 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	m.cmd, m.oomBefore = cmd, oomKills()
	if ended, err = startUnprivileged(cmd); err != nil {
		return nil, fault(err, "cannot start QEMU (%s)", m.cfg.QEMU)
	}
	id, err := identify(cmd.Process.Pid)
	if err == nil {
		err = noteJSON(filepath.Join(m.dir, fileQEMUPID), id)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		<-ended
		return nil, fault(err, "cannot write %s", fileQEMUPID)
	}
	// Where the host runs out of memory, a VM goes before what manages it.
	_ = os.WriteFile("/proc/"+strconv.Itoa(id.PID)+"/oom_score_adj", []byte("300"), 0)
	return ended, nil
}

// awaitOldQEMU waits for the end of a QEMU whose shim was killed.
func (m *machine) awaitOldQEMU(lock *os.File) error {
	ctx, cancel := context.WithTimeout(context.Background(), qmpPatience)
	defer cancel()
	err := poll(ctx, func() (bool, error) {
		ok, err := takeLock(lock)
		if !ok && err == nil {
			err = killNoted(m.dir, fileQEMUPID)
		}
		return ok, err
	})
	if err != nil {
		return fault(err, "the QEMU of the last run does not end")
	}
	return nil
}

// startUnprivileged starts a process from a thread that lives as long as the
// process: the kernel sends the death signal when the thread that forked ends.
// ended is closed when the process has ended and was waited for.
func startUnprivileged(cmd *exec.Cmd) (ended <-chan struct{}, err error) {
	started, done := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := giveUpPrivileges()
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			_ = cmd.Wait()
			close(done)
		}
	}()
	return done, <-started
}

// socketPair returns two connected stream sockets, one of them for a child.
func socketPair() (net.Conn, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
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

// Ready implements VM. QEMU answers when its devices are made and the guest's
// CPUs run.
func (m *machine) Ready(ctx context.Context) error {
	qctx, cancel := context.WithTimeoutCause(ctx, qmpPatience, errors.New("QEMU does not get ready"))
	defer cancel()
	var st struct {
		Running bool   `json:"running"`
		Status  string `json:"status"`
	}
	err := m.qmp.negotiate(qctx)
	if err == nil {
		err = m.qmp.execute(qctx, "query-status", nil, &st)
	}
	if err == nil && !st.Running {
		err = errors.New("the guest's CPUs do not run: " + agentlab.OneLine(st.Status, maxReason))
	}
	if err == nil {
		if m.cfg.Accel != AccelKVM {
			go m.watchLAPIC(context.WithoutCancel(ctx))
		}
		return nil
	}
	select {
	case <-m.done: // its last words tell more than the broken conversation
		return errors.New(m.Reason(Seen{}))
	case <-time.After(500 * time.Millisecond):
		return fault(err, "QEMU does not get ready")
	}
}

// Done implements VM.
func (m *machine) Done() <-chan struct{} { return m.done }

// Reason implements VM.
func (m *machine) Reason(s Seen) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := ending{shutdown: m.shutdown, stderr: m.stderr.String(), console: s.Console, answered: s.Answered, oom: oomKills() > m.oomBefore}
	if ws, ok := m.cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		e.status = ws
	}
	return e.reason()
}

// PowerButton implements VM.
func (m *machine) PowerButton(ctx context.Context) error {
	return m.qmp.execute(ctx, "system_powerdown", nil, nil)
}

// Quit implements VM: QEMU writes what its disk format still holds in memory.
func (m *machine) Quit(ctx context.Context) error { return m.qmp.execute(ctx, "quit", nil, nil) }

// Kill implements VM.
func (m *machine) Kill() { _ = m.cmd.Process.Kill() }

// Pause implements VM.
func (m *machine) Pause(ctx context.Context) error { return m.qmp.execute(ctx, "stop", nil, nil) }

// Continue implements VM.
func (m *machine) Continue(ctx context.Context) error { return m.qmp.execute(ctx, "cont", nil, nil) }

// Disk implements VM.
func (m *machine) Disk() string { return filepath.Join(m.dir, fileRoot) }

// Network implements VM.
func (m *machine) Network() agentlab.Network {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.handle.Spec.Network
}

// StoreNetwork implements VM.
func (m *machine) StoreNetwork(n agentlab.Network) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.handle
	h.Spec.Network = n
	if err := writeJSON(filepath.Join(m.dir, fileConfig), h); err != nil {
		return fault(err, "cannot write %s", fileConfig)
	}
	m.handle = h
	return nil
}

func (m *machine) onEvent(e qmpEvent) {
	switch e.Event {
	case "SHUTDOWN":
		m.hooks.Log.Info("qemu shuts down", "guest", e.Data.Guest, "reason", e.Data.Reason)
		m.mu.Lock()
		m.shutdown = e.Data.Reason
		m.mu.Unlock()
	case "BLOCK_IO_ERROR":
		m.hooks.Log.Error("disk error", "device", e.Data.Device, "reason", e.Data.Reason, "nospace", e.Data.NoSpace, "action", e.Data.Action)
		if e.Data.NoSpace && e.Data.Action == "stop" {
			m.hooks.Paused("the host's disk is full")
		}
	case "RESUME":
		m.hooks.Paused("")
	}
}
