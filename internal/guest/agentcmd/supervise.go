package agentcmd

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/guest/devenv"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// The files of a supervised agent, in one directory on a tmpfs.
const (
	PlanFile    = "agent.json"         // Plan, written before the supervisor is started
	LockFile    = "agent.lock"         // locked (flock) exactly while the supervisor is alive
	StartedFile = "agent.started.json" // Started
	ExitFile    = "agent.exit.json"    // Exit; missing if the supervisor was killed
)

// LockFD is the file descriptor of LockFile in a supervisor. Its parent has
// already locked the file, so that the supervisor is never alive without the
// lock.
const LockFD = 3

// Plan describes the work of a supervisor.
type Plan struct {
	Agent    string
	TaskFile string
	Dir      string        // working directory
	Env      []string      // complete environment, without the defaults of agentlab-agent
	Secrets  []string      // values that are redacted from the log
	LogFile  string        // appended to
	LogBytes int64         // size at which the log is closed
	Grace    time.Duration // between SIGTERM and SIGKILL at a stop
	Inner    *Inner        // nil: no nested sandbox

	Container *devenv.Container // nil: in the VM itself
}

// Started identifies the processes that run.
type Started struct {
	Supervisor int
	PID        int    // of the agent, which leads its own process group
	StartTime  uint64 // of the agent, in clock ticks since boot: a PID alone may be another process's
}

// Exit describes how the agent ended.
type Exit struct {
	Code    int    // 128+n if signal n ended it
	Error   string // why it could not be started
	Stopped bool   // the supervisor was asked to stop it before it ended

	KeyRejected bool // it failed, and its log says that the model rejects its key
}

// drainTime is the time to wait for the output of processes that the agent left
// behind, and the time that these have to end.
const drainTime = 2 * time.Second

// Supervise runs the agent that dir's plan describes until it has ended, with
// all that it started. SIGTERM ends the agent's processes: SIGTERM, the
// plan's grace, SIGKILL. It must have been started in a session of its own,
// so that it does not end with another process. It returns its own exit code; the
// agent's is in ExitFile.
func Supervise(dir string) int {
	unix.CloseOnExec(LockFD)
	plan, err := readPlan(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "agentlab-agent: the plan cannot be read:", err)
		return ExitNotRun
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE)
	// The supervisor ends and reaps all processes that the agent leaves
	// behind.
	if err := becomeReaper(); err != nil {
		fmt.Fprintln(os.Stderr, "agentlab-agent: no subreaper:", err)
	}
	log, err := openLog(plan)
	if err != nil {
		fmt.Fprintln(os.Stderr, "agentlab-agent: the log cannot be opened:", err)
		return ExitNotRun
	}
	exit := (&supervisor{dir: dir, plan: plan, log: log, stop: stop}).run()
	log.end()
	if err := durable.ReplaceJSON(filepath.Join(dir, ExitFile), exit, durable.None); err != nil {
		fmt.Fprintln(os.Stderr, "agentlab-agent: the exit status cannot be written:", err)
		return ExitNotRun
	}
	return 0
}

type supervisor struct {
	dir  string
	plan Plan
	log  *logFile
	stop chan os.Signal

	inner bool     // the started process is bwrap, and the agent is its child
	hold  *os.File // its end ends the agent in a container; nil: it is in the VM
}

// exitNotStarted records an agent that could not be started.
func (s *supervisor) exitNotStarted(err error) Exit {
	var b strings.Builder
	code := reportError(&b, err)
	_, _ = s.log.Write([]byte(b.String()))
	return Exit{Code: code, Error: err.Error()}
}

