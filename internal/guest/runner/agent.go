package runner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/guest/msgcmd"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// program is a program of the job that runs under a supervisor, which
// continues without the runner: the agent, or a command of the repository.
type program struct {
	r          *Runner
	name       string // in messages
	dir        dir    // of the supervisor's files
	agent      string // one of package agentcmd
	task       string
	env        []string
	logBytes   int64         // size at which the job's log is closed for it
	limit      time.Duration // uptime at which it is stopped; 0: the job's limit only
	overtime   string        // the message if it was stopped at its limit
	vm         bool          // it runs in the VM itself, not in a nested sandbox or container
	late       bool          // it was asked to stop at its limit
	supervisor *os.Process   // if this process started it
}

// runAgent runs the agent to its end, or waits for an agent that an earlier
// runner started.
func (r *Runner) runAgent(ctx context.Context, rp repo) (outcome, error) {
	p := &program{
		r: r, name: "the agent", dir: r.dir, agent: r.job.Agent, task: r.job.Task, env: r.agentEnv(rp), logBytes: maxAgentLog,
	}
	out, err := p.run(ctx, rp, "agent")
	r.noteKills()
	return out, err
}

// run runs the program to its end, or waits for one that an earlier runner
// started.
func (p *program) run(ctx context.Context, rp repo, phase string) (outcome, error) {
	out := outcome{Phase: phase}
	if !p.dir.has(agentcmd.ExitFile) {
		if stop := p.r.control.stopRequest(); stop.Status != "" && !p.dir.has(agentcmd.StartedFile) {
			return stopOutcome(out, stop), nil
		}
		if err := p.start(rp); err != nil {
			return out, fmt.Errorf("%s cannot be started: %w", p.name, err)
		}
	}
	var limit <-chan time.Time
	if p.limit > 0 {
		limit = time.After(p.limit - hostos.SinceBoot())
	}
	ended := p.end()
	select {
	case <-ended:
	case <-p.r.control.stopped:
		p.stop(ctx, ended)
	case <-limit:
		p.late = true
		p.stop(ctx, ended)
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return out, ctx.Err()
	}
	return p.outcome(out, p.r.control.stopRequest())
}

// stopOutcome returns out as the outcome of a job that was stopped, with the
// controller's reason.
func stopOutcome(out outcome, stop stopRequest) outcome {
	out.Status, out.Message = stop.Status, stop.Reason
	switch {
	case stop.Reason != "":
	case stop.Status == "TIMEOUT":
		out.Message = "the time of the job is over"
	default:
		out.Message = "the job was cancelled"
	}
	return out
}

// outcome returns how the program ended. A stop that was requested is the
// reason only if the program was asked to stop before it ended, or lost its
// supervisor, so that its end is unknown.
func (p *program) outcome(out outcome, stop stopRequest) (outcome, error) {
	var exit agentcmd.Exit
	ok, err := p.dir.load(agentcmd.ExitFile, &exit)
	if err != nil {
		return out, err
	}
	out.Ended = time.Now().UTC()
	if ok {
		out.ExitCode, out.KeyRejected = &exit.Code, exit.KeyRejected
	}
	switch {
	case stop.Status != "" && (exit.Stopped || !ok):
		return stopOutcome(out, stop), nil
	case !ok:
		p.killLost()
		out.Status, out.Message = "FAILED", p.name+"'s supervisor was killed, and "+p.name+" with it"
		if p.late { // by the request to stop, before it could handle it
			out.Message = p.overtime
		}
	case exit.Stopped && p.overtime != "":
		out.Status, out.Message = "FAILED", p.overtime
	case exit.Error != "":
		out.Status, out.Message = "FAILED", exit.Error
	case exit.Code > 128 && exit.Code <= 128+64:
		out.Status, out.Message = "FAILED", fmt.Sprintf("%s was killed by signal %d (%s)", p.name, exit.Code-128, syscall.Signal(exit.Code-128))+p.r.killsText(exit.Code)
	case exit.Code != 0:
		out.Status, out.Message = "FAILED", fmt.Sprintf("%s exited with code %d", p.name, exit.Code)
	default:
		out.Status = "COMPLETED"
	}
	return out, nil
}

