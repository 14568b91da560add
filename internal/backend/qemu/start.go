package qemu

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// startPatience bounds a start, in which no guest program takes part.
const startPatience = 45 * time.Second

// Start implements backend.Driver.
func (d *Driver) Start(ctx context.Context, ref backend.Ref) error {
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, startPatience, errors.New("QEMU did not get ready in time"))
	defer cancel()
	h, err := d.load(ref)
	if err != nil {
		return err
	}
	dir := d.dir(ref)
	for {
		lock, err := d.takeShimLock(dir)
		if err != nil {
			return err
		}
		if lock != nil {
			return d.startShim(ctx, h, dir, lock)
		}
		// A shim is there: running, starting, or on its way out.
		st, err := shimClient(dir).status(ctx, true)
		switch {
		case err != nil && ctx.Err() != nil:
			return agentlab.Errorf(agentlab.CodeUnavailable, "starting sandbox %d: %w", ref.VMID, context.Cause(ctx))
		case err == nil && st.State.Phase == phaseRunning:
			return nil
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "starting sandbox %d: %w", ref.VMID, err)
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

// takeShimLock returns nil when a shim holds the lock.
func (d *Driver) takeShimLock(dir string) (*os.File, error) {
	f, err := openLock(filepath.Join(dir, fileShimLock))
	if err != nil {
		return nil, fault(err, "cannot open the shim's lock")
	}
	ok, err := takeLock(f)
	if ok {
		return f, nil
	}
	_ = f.Close()
	if err != nil {
		return nil, fault(err, "cannot take the shim's lock")
	}
	return nil, nil
}

// startShim starts a shim that inherits lock, and waits until its VM runs.
func (d *Driver) startShim(ctx context.Context, h handle, dir string, lock *os.File) error {
	defer func() { _ = lock.Close() }()
	d.at("lock taken")
	cfg, err := d.startConfig(ctx, h)
	if err != nil {
		return err
	}
	// The shim looks again, at what it really runs; here the answer is clear.
	if err := refuseHostMounts(dir, h, cfg, vmArgs(h, cfg, qemuFDs)); err != nil {
		return err
	}
	if err := noteJSON(filepath.Join(dir, fileStart), cfg); err != nil {
		return fault(err, "cannot write %s of sandbox %d", fileStart, h.Spec.VMID)
	}
	d.at("start written")
	stderr, err := os.OpenFile(filepath.Join(dir, fileStderr), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fault(err, "cannot open %s", fileStderr)
	}
	defer func() { _ = stderr.Close() }()
	cmd := exec.Command(d.cfg.Shim[0], append(d.cfg.Shim[1:len(d.cfg.Shim):len(d.cfg.Shim)], dir)...) //nolint:gosec,noctx // configured by us; it outlives this process
	cmd.Dir, cmd.Env = dir, shimEnv()
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = stderr, stderr, []*os.File{lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fault(err, "cannot start the supervisor of sandbox %d", h.Spec.VMID)
	}
	d.at("shim started")
	_ = lock.Close() // from here on the shim's life and the lock are one
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // for as long as it lives, or this process does
		close(ended)
	}()
	err = d.awaitShim(ctx, h, dir, cfg.RunID, ended)
	if err != nil && ctx.Err() != nil {
		// Nobody waits for it any more: leave nothing half started.
		_ = cmd.Process.Kill()
		<-ended
		// That is no crash, and it must not be taken for one. QEMU may take a
		// moment longer to die.
		hctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopPatience)
		defer cancel()
		herr := d.halt(hctx, dir, 0)
		if herr == nil {
			herr = d.settle(dir)
		}
		if herr != nil {
			d.log.Warn("a start that was given up is not settled", "dir", dir, "err", herr)
		}
	}
	return err
}

// shimEnv gives the shim nothing of the daemon's environment that it does not
// need: what is set there for the daemon may be secret.
func shimEnv() []string {
	env := []string{envShimLock + "=3", "GOMAXPROCS=2", "GOGC=50"}
	for _, k := range []string{"PATH", "HOME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR"} {
		if v, ok := os.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	for _, kv := range os.Environ() { // a test's own shim may need its switches
		if strings.HasPrefix(kv, "AGENTLAB_TEST_") || strings.HasPrefix(kv, "GOCOVERDIR=") {
			env = append(env, kv)
		}
	}
	return env
}

// awaitShim waits until the shim's VM runs or the shim has ended.
func (d *Driver) awaitShim(ctx context.Context, h handle, dir, runID string, ended <-chan struct{}) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-ended:
			cancel(errShimEnded)
		case <-ctx.Done():
		}
	}()
	err := poll(ctx, func() (bool, error) {
		st, err := shimClient(dir).status(ctx, true)
		if err != nil || st.State.RunID != runID {
			return false, nil //nolint:nilerr // its socket is not there yet
		}
		return st.State.Phase == phaseRunning, nil
	})
	if err == nil {
		return nil
	}
	select {
	case <-ended:
	default:
		return agentlab.Errorf(agentlab.CodeUnavailable, "starting sandbox %d: %w", h.Spec.VMID, err)
	}
	st, serr := readState(dir)
	if serr == nil && st.RunID == runID && st.Phase == phaseCrashed {
		return agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d: %s", h.Spec.VMID, st.Reason).
			WithHint("see %s", filepath.Join(dir, fileShimLog))
	}
	words, _ := os.ReadFile(filepath.Join(dir, fileStderr))
	if err := probeWrite(dir); err != nil {
		return fault(err, "the supervisor of sandbox %d ended at once", h.Spec.VMID)
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "the supervisor of sandbox %d ended at once%s", h.Spec.VMID, agentlab.OneLine(firstLine(": ", string(words)), maxReason)).
		WithHint("see %s", filepath.Join(dir, fileStderr))
}

var errShimEnded = errors.New("the supervisor ended")

func firstLine(prefix, text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	if line == "" {
		return ""
	}
	return prefix + line
}

// startConfig looks at the host and says what the shim shall run.
func (d *Driver) startConfig(ctx context.Context, h handle) (startConfig, error) {
	if err := d.host.ready(ctx); err != nil {
		return startConfig{}, err
	}
	for _, p := range []string{h.Image.Kernel, h.Image.RootDisk} {
		if _, err := os.Stat(p); err != nil {
			return startConfig{}, imageGone(h, err)
		}
	}
	accel, err := d.host.accel(ctx)
	if err != nil {
		return startConfig{}, err
	}
	initrd, err := d.rd.file(ctx, h.Image.Modules)
	if errors.Is(err, fs.ErrNotExist) && !fileExists(h.Image.Modules) {
		return startConfig{}, imageGone(h, err)
	}
	if err != nil {
		return startConfig{}, asError(err, "cannot make the initrd")
	}
	cfg := startConfig{
		Start: Start{
			Version: handleVersion, RunID: strconv.FormatInt(d.cfg.Now().UnixNano(), 36) + "-" + agentlab.NewUID()[:8],
			PauseBelow: d.cfg.PauseBelow, DialUnix: d.cfg.DialUnix, Reserved: d.cfg.Reserved, UpstreamProxy: d.cfg.UpstreamProxy,
		},
		QEMU: d.host.qemu(), Accel: accel, Initrd: initrd,
	}
	if accel == AccelTCG {
		if cfg.TSCKHz, cfg.TSCFixed, err = d.host.tsc(ctx); err != nil {
			return startConfig{}, err
		}
	}
	return cfg, nil
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
