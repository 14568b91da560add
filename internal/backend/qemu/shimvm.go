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

	"github.com/agentlab-vm/agentlab/internal/boundedlog"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// Ports on the controller's address that lead to the driver's ListenGuest.
const (
	controllerPort = 8844
	uploadPort     = 8846
)

// qmpPatience is how long QEMU may take to get ready, or to end when told.
const qmpPatience = 20 * time.Second

// process is the QEMU process.
type process struct {
	cmd       *exec.Cmd
	id        processID
	done      chan struct{} // closed when it has ended and was waited for
	mark      int           // depth of the undo stack before the VM
	oomBefore uint64
}

func (p *process) status() syscall.WaitStatus {
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		return ws
	}
	return 0
}

// startVM starts QEMU and all that is connected to it, and returns when the
// guest's CPUs run.
func (s *shim) startVM(ctx context.Context) error {
	mark := s.undo.depth()
	var ours [4]net.Conn
	var theirs [4]*os.File
	for i := range ours {
		var err error
		if ours[i], theirs[i], err = socketPair(); err != nil {
			return fault(err, "cannot make a socket for QEMU")
		}
		s.undo.add(ours[i].Close)
	}
	vm, err := s.startQEMU(theirs)
	if err != nil {
		return err
	}
	vm.mark = mark
	s.vm = vm
	s.undo.add(func() error { // nothing of it survives, whatever happens
		_ = vm.cmd.Process.Kill()
		<-vm.done
		return nil
	})
	if err := noteJSON(filepath.Join(s.dir, fileQEMUPID), vm.id); err != nil {
		return fault(err, "cannot write %s", fileQEMUPID)
	}
	netConn, controlConn, consoleConn, qmpConn := ours[0], ours[1], ours[2], ours[3]
	s.pumpConsole(consoleConn)
	s.link = link.Host(context.WithoutCancel(ctx), controlConn)
	s.undo.add(s.link.Close)
	go s.watchLink(context.WithoutCancel(ctx))
	if err := s.startNet(netConn); err != nil {
		return err
	}
	return s.startQMP(ctx, qmpConn)
}

// startQEMU starts the process. It inherits the other ends of our sockets and
// the lock that proves it alive.
func (s *shim) startQEMU(theirs [4]*os.File) (*process, error) {
	defer func() {
		for _, f := range theirs {
			_ = f.Close()
		}
	}()
	lock, err := openLock(filepath.Join(s.dir, fileQEMULock))
	if err != nil {
		return nil, fault(err, "cannot open QEMU's lock")
	}
	defer func() { _ = lock.Close() }() // QEMU holds it on
	if err := s.awaitOldQEMU(lock); err != nil {
		return nil, err
	}
	qemuLog, err := boundedlog.Open(filepath.Join(s.dir, fileQEMULog), qemuLogMax, qemuLogRate, time.Now)
	if err != nil {
		return nil, fault(err, "cannot open %s", fileQEMULog)
	}
	s.undo.add(qemuLog.Close)

	args := vmArgs(s.handle, s.cfg, qemuFDs)
	if err := refuseHostMounts(s.dir, s.handle, s.cfg, args); err != nil {
		return nil, err
	}
	s.log.Info("starting qemu", "path", s.cfg.QEMU, "args", args)
	cmd := exec.Command(s.cfg.QEMU, args...) //nolint:gosec,noctx // our own arguments; its end is not a context's
	cmd.Dir = s.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	cmd.ExtraFiles = append(theirs[:], lock)
	cmd.Stderr = io.MultiWriter(qemuLog, &s.stderrTail)
	cmd.WaitDelay = 2 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	vm := &process{cmd: cmd, done: make(chan struct{}), oomBefore: oomKills()}
	if err := vm.start(); err != nil {
		return nil, fault(err, "cannot start QEMU (%s)", s.cfg.QEMU)
	}
	if vm.id, err = identify(cmd.Process.Pid); err != nil {
		_ = cmd.Process.Kill()
		<-vm.done
		return nil, fault(err, "QEMU ended at once")
	}
	// Where the host runs out of memory, a VM goes before what manages it.
	_ = os.WriteFile("/proc/"+strconv.Itoa(vm.id.PID)+"/oom_score_adj", []byte("300"), 0)
	return vm, nil
}

// awaitOldQEMU waits for the end of a QEMU whose shim was killed.
func (s *shim) awaitOldQEMU(lock *os.File) error {
	ctx, cancel := context.WithTimeout(context.Background(), qmpPatience)
	defer cancel()
	err := poll(ctx, func() (bool, error) {
		ok, err := takeLock(lock)
		if !ok && err == nil {
			err = killNoted(s.dir, fileQEMUPID)
		}
		return ok, err
	})
	if err != nil {
		return fault(err, "the QEMU of the last run does not end")
	}
	return nil
}

