package supervisor

import (
	"cmp"
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// startPatience limits a start, which does not depend on programs in the
// guest (Dir.StartPatience).
const startPatience = 45 * time.Second

// Start starts a supervisor with its VM, and returns when the VM's CPUs run. It
// succeeds at once if they already run, and waits for a running start or stop. When
// ctx ends nothing is left running, unless the start is Detached.
// program is the command to which Path is appended ("agentlabd vmm"); prepare
// returns the content of start.json.
func (d Dir) Start(ctx context.Context, program []string, prepare func(context.Context) (Config, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, cmp.Or(d.StartPatience, startPatience), errors.New("the VM was not ready in time"))
	defer cancel()
	for {
		lock, err := d.takeLock()
		if err != nil {
			return err
		}
		if lock != nil {
			return d.startSupervisor(ctx, program, prepare, lock)
		}
		// There is a supervisor: running, starting or ending.
		st, err := client(d.Path).status(ctx, waitStarted)
		switch {
		case err != nil && ctx.Err() != nil:
			return agentlab.Errorf(agentlab.CodeUnavailable, "starting sandbox %d: %w", d.VMID, context.Cause(ctx))
		case err == nil && st.State.Suspended:
			return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is suspended", d.VMID).WithHint("continue it with 'agentlab sandbox resume %d'", d.VMID)
		case err == nil && st.State.Phase == phaseRunning:
			return nil
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "starting sandbox %d: %w", d.VMID, err)
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// startSupervisor starts a supervisor that inherits lock, and waits until its
// VM runs.
func (d Dir) startSupervisor(ctx context.Context, program []string, prepare func(context.Context) (Config, error), lock *os.File) error {
	defer func() { _ = lock.Close() }()
	d.at("lock taken")
	cfg, err := prepare(ctx)
	if err != nil {
		return err
	}
	start := cfg.common()
	start.Version, start.RunID = startVersion, strconv.FormatInt(time.Now().UnixNano(), 36)+"-"+agentlab.NewUID()[:8]
	if err := durable.ReplaceJSON(d.file(fileStart), cfg, durable.None); err != nil {
		return fault(err, "cannot write %s of sandbox %d", fileStart, d.VMID)
	}
	d.at("start written")
	stderr, err := os.OpenFile(d.file(fileStderr), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fault(err, "cannot open %s", fileStderr)
	}
	defer func() { _ = stderr.Close() }()
	cmd := exec.Command(program[0], append(program[1:len(program):len(program)], d.Path)...) //nolint:noctx // configured by the driver; it outlives this process
	cmd.Dir, cmd.Env = d.Path, environment()
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = stderr, stderr, []*os.File{lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fault(err, "cannot start the supervisor of sandbox %d", d.VMID)
	}
	d.at("supervisor started")
	_ = lock.Close() // from here on the lock is held as long as the supervisor is alive
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // as long as it or this process is alive
		close(ended)
	}()
	err = d.await(ctx, start.RunID, ended)
	if err != nil && ctx.Err() != nil && !start.Detached {
		_ = cmd.Process.Kill() // the caller has given up: leave nothing partially started
		<-ended
		d.giveUp(ctx)
	}
	return err
}

// giveUp cleans up after a start whose supervisor was killed: the VM's process
// may end a little later. It is not a crash and is not recorded as one.
func (d Dir) giveUp(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopPatience)
	defer cancel()
	err := d.Halt(ctx, 0)
	if err == nil {
		err = d.Settle(time.Now())
	}
	if err != nil {
		d.Log.Warn("an abandoned start was not cleaned up", "dir", d.Path, "err", err)
	}
}

// environment returns the part of the daemon's environment that a supervisor
// needs: the rest may be secret.
func environment() []string {
	env := []string{envLock + "=3", "GOMAXPROCS=2", "GOGC=50"}
	for _, k := range []string{"PATH", "HOME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR"} {
		if v, ok := os.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	return env
}

var errEnded = errors.New("the supervisor ended")

// await waits until the supervisor's VM runs or the supervisor has ended.
func (d Dir) await(ctx context.Context, runID string, ended <-chan struct{}) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-ended:
			cancel(errEnded)
		case <-ctx.Done():
		}
	}()
	err := poll(ctx, func() (bool, error) {
		st, err := client(d.Path).status(ctx, waitStarted)
		if err != nil || st.State.RunID != runID {
			return false, nil //nolint:nilerr // its socket does not exist yet
		}
		return st.State.Phase == phaseRunning, nil
	})
	if err == nil {
		return nil
	}
	select {
	case <-ended:
	default:
		return agentlab.Errorf(agentlab.CodeUnavailable, "starting sandbox %d: %w", d.VMID, err)
	}
	st, serr := readState(d.Path)
	if serr == nil && st.RunID == runID && st.Phase == phaseCrashed {
		return agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d: %s", d.VMID, st.Reason).WithHint("see %s", d.file(fileLog))
	}
	if err := fsfault.ProbeWrite(d.Path); err != nil {
		return fault(err, "the supervisor of sandbox %d ended at once", d.VMID)
	}
	text, _ := os.ReadFile(d.file(fileStderr))
	line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	return agentlab.Errorf(agentlab.CodeUnavailable, "the supervisor of sandbox %d ended immediately: %s", d.VMID, agentlab.Reason(line)).
		WithHint("see %s", d.file(fileStderr))
}
