package runner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// runAgent runs the agent to its end, or waits for an agent that an earlier
// runner started.
func (r *Runner) runAgent(ctx context.Context, rp repo) (outcome, error) {
	out := outcome{Phase: "agent"}
	if !r.dir.has(agentcmd.ExitFile) {
		if stop := r.control.stopRequest(); stop.Status != "" && !r.dir.has(agentcmd.StartedFile) {
			return stopOutcome(out, stop), nil
		}
		if err := r.startAgent(rp); err != nil {
			return out, fmt.Errorf("the agent cannot be started: %w", err)
		}
	}
	ended := r.agentEnd()
	select {
	case <-ended:
	case <-r.control.stopped:
		r.stopAgent(ctx, ended)
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return out, ctx.Err()
	}
	return r.agentOutcome(out, r.control.stopRequest())
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

// agentOutcome returns how the agent ended. A stop that was requested is the
// reason only if the agent was asked to stop before it ended, or lost its
// supervisor, so that its end is unknown.
func (r *Runner) agentOutcome(out outcome, stop stopRequest) (outcome, error) {
	var exit agentcmd.Exit
	ok, err := r.dir.load(agentcmd.ExitFile, &exit)
	if err != nil {
		return out, err
	}
	out.Ended = time.Now().UTC()
	if ok {
		out.ExitCode = &exit.Code
	}
	switch {
	case stop.Status != "" && (exit.Stopped || !ok):
		return stopOutcome(out, stop), nil
	case !ok:
		r.killLost()
		out.Status, out.Message = "FAILED", "the agent's supervisor was killed, and the agent with it"
	case exit.Error != "":
		out.Status, out.Message = "FAILED", exit.Error
	case exit.Code > 128 && exit.Code <= 128+64:
		out.Status, out.Message = "FAILED", fmt.Sprintf("the agent was killed by signal %d (%s)", exit.Code-128, syscall.Signal(exit.Code-128))
	case exit.Code != 0:
		out.Status, out.Message = "FAILED", fmt.Sprintf("the agent exited with code %d", exit.Code)
	default:
		out.Status = "COMPLETED"
	}
	return out, nil
}

// startAgent starts the supervisor, unless it was started before.
func (r *Runner) startAgent(rp repo) error {
	lockFile, err := os.OpenFile(r.dir.path(agentcmd.LockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = lockFile.Close() }()
	if ok, err := lock.TryFile(lockFile); err != nil || !ok || r.dir.has(agentcmd.StartedFile) {
		return err
	}
	if err := os.WriteFile(r.dir.path(fileTask), []byte(r.job.Task), 0o600); err != nil {
		return err
	}
	plan := agentcmd.Plan{
		Agent: r.job.Agent, TaskFile: r.dir.path(fileTask), Dir: rp.Path, Env: r.agentEnv(rp), Secrets: r.secrets,
		LogFile: r.dir.path(fileLog), LogBytes: maxAgentLog, Grace: r.cfg.Timing.Grace,
	}
	if in := r.job.Inner; in != nil {
		if in.Kind != "bubblewrap" {
			return fmt.Errorf("the inner sandbox %q is not known to this agent-runner", in.Kind)
		}
		plan.Inner = &agentcmd.Inner{Args: in.Args, RunDir: string(r.dir)}
	}
	if err := r.dir.save(agentcmd.PlanFile, plan); err != nil {
		return err
	}
	stderr, err := os.OpenFile(r.dir.path("supervisor.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = stderr.Close() }()
	cmd := &exec.Cmd{
		Path: r.cfg.Exe, Args: []string{"agentlab-agent", "supervise", string(r.dir)}, Env: os.Environ(), Dir: "/",
		Stderr: stderr, ExtraFiles: []*os.File{lockFile}, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	r.supervisor = cmd.Process
	go func() { _ = cmd.Wait() }() // the lock shows its end; this only reaps it
	return nil
}

// agentEnd returns a channel that is closed when no supervisor is alive.
func (r *Runner) agentEnd() <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f, err := os.Open(r.dir.path(agentcmd.LockFile))
		if err != nil {
			return
		}
		defer func() { _ = f.Close() }()
		for errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH), unix.EINTR) {
		}
	}()
	return ended
}

// stopAgent asks the supervisor to end the agent, and kills both if it does
// not.
func (r *Runner) stopAgent(ctx context.Context, ended <-chan struct{}) {
	if pid := r.supervisorPID(ctx, ended); pid > 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM)
	}
	select {
	case <-ended:
		return
	case <-ctx.Done():
		return
	case <-time.After(r.cfg.Timing.Grace + 10*time.Second):
	}
	r.log.Error("the supervisor did not end the agent in time")
	var st agentcmd.Started
	if ok, _ := r.dir.load(agentcmd.StartedFile, &st); ok {
		_ = syscall.Kill(st.Supervisor, syscall.SIGKILL)
		r.killLost()
	}
	select {
	case <-ended:
	case <-ctx.Done():
	}
}

// supervisorPID waits for the supervisor's PID, which is valid while the
// supervisor's lock is held.
func (r *Runner) supervisorPID(ctx context.Context, ended <-chan struct{}) int {
	if r.supervisor != nil {
		return r.supervisor.Pid
	}
	for {
		var st agentcmd.Started
		if ok, _ := r.dir.load(agentcmd.StartedFile, &st); ok {
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

// killLost kills an agent whose supervisor has died.
func (r *Runner) killLost() {
	var st agentcmd.Started
	if ok, _ := r.dir.load(agentcmd.StartedFile, &st); !ok {
		return
	}
	if start, ok := agentcmd.ProcStart(st.PID); ok && start == st.StartTime {
		_ = syscall.Kill(-st.PID, syscall.SIGKILL)
	}
}

// agentEnv returns the environment of the agent.
func (r *Runner) agentEnv(rp repo) []string {
	env := map[string]string{}
	for _, name := range []string{"PATH", "LANG", "TZ", "XDG_RUNTIME_DIR"} {
		if v := os.Getenv(name); v != "" {
			env[name] = v
		}
	}
	env["HOME"], env["SHELL"] = r.cfg.Home, "/bin/bash"
	for _, name := range []string{"USER", "LOGNAME"} {
		env[name] = "agent"
		if v := os.Getenv("USER"); v != "" {
			env[name] = v
		}
	}
	maps.Copy(env, r.agentVars())
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