// start starts the process from a thread that lives as long as the process:
// the kernel sends the death signal when the thread that forked ends.
func (p *process) start() error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := giveUpPrivileges()
		if err == nil {
			err = p.cmd.Start()
		}
		started <- err
		if err == nil {
			_ = p.cmd.Wait()
			close(p.done)
		}
	}()
	return <-started
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

// pumpConsole copies the guest's console to the log until QEMU ends.
func (s *shim) pumpConsole(conn net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, err := conn.Read(buf)
			_, _ = s.consoleLog.Write(buf[:n])
			_, _ = s.consoleTail.Write(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	s.undo.add(func() error { return waitDone(done, conn) })
}

// waitDone gives a reader of a dead peer's socket the time to read what is
// left in it.
func waitDone(done <-chan struct{}, c io.Closer) error {
	select {
	case <-done:
	case <-time.After(2 * time.Second):
	}
	err := c.Close()
	<-done
	return err
}

func (s *shim) watchLink(ctx context.Context) {
	if s.link.WaitUp(ctx) == nil {
		s.log.Info("the guest answers")
		s.mu.Lock()
		s.answered = true
		s.mu.Unlock()
	}
}

// startNet runs the guest's private network.
func (s *shim) startNet(conn net.Conn) error {
	policy, err := egress.New(s.network())
	if err != nil {
		return err
	}
	cfg := vnet.Config{
		Link: conn, MTU: GuestMTU, Policy: policy, Logger: s.log.With("part", "net"),
		Services: map[uint16]func(net.Conn){controllerPort: s.toController, uploadPort: s.toController},
		Audit:    s.egressLog.Write, Reserved: s.cfg.Reserved,
	}
	if err := s.cfg.route(&cfg); err != nil {
		return err
	}
	network, err := vnet.New(cfg)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.net = network
	s.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.net.Run(context.Background()); err != nil && !errors.Is(err, io.EOF) {
			s.log.Error("the network ended", "err", err)
		}
	})
	s.undo.add(func() error { s.net.Close(); wg.Wait(); return nil })
	return nil
}

// toController joins a connection of the guest with the controller's
// listener. Without one the guest sees a reset, and tries again.
func (s *shim) toController(guest net.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	host, err := sockpath.Dial(ctx, filepath.Join(s.dir, fileGuestSock))
	if err != nil {
		s.log.Debug("no controller", "err", err)
		return
	}
	splice(guest, host)
}

// startQMP waits until QEMU answers, which it does when its devices are made
// and the guest's CPUs run.
func (s *shim) startQMP(ctx context.Context, conn net.Conn) error {
	ctx, cancel := context.WithTimeoutCause(ctx, qmpPatience, errors.New("QEMU does not get ready"))
	defer cancel()
	q, err := newQMP(ctx, conn, s.onEvent)
	if err == nil {
		s.mu.Lock()
		s.qmp = q
		s.mu.Unlock()
		s.undo.add(func() error { return waitDone(q.done, q) })
		var st struct {
			Running bool   `json:"running"`
			Status  string `json:"status"`
		}
		err = q.execute(ctx, "query-status", nil, &st)
		if err == nil && !st.Running {
			err = errors.New("the guest's CPUs do not run: " + clean(st.Status))
		}
	}
	if err == nil {
		if s.cfg.Accel != AccelKVM {
			go s.watchLAPIC(context.WithoutCancel(ctx))
		}
		return s.setPhase(phaseRunning, "")
	}
	select {
	case <-s.vm.done: // its last words tell more than the broken conversation
		return errors.New(ending{status: s.vm.status(), stderr: s.stderrTail.String(), oom: oomKills() > s.vm.oomBefore}.reason())
	case <-time.After(500 * time.Millisecond):
		return fault(err, "QEMU does not get ready")
	}
}

// splice copies both ways between two connections, passes half-closes on
// where they exist, and closes both in the end.
func splice(a, b net.Conn) {
	var wg sync.WaitGroup
	one := func(dst, src net.Conn) {
		_, err := io.Copy(dst, src)
		half, ok := dst.(interface{ CloseWrite() error })
		if err != nil || !ok || half.CloseWrite() != nil {
			_ = a.Close()
			_ = b.Close()
		}
	}
	wg.Go(func() { one(a, b) })
	one(b, a)
	wg.Wait()
	_ = a.Close()
	_ = b.Close()
}
