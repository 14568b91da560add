package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/egresslog"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// envLock is the environment variable with the file descriptor of the
// supervisor's lock.
const envLock = "AGENTLAB_SHIM_LOCK_FD"

// Limits of the logs in a sandbox's directory: bytes, and bytes per second.
const (
	consoleMax, consoleRate = 4 << 20, 256 << 10
	logMax, logRate         = 1 << 20, 16 << 10
)

// termGrace is how long a guest may take to power off when the supervisor gets
// SIGTERM, as at the host's shutdown.
const termGrace = 8 * time.Second

// dirEvery is how often the supervisor checks that its directory exists.
const dirEvery = 5 * time.Second

// supervisor supervises one running VM.
type supervisor struct {
	dir      string
	kinds    func(backend string) (Kind, error)
	uptime   func() time.Duration
	options  Options
	rebooted bool // the host was restarted after the last run
	cfg      Start
	lockFile fs.FileInfo // of the lock that this process holds
	log      *slog.Logger
	undo     cleanups

	consoleTail bounded.Tail
	consoleLog  *bounded.Log
	egressLog   *egresslog.Log

	vm   VM
	mark int            // depth of the undo stack before the VM
	link *link.HostLink // nil if the VM has no control port
	net  *vnet.Network  // nil if the driver runs the VM's network

	identity *identity // nil if the guest does not continue from a saved memory

	mu         sync.Mutex
	state      runState
	changed    chan struct{} // closed and replaced when state changes
	answered   bool
	paused     string        // why the guest's CPUs are paused, "" while they run
	cutAt      time.Time     // when the grace of a stop ends
	stopSooner chan struct{} // a stop became more urgent

	deadline      deadline
	deadlineMoved chan struct{} // closed and replaced when deadline changes
	expired       bool          // the VM was stopped because its deadline passed

	cpuMu      sync.Mutex // held while the guest's CPUs are stopped or continued
	netMu      sync.Mutex // held while the policy is changed
	deadlineMu sync.Mutex // held while the deadline is changed
}

// Options change how a supervisor works.
type Options struct {
	// Dialer makes the connections of the guest to the internet. nil means the
	// upstream proxy of start.json, or the network of the host.
	Dialer gate.Dialer
}

// Run supervises the VM in dir: it starts the VM with the settings of
// start.json, and returns when the VM has ended and state.json has the reason.
// It needs a process of its own ("agentlabd vmm DIR"), because it changes
// signal handlers and limits of the process. It fails with code busy if
// another supervisor has dir. kinds returns the Kind of a backend; "" means a
// start.json without a backend.
//
// When ctx ends, or after SIGTERM, the guest gets a few seconds to power off.
func Run(ctx context.Context, dir string, kinds func(backend string) (Kind, error), o Options) (err error) {
	s := newSupervisor(dir, kinds)
	s.options = o
	defer func() { err = errors.Join(err, s.undo.run()) }()
	if err := s.lock(); err != nil {
		return err
	}
	ctx, stop := ownProcess(ctx)
	defer stop()
	return s.run(ctx)
}

func newSupervisor(dir string, kinds func(string) (Kind, error)) *supervisor {
	return &supervisor{
		dir: dir, kinds: kinds, uptime: hostos.SinceBoot, consoleTail: bounded.Tail{Max: 16 << 10}, stopSooner: make(chan struct{}, 1),
		changed: make(chan struct{}), deadlineMoved: make(chan struct{}),
	}
}

// run is Run with the lock held.
func (s *supervisor) run(ctx context.Context) error {
	if err := s.load(); err != nil {
		return s.failed(err)
	}
	if err := s.begin(ctx); err != nil {
		return s.failed(err)
	}
	return s.supervise(ctx)
}