func (s *supervisor) run() Exit {
	c, in, err := s.command()
	if err != nil {
		return s.exitNotStarted(err)
	}
	defer func() { _ = in.Close() }()
	if s.hold != nil {
		defer func() { _ = s.hold.Close() }()
	}
	var box *inner
	if s.plan.Inner != nil {
		if box, err = s.plan.Inner.wrap(&c, s.plan.Dir); err != nil {
			return s.exitNotStarted(err)
		}
		defer func() { _ = box.close() }() // the rest is deleted with the VM
		s.inner = true
	}
	var keys keyWatch
	out, err := newOutput(keys.of(c.agent, s.log), c.agent.render)
	if err != nil {
		return s.exitNotStarted(err)
	}
	p, err := os.StartProcess(c.path, c.argv, &os.ProcAttr{
		Dir: s.plan.Dir, Env: c.env, Files: []*os.File{in, out.stdout, out.stderr},
		Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	out.started()
	if err != nil {
		return s.exitNotStarted(err)
	}
	pid := p.Pid
	_ = p.Release() // wait4 below reaps it
	// When memory is short, the kernel ends the agent before the programs that
	// report it.
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte("500"), 0o600)
	start, _ := hostos.ProcStart(pid)
	if err := durable.ReplaceJSON(filepath.Join(s.dir, StartedFile), Started{Supervisor: os.Getpid(), PID: pid, StartTime: start}, durable.None); err != nil {
		_, _ = fmt.Fprintln(s.log, "agentlab-agent:", err)
	}
	status, stopped := s.wait(pid)
	out.drain(drainTime)
	e := Exit{Code: exitCode(status), Stopped: stopped, Error: s.containedError()}
	e.KeyRejected = e.Code != 0 && keys.rejected.Load()
	return e
}

// command returns the command of the agent and its standard input.
func (s *supervisor) command() (c command, in *os.File, err error) {
	if s.plan.Container != nil {
		return s.containedCommand()
	}
	if c, err = prepare(s.plan.Agent, s.plan.TaskFile, s.plan.Env); err == nil {
		in, err = os.Open(c.stdin)
	}
	return c, in, err
}

// wait reaps until the agent and all that it started have ended. stopped
// reports whether the agent was asked to stop before it ended.
func (s *supervisor) wait(pid int) (status syscall.WaitStatus, stopped bool) {
	ended := make(chan syscall.WaitStatus, 1)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for {
			var st syscall.WaitStatus
			got, err := syscall.Wait4(-1, &st, 0, nil)
			switch {
			case errors.Is(err, syscall.EINTR):
			case err != nil: // no child is left
				return
			case got == pid:
				ended <- st
			}
		}
	}()
	grace := s.plan.Grace
	if s.hold != nil {
		grace += drainTime // the supervisor in the container is faster
	}
	var kill <-chan time.Time
	for {
		select {
		case <-s.stop:
			stopped = true
			s.signalAll(pid, syscall.SIGTERM)
			if kill == nil {
				kill = time.After(grace)
			}
		case <-kill:
			s.signalAll(pid, syscall.SIGKILL)
			kill = time.After(100 * time.Millisecond) // for processes started in the meantime
		case st := <-ended:
			s.killRemaining(pid, gone)
			return st, stopped
		}
	}
}

// killRemaining ends the processes that the agent left behind. Processes that became
// root by sudo cannot be ended and are not waited for.
func (s *supervisor) killRemaining(pid int, gone <-chan struct{}) {
	steps := []struct {
		wait time.Duration
		sig  syscall.Signal
	}{
		{5 * time.Millisecond, syscall.SIGTERM}, // usually there are none, and no time is lost
		{drainTime, syscall.SIGKILL},
		{100 * time.Millisecond, syscall.SIGKILL}, // processes started in the meantime
		{time.Second, 0},
	}
	for _, step := range steps {
		select {
		case <-gone:
			return
		case <-time.After(step.wait):
			s.signalAll(pid, step.sig)
		}
	}
}

// signalAll signals the agent's process group and every descendant of this
// process, in any session. bwrap itself gets only SIGKILL: after SIGTERM it
// would end at once, and the agent with it, without its grace.
func (s *supervisor) signalAll(pgid int, sig syscall.Signal) {
	if s.hold != nil && sig != syscall.SIGKILL {
		_ = s.hold.Close() // a signal would end only the client of Docker
		return
	}
	spare := 0
	if s.inner && sig != syscall.SIGKILL {
		spare = pgid
	} else {
		_ = syscall.Kill(-pgid, sig)
	}
	for _, pid := range descendants(os.Getpid()) {
		if pid != spare {
			_ = syscall.Kill(pid, sig)
		}
	}
}

func descendants(root int) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	children := map[int][]int{}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if f, _ := hostos.ProcStat(pid); len(f) > 1 {
				ppid, _ := strconv.Atoi(f[1])
				children[ppid] = append(children[ppid], pid)
			}
		}
	}
	var out []int
	for queue := []int{root}; len(queue) > 0; queue = queue[1:] {
		out = append(out, children[queue[0]]...)
		queue = append(queue, children[queue[0]]...)
	}
	return out
}

// redactor returns the redactor for the log.
func (p Plan) redactor() *redact.Redactor { return redact.New(p.Secrets...) }