// start starts the supervisor, unless it was started before.
func (p *program) start(rp repo) error {
	r := p.r
	lockFile, err := os.OpenFile(p.dir.path(agentcmd.LockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = lockFile.Close() }()
	if ok, err := lock.TryFile(lockFile); err != nil || !ok || p.dir.has(agentcmd.StartedFile) {
		return err
	}
	if err := os.WriteFile(p.dir.path(fileTask), []byte(p.task), 0o600); err != nil {
		return err
	}
	plan := agentcmd.Plan{
		Agent: p.agent, TaskFile: p.dir.path(fileTask), Dir: rp.Path, Env: p.env, Secrets: r.secrets,
		LogFile: r.dir.path(fileLog), LogBytes: p.logBytes, Grace: r.cfg.Timing.Grace,
	}
	if in := r.job.Inner; in != nil && !p.vm {
		if in.Kind != "bubblewrap" {
			return fmt.Errorf("the inner sandbox %q is not known to this agent-runner", in.Kind)
		}
		plan.Inner = &agentcmd.Inner{Args: in.Args, RunDir: string(r.dir)}
		if r.resp.Workspace {
			plan.Inner.Writable = []string{filepath.Join(r.cfg.Workspace, workspaceCache)}
		}
	}
	if !p.vm {
		var e agentcmd.Environment
		if _, err := r.dir.load(fileContainer, &e); err != nil {
			return err
		}
		plan.Container = e.Container
	}
	if err := p.dir.save(agentcmd.PlanFile, plan); err != nil {
		return err
	}
	stderr, err := os.OpenFile(p.dir.path("supervisor.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = stderr.Close() }()
	cmd := &exec.Cmd{
		Path: r.cfg.Exe, Args: []string{"agentlab-agent", "supervise", string(p.dir)}, Env: os.Environ(), Dir: "/",
		Stderr: stderr, ExtraFiles: []*os.File{lockFile}, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.supervisor = cmd.Process
	go func() { _ = cmd.Wait() }() // the lock shows its end; this only reaps it
	return nil
}

// end returns a channel that is closed when no supervisor is alive.
func (p *program) end() <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f, err := os.Open(p.dir.path(agentcmd.LockFile))
		if err != nil {
			return
		}
		defer func() { _ = f.Close() }()
		for errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH), unix.EINTR) {
		}
	}()
	return ended
}

// stop asks the supervisor to end the program, and kills both if it does not.
func (p *program) stop(ctx context.Context, ended <-chan struct{}) {
	if pid := p.supervisorPID(ctx, ended); pid > 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM)
	}
	select {
	case <-ended:
		return
	case <-ctx.Done():
		return
	case <-time.After(p.r.cfg.Timing.Grace + 10*time.Second):
	}
	p.r.log.Error("the supervisor did not end its program in time", "program", p.name)
	var st agentcmd.Started
	if ok, _ := p.dir.load(agentcmd.StartedFile, &st); ok {
		_ = syscall.Kill(st.Supervisor, syscall.SIGKILL)
		p.killLost()
	}
	select {
	case <-ended:
	case <-ctx.Done():
	}
}

// supervisorPID waits for the supervisor's PID, which is valid while the
// supervisor's lock is held.
func (p *program) supervisorPID(ctx context.Context, ended <-chan struct{}) int {
	if p.supervisor != nil {
		return p.supervisor.Pid
	}
	for {
		var st agentcmd.Started
		if ok, _ := p.dir.load(agentcmd.StartedFile, &st); ok {
			return st.Supervisor
		}
		select {
		case <-ended:
			return 0
		case <-ctx.Done():
			return 0
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// killLost kills a program whose supervisor has died.
func (p *program) killLost() {
	var st agentcmd.Started
	if ok, _ := p.dir.load(agentcmd.StartedFile, &st); !ok {
		return
	}
	if start, err := hostos.ProcStart(st.PID); err == nil && start == st.StartTime {
		_ = syscall.Kill(-st.PID, syscall.SIGKILL)
	}
}

// agentEnv returns the environment of the agent, which has the secrets.
func (r *Runner) agentEnv(rp repo) []string { return r.programEnv(rp, r.agentVars()) }

// programEnv returns the environment of a program of the job, with vars.
func (r *Runner) programEnv(rp repo, vars map[string]string) []string {
	env := map[string]string{}
	for _, name := range []string{"PATH", "LANG", "TZ", "XDG_RUNTIME_DIR"} {
		if v := os.Getenv(name); v != "" {
			env[name] = v
		}
	}
	env["PATH"] = strings.TrimPrefix(env["PATH"]+":"+r.dir.path(dirMessages), ":")
	env[msgcmd.DirEnv] = r.dir.path(dirMessages)
	env["HOME"], env["SHELL"] = r.cfg.Home, "/bin/bash"
	for _, name := range []string{"USER", "LOGNAME"} {
		env[name] = "agent"
		if v := os.Getenv("USER"); v != "" {
			env[name] = v
		}
	}
	maps.Copy(env, vars)
	env["AGENTLAB_JOB_ID"], env["AGENTLAB_REPO"] = r.job.ID, rp.Path
	if !rp.None {
		env["AGENTLAB_BRANCH"], env["AGENTLAB_BASE_COMMIT"] = rp.Branch, rp.Base
	}
	var out []string
	for k, v := range env {
		out = append(out, k+"="+v)
	}
	slices.Sort(out)
	return out
}
