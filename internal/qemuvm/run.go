package qemuvm

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// FileLog is the file with the output of QEMU to stderr, in the directory of a
// supervised VM. Its size and rate are bounded.
const FileLog = "qemu.log"

// Bounds of FileLog: bytes, and bytes per second.
const logMax, logRate = 256 << 10, 16 << 10

// The file descriptors that QEMU inherits, by number in QEMU. FDMore is the first
// of Command.Inherit.
const (
	FDNetwork = 3 // Ethernet frames, for -netdev stream
	FDControl = 4
	FDConsole = 5
	FDMonitor = 6
	fdLock    = 7
	FDMore    = 8
)

// Command is a QEMU to start.
type Command struct {
	Files   supervisor.Dir // the VM's directory, in which QEMU runs
	Lock    *os.File       // result of Files.LockProcess; QEMU inherits it, Start closes it
	Program string         // absolute path
	Args    []string
	Inherit []*os.File // from FDMore on; the caller closes them
	// OnThread is called on the thread that starts QEMU, after it has dropped its
	// privileges; nil does nothing.
	OnThread func() error
	// Background gives QEMU the least of the host's CPU time.
	Background bool
	Log        *slog.Logger
	// Event is called with each event of QEMU, in order, by one goroutine.
	Event func(QMPEvent)
}

// Process is a running QEMU. It implements the methods of supervisor.VM that
// concern the process.
type Process struct {
	QMP *QMP

	cmd       *exec.Cmd
	log       *bounded.Log
	stderr    bounded.Tail
	done      chan struct{}
	oomBefore uint64

	mu       sync.Mutex
	shutdown string // reason of the last SHUTDOWN event
}

// Start starts QEMU with the devices of supervisor.Wires. After an error nothing
// of it is left.
func Start(c Command) (*Process, supervisor.Wires, error) {
	defer func() { _ = c.Lock.Close() }() // QEMU still holds it
	var ours [4]net.Conn
	var theirs [4]*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close() // QEMU has duplicates
		}
	}()
	p := &Process{stderr: bounded.Tail{Max: 4 << 10}, done: make(chan struct{})}
	var err error
	for i := range ours {
		if err == nil {
			ours[i], theirs[i], err = SocketPair()
		}
	}
	var ended <-chan struct{}
	if err != nil {
		err = fault(err, "cannot create a socket for QEMU")
	} else {
		ended, err = p.start(c, theirs[:])
	}
	if err != nil {
		for _, conn := range ours {
			if conn != nil {
				_ = conn.Close()
			}
		}
		return nil, supervisor.Wires{}, err
	}
	p.QMP = NewQMP(ours[FDMonitor-FDNetwork], func(e QMPEvent) { p.onEvent(c, e) })
	go func() {
		<-ended
		select { // its last events are needed for the reason
		case <-p.QMP.Done():
		case <-time.After(2 * time.Second):
		}
		_ = p.QMP.Close()
		_ = p.log.Close()
		close(p.done)
	}()
	return p, supervisor.Wires{Network: ours[0], Control: ours[FDControl-FDNetwork], Console: ours[FDConsole-FDNetwork]}, nil
}

// start starts the process. It inherits the other ends of the sockets, and the
// lock that shows that it is alive.
func (p *Process) start(c Command, theirs []*os.File) (ended <-chan struct{}, err error) {
	p.log, err = bounded.OpenLog(filepath.Join(c.Files.Path, FileLog), logMax, logRate, time.Now)
	if err != nil {
		return nil, fault(err, "cannot open %s", FileLog)
	}
	defer func() {
		if err != nil {
			_ = p.log.Close()
		}
	}()
	c.Log.Info("starting qemu", "path", c.Program, "args", c.Args)
	cmd := exec.Command(c.Program, c.Args...) //nolint:noctx // our own arguments; no context ends it
	cmd.Dir = c.Files.Path
	// One arena for all threads: each further one costs about a megabyte.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "MALLOC_ARENA_MAX=1"}
	cmd.ExtraFiles = append(append(theirs[:len(theirs):len(theirs)], c.Lock), c.Inherit...)
	cmd.Stderr = io.MultiWriter(p.log, &p.stderr)
	cmd.WaitDelay = 2 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	p.cmd, p.oomBefore = cmd, OOMKills()
	if ended, err = StartUnprivileged(cmd, c.OnThread, c.Background); err != nil {
		return nil, fault(err, "cannot start QEMU (%s)", c.Program)
	}
	if err := c.Files.NoteProcess(cmd.Process.Pid); err != nil {
		_ = cmd.Process.Kill()
		<-ended
		return nil, err
	}
	process := "/proc/" + strconv.Itoa(cmd.Process.Pid)
	score := "300" // if the host runs out of memory, a VM is killed before its supervisor
	if c.Background {
		score = "1000" // and one in the background before all others
		// The priority of a process counts within its session only, and the
		// session has one of its own.
		_ = os.WriteFile(process+"/autogroup", []byte("19"), 0)
	}
	_ = os.WriteFile(process+"/oom_score_adj", []byte(score), 0)
	return ended, nil
}

func (p *Process) onEvent(c Command, e QMPEvent) {
	if e.Event == "SHUTDOWN" {
		c.Log.Info("QEMU is shutting down", "guest", e.Data.Guest, "reason", e.Data.Reason)
		p.mu.Lock()
		p.shutdown = e.Data.Reason
		p.mu.Unlock()
	}
	c.Event(e)
}

// SocketPair returns two connected stream sockets, one of them for a child.
func SocketPair() (net.Conn, *os.File, error) {
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

// PID returns the ID of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done returns a channel that is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// End returns, after Done, how the VM ended.
func (p *Process) End(s supervisor.Seen) supervisor.End {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := Exit{Shutdown: p.shutdown, Stderr: p.stderr.String(), Console: s.Console, Answered: s.Answered, OOM: OOMKills() > p.oomBefore}
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		e.Status = ws
	}
	return e.End()
}

// NotReady returns why QEMU did not become ready. If it has ended, that is a better reason
// than err, which is of the broken connection.
func (p *Process) NotReady(err error) error {
	select {
	case <-p.done:
		return errors.New(p.End(supervisor.Seen{}).Reason)
	case <-time.After(500 * time.Millisecond):
		return fault(err, "QEMU did not become ready")
	}
}

// PowerButton asks the guest's init to power off.
func (p *Process) PowerButton(ctx context.Context) error {
	return p.QMP.Execute(ctx, "system_powerdown", nil, nil)
}

// Quit ends QEMU, which flushes the metadata of its disk format.
func (p *Process) Quit(ctx context.Context) error { return p.QMP.Execute(ctx, "quit", nil, nil) }

// Kill ends QEMU at once.
func (p *Process) Kill() { _ = p.cmd.Process.Kill() }

// Pause stops the guest's CPUs.
func (p *Process) Pause(ctx context.Context) error { return p.QMP.Execute(ctx, "stop", nil, nil) }

// Continue resumes the guest's CPUs.
func (p *Process) Continue(ctx context.Context) error { return p.QMP.Execute(ctx, "cont", nil, nil) }