// ownProcess prepares the process to outlive its parent and its terminal.
func ownProcess(ctx context.Context) (context.Context, func()) {
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE, syscall.SIGUSR1, syscall.SIGUSR2)
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
	// A supervisor is mostly idle. The limit is soft: under load it may use more.
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(64 << 20)
	runtime.GOMAXPROCS(min(2, runtime.NumCPU()))
	return signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
}

// lock ensures that this is the only supervisor of the sandbox.
func (s *supervisor) lock() error {
	f, err := s.inheritedLock()
	if err != nil {
		return err
	}
	if f == nil {
		if f, err = openLock(filepath.Join(s.dir, fileLock)); err != nil {
			return fault(err, "cannot open the supervisor's lock")
		}
	}
	s.undo.add(f.Close)
	if s.lockFile, err = f.Stat(); err != nil {
		return fault(err, "cannot check the supervisor's lock")
	}
	ok, err := takeLock(f) // an inherited lock is held already
	if err != nil {
		return fault(err, "cannot acquire the supervisor's lock")
	}
	if !ok {
		return agentlab.Errorf(agentlab.CodeBusy, "another supervisor holds %s", s.dir)
	}
	return nil
}

func (s *supervisor) inheritedLock() (*os.File, error) {
	env := os.Getenv(envLock)
	if env == "" {
		return nil, nil
	}
	n, err := strconv.Atoi(env)
	if err != nil || n < 3 {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "%s=%q is not a file descriptor", envLock, env)
	}
	unix.CloseOnExec(n)
	f := os.NewFile(uintptr(n), fileLock)
	have, err1 := f.Stat()
	want, err2 := os.Stat(filepath.Join(s.dir, fileLock))
	if err := errors.Join(err1, err2); err != nil || !os.SameFile(have, want) {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "file descriptor %d is not the sandbox's lock", n)
	}
	return f, nil
}

// load opens the log and reads what to run.
func (s *supervisor) load() error {
	logFile, err := bounded.OpenLog(filepath.Join(s.dir, fileLog), logMax, logRate, time.Now)
	if err != nil {
		return fault(err, "cannot open the supervisor's log")
	}
	s.undo.add(logFile.Close)
	s.log = slog.New(slog.NewJSONHandler(logFile, nil))
	if err := ReadStart(s.dir, &s.cfg); err != nil {
		return err
	}
	kind, err := s.kinds(s.cfg.Backend)
	if err != nil {
		return err
	}
	if s.vm, err = kind(s.dir, Hooks{Log: s.log, GuestUp: s.guestUp, Paused: s.setPaused, PowerOff: func() { s.stop(termGrace, "") }}); err != nil {
		return err
	}
	if s.deadline, err = readDeadline(s.dir); err != nil {
		return err
	}
	if last, err := readState(s.dir); err == nil {
		s.rebooted = last.Boot != BootID()
	}
	self, err := identify(os.Getpid())
	if err != nil {
		return fault(err, "cannot read the start time of this process")
	}
	if err := durable.ReplaceJSON(filepath.Join(s.dir, filePID), self, durable.None); err != nil {
		return fault(err, "cannot write %s", filePID)
	}
	return s.setPhase(phaseStarting, "")
}

// begin starts everything. Run undoes what a failure leaves.
func (s *supervisor) begin(ctx context.Context) error {
	ln, err := sockpath.Takeover(filepath.Join(s.dir, fileSock), 0o600)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelWarn)}
	go func() { _ = srv.Serve(ln) }()
	s.undo.add(func() error { // closes ln
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		return errors.Join(srv.Shutdown(ctx), srv.Close()) // a client that waits for the end gets its answer
	})
	if s.consoleLog, err = bounded.OpenLog(filepath.Join(s.dir, FileConsole), consoleMax, consoleRate, time.Now); err != nil {
		return fault(err, "cannot open %s", FileConsole)
	}
	s.undo.add(s.consoleLog.Close)
	if s.egressLog, err = egresslog.Open(filepath.Join(s.dir, fileEgress), s.vm.VMID(), s.rebooted); err != nil {
		return fault(err, "cannot open %s", fileEgress)
	}
	s.undo.add(s.egressLog.Close)
	return s.startVM(ctx)
}

// supervise waits for the VM's end and writes its reason to state.json.
func (s *supervisor) supervise(ctx context.Context) error {
	s.log.Info("running")
	idle := time.AfterFunc(10*time.Second, debug.FreeOSMemory) // of the start
	defer idle.Stop()
	go s.watchDir()
	go s.watchDeadline()
	go s.watchSpace()
	select {
	case <-s.vm.Done():
	case <-ctx.Done():
		s.log.Warn("ending", "why", context.Cause(ctx))
		s.stop(termGrace, "the supervisor process was terminated")
		<-s.vm.Done()
	}
	if err := s.undo.runUntil(s.mark); err != nil { // after this the console log is complete
		s.log.Warn("clean-up", "err", err)
	}

	s.mu.Lock()
	asked, why := s.state.Phase == phaseStopping, s.state.Reason
	seen, expired := Seen{Console: s.consoleTail.String(), Answered: s.answered}, s.expired
	s.mu.Unlock()
	e := End{Reason: why}
	if !asked {
		e = s.vm.End(seen)
	}
	s.log.Info("ended", "reason", e.Reason)
	switch {
	case e.PoweredOff, asked && (why == "" || expired):
		return s.setPhase(phaseStopped, "")
	case e.Rebooted:
		return s.setPhase(phaseRebooted, e.Reason)
	}
	return s.setPhase(phaseCrashed, e.Reason)
}

// watchDir ends a VM whose directory was removed: it could no longer be found.
func (s *supervisor) watchDir() {
	tick := time.NewTicker(dirEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.vm.Done():
			return
		case <-tick.C:
		}
		now, err := os.Stat(filepath.Join(s.dir, fileLock))
		if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(now, s.lockFile) {
			s.vm.Kill()
			return
		}
	}
}

// failed records why there is no VM.
func (s *supervisor) failed(err error) error {
	if s.log != nil {
		s.log.Error("cannot start", "err", err)
	}
	_ = s.undo.runUntil(1) // all but the lock: state.json is final once the lock is free
	reason := agentlab.Reason("it did not start: " + err.Error())
	if serr := s.setPhase(phaseCrashed, reason); serr != nil {
		return errors.Join(err, serr)
	}
	return err
}

// setPhase writes state.json and then wakes the clients that wait.
func (s *supervisor) setPhase(phase, reason string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := runState{
		RunID: s.cfg.RunID, Phase: phase, Reason: reason, Expired: s.expired, Paused: s.paused, Boot: BootID(), Changed: time.Now().UTC(),
	}
	sync := durable.None
	if st.ended() {
		sync, st.Paused = durable.Content, ""
	}
	err := durable.ReplaceJSON(filepath.Join(s.dir, fileState), st, sync)
	s.state = st
	close(s.changed)
	s.changed = make(chan struct{})
	if err != nil {
		return fault(err, "cannot write %s", fileState)
	}
	return nil
}

// cleanups is a stack of functions to undo setup steps, run in reverse order.
type cleanups struct {
	mu    sync.Mutex
	stack []func() error
}

func (c *cleanups) add(f func() error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stack = append(c.stack, f)
}

func (c *cleanups) depth() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.stack)
}

// runUntil undoes everything above depth.
func (c *cleanups) runUntil(depth int) error {
	var errs []error
	for {
		c.mu.Lock()
		n := len(c.stack)
		if n <= depth {
			c.mu.Unlock()
			return errors.Join(errs...)
		}
		f := c.stack[n-1]
		c.stack = c.stack[:n-1]
		c.mu.Unlock()
		if err := f(); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, os.ErrClosed) {
			errs = append(errs, fmt.Errorf("cleaning up: %w", err))
		}
	}
}

func (c *cleanups) run() error { return c.runUntil(0) }
