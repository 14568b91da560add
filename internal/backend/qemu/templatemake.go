package qemu

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

const (
	// templatePatience limits the time without progress of the boot of a template's
	// guest, and the wait for sandboxes that boot.
	templatePatience = 10 * time.Minute
	// templateBoot limits the boot of a guest that makes progress all the time.
	templateBoot = time.Hour
	// templatePause is the time between two looks at a booting guest.
	templatePause = 200 * time.Millisecond
	// templateQuiet is how long the guest runs on after it was prepared: the kernel
	// defers work, such as the announcement of multicast groups, that each copy would
	// do otherwise.
	templateQuiet = 3 * time.Second
	// templateStartPatience limits the start of a template's VM. On a busy host it
	// gets little time of the processor, because its priority is the lowest.
	templateStartPatience = 5 * time.Minute
	// templateRetry is how long no template of a kind is made after the first failure.
	// The time doubles with each further one, up to maxTemplateRetry.
	templateRetry    = time.Minute
	maxTemplateRetry = 10 * time.Minute
	// identityPatience is the time after which a guest without an identity is asked
	// whether it answers.
	identityPatience = time.Minute
	// answerPatience limits the wait for the answer of a guest that was started from
	// a template.
	answerPatience = 3 * time.Minute
	// bootedUptime is when a guest whose init does not report its state counts as
	// booted.
	bootedUptime = 20 * time.Second
)

// want makes a template for the machine of a sandbox that boots, in the
// background, unless there is one already. It starts when no sandbox boots, so
// that it makes no boot slower.
func (t *templates) want(f found, cfg startConfig) {
	if t.max == 0 || t.find(cfg.Key) != "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ctx.Err() != nil {
		return
	}
	t.booting[f.UID] = t.d.supervised(f)
	if last, ok := t.failed[cfg.Key]; t.making[cfg.Key] || ok && time.Since(last.at) < last.pause() {
		return
	}
	t.making[cfg.Key] = true
	t.wg.Go(func() {
		t.awaitBoots()
		cfg.Background = true
		err := t.make(t.ctx, f.Handle, cfg)
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.making, cfg.Key)
		if err != nil && t.ctx.Err() == nil {
			t.d.log.Warn("no template was made; sandboxes boot instead", "image", f.Image.Ref, "err", err)
		}
	})
}

// awaitBoots waits until no sandbox boots, for a limited time.
func (t *templates) awaitBoots() {
	ctx, cancel := context.WithTimeout(t.ctx, templatePatience)
	defer cancel()
	for {
		t.mu.Lock()
		waiting := maps.Clone(t.booting)
		t.mu.Unlock()
		left := len(waiting)
		for uid, dir := range waiting {
			if ctx.Err() != nil || settled(ctx, dir) {
				t.mu.Lock()
				delete(t.booting, uid)
				t.mu.Unlock()
				left--
			}
		}
		if left == 0 {
			return
		}
		select {
		case <-time.After(templatePause):
		case <-ctx.Done():
		}
	}
}

// settled reports whether a sandbox that was started has finished its boot and
// has its identity, or does not run.
func settled(ctx context.Context, dir supervisor.Dir) bool {
	var in backend.Instance
	if err := dir.Power(&in); err != nil || in.Power != backend.PowerRunning {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, 5*templatePause)
	defer cancel()
	h, err := control.New(dir.DialControl).Health(ctx)
	return err == nil && h.Identity != "" && booted(h)
}

// booted reports whether a guest's init has started everything.
func booted(h guestapi.Health) bool {
	return h.System == "running" || h.System == "degraded" || h.System == "unknown" && h.Uptime > bootedUptime
}

// make boots a guest without identity, and saves it as a template, unless there
// is one.
func (t *templates) make(ctx context.Context, h handle, cfg startConfig) (err error) {
	if err := os.MkdirAll(t.dir, 0o700); err != nil {
		return fault(err, "cannot create %s", t.dir)
	}
	l, err := lock.Acquire(ctx, filepath.Join(t.dir, fileTemplateLock))
	if err != nil {
		return vmdir.AsError(err, "waiting for another template")
	}
	defer func() { _ = l.Unlock() }()
	if t.find(cfg.Key) != "" {
		return nil
	}
	defer func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		last := t.failed[cfg.Key]
		delete(t.failed, cfg.Key)
		if err != nil && ctx.Err() == nil {
			t.failed[cfg.Key] = failure{time.Now(), h.Image.Ref, err, last.times + 1}
		}
	}()
	t.d.at("template begun")
	began := time.Now()
	dir := filepath.Join(t.dir, makingPrefix+cfg.Key)
	if err := errors.Join(t.discard(dir), qemuvm.Room(h.Spec.Resources, t.dir, t.d.cfg.PauseBelow)); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fault(err, "cannot create %s", dir)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.discard(dir))
		}
	}()
	if err := t.boot(ctx, dir, h, cfg); err != nil {
		return err
	}
	t.d.at("template booted")
	if err := t.settle(ctx, dir, cfg.Nested); err != nil {
		return err
	}
	t.d.at("template settled")
	if err := t.supervised(dir).Save(ctx, supervisor.SaveTo{Dir: dir}); err != nil {
		return err
	}
	t.d.at("template saved")
	if err := t.publish(ctx, dir, cfg); err != nil {
		return err
	}
	t.d.log.Info("a template was made", "image", h.Image.Ref, "cores", h.Spec.Resources.Cores, "memory_mb", h.Spec.Resources.MemoryMB,
		"took", time.Since(began).Round(time.Millisecond).String())
	return t.trim(ctx, cfg.Key)
}

func (t *templates) supervised(dir string) supervisor.Dir {
	return supervisor.Dir{Path: dir, Process: processName, Log: t.d.log, At: t.d.at, StartPatience: templateStartPatience}
}

// boot starts the template's guest: without network, and with the smallest disk.
func (t *templates) boot(ctx context.Context, dir string, h handle, cfg startConfig) error {
	spec := backend.Spec{UID: agentlab.NewUID(), Name: "template", Image: h.Spec.Image, Resources: h.Spec.Resources, Network: agentlab.Network{Mode: agentlab.NetworkOff}}
	spec.Resources.RootSizeGB = 0
	h = handle{Version: vmdir.Version, Spec: spec, Image: h.Image, Created: time.Now().UTC()}
	if err := durable.ReplaceJSON(filepath.Join(dir, vmdir.FileConfig), h, durable.None); err != nil {
		return fault(err, "cannot write %s", vmdir.FileConfig)
	}
	if err := t.d.makeDisk(ctx, dir, h); err != nil {
		return err
	}
	cfg.Load = false
	s := t.supervised(dir)
	if err := s.SetDeadline(ctx, backend.Deadline{Lease: time.Now(), Left: 2 * templateBoot}); err != nil {
		return err
	}
	err := s.Start(ctx, t.d.cfg.Supervisor, func(context.Context) (supervisor.Config, error) { return &cfg, nil })
	if err != nil { // the files that its hint names are removed
		return agentlab.Errorf(agentlab.CodeOf(err), "the template's VM did not start: %w", err).
			WithHint("sandboxes boot without it, and it is tried again later; if the host is busy, use 'agentlab image warm' when it is not")
	}
	return nil
}

// settle waits until the guest's init has started everything, and prepares the
// guest.
func (t *templates) settle(ctx context.Context, dir string, nested bool) error {
	vm := t.supervised(dir)
	c := control.New(vm.DialControl)
	for w := newBootWatch(time.Now()); ; {
		h, err := c.Health(ctx)
		if err == nil && booted(h) {
			break
		}
		var in backend.Instance
		if err != nil && vm.Power(&in) == nil && in.Power != backend.PowerRunning {
			return templateEnded(in)
		}
		if err := w.look(time.Now(), consoleSize(dir), h.System, err); err != nil {
			return err
		}
		select {
		case <-time.After(templatePause):
		case <-ctx.Done():
			return agentlab.Errorf(agentlab.CodeUnavailable, "waiting for the template's guest: %w", context.Cause(ctx))
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, templatePatience, errors.New("the template's guest was not prepared in time"))
	defer cancel()
	if err := patiently(ctx, c.Rehearse); err != nil {
		return err
	}
	err := patiently(ctx, func(ctx context.Context) error {
		return c.Prepare(ctx, guestapi.PrepareRequest{Network: t.d.Info().GuestNetwork, Nested: nested})
	})
	if err != nil {
		return err
	}
	select {
	case <-time.After(templateQuiet):
		return nil
	case <-ctx.Done():
		return agentlab.Errorf(agentlab.CodeUnavailable, "waiting for the template's guest: %w", context.Cause(ctx))
	}
}

// patiently makes a call again while the guest, which has the lowest priority, does not
// answer within the limit of the call.
func patiently(ctx context.Context, call func(context.Context) error) error {
	for {
		if err := call(ctx); ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
	}
}

// bootWatch limits the time in which a guest makes no progress in its boot: on a busy host
// or without KVM, a boot takes many times as long as usual.
type bootWatch struct {
	began, moved time.Time
	console      int64
	system       string
}

func newBootWatch(now time.Time) *bootWatch { return &bootWatch{began: now, moved: now} }

// look returns an error if the guest makes no progress. err is why it does not answer.
func (w *bootWatch) look(now time.Time, console int64, system string, err error) error {
	if console != w.console || system != w.system {
		w.console, w.system, w.moved = console, system, now
	}
	what, limit := "made no progress in its boot for", templatePatience
	if now.Sub(w.moved) <= limit {
		if what, limit = "did not finish its boot in", templateBoot; now.Sub(w.began) <= limit {
			return nil
		}
	}
	last := "its state is " + cmp.Or(system, "not known")
	if err != nil {
		last = "it does not answer: " + agentlab.Reason(err.Error())
	}
	return agentlab.Errorf(agentlab.CodeTimeout, "the template's guest %s %s; %s", what, agentlab.FormatTTL(limit), last).WithHint(templateHint)
}

// templateHint is the hint of errors about the guest of a template.
const templateHint = "sandboxes boot without it, and it is tried again later; or use 'agentlab image warm'"

// templateEnded is the error about the VM of a template that has ended.
func templateEnded(in backend.Instance) error {
	why := cmp.Or(in.Reason, "it was powered off")
	if in.Expired {
		why = "it was powered off after " + agentlab.FormatTTL(2*templateBoot)
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "the template's VM has ended: %s", why).WithHint(templateHint)
}

// consoleSize returns the size of the console log, which grows as a guest boots.
func consoleSize(dir string) int64 {
	st, err := os.Stat(filepath.Join(dir, supervisor.FileConsole))
	if err != nil {
		return 0
	}
	return st.Size()
}

// publish makes the directory of a saved guest the template. Everything is synced
// before: a template that a power cut has damaged would be used again and again.
func (t *templates) publish(ctx context.Context, dir string, cfg startConfig) error {
	saved, err := readMemory(dir)
	if err != nil {
		return vmdir.AsError(err, "cannot read %s", fileMemoryState)
	}
	if _, err := freezeDisk(ctx, cfg.QEMUImg, dir, saved.DiskSize); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fault(err, "cannot read %s", dir)
	}
	for _, e := range entries {
		switch e.Name() {
		case fileMemory, fileDevices, fileMemoryState, vmdir.FileConfig, fileRoot, supervisor.FileConsole:
		default:
			if layerName.MatchString(e.Name()) {
				continue
			}
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return fault(err, "cannot remove %s", e.Name())
			}
		}
	}
	n, err := occupiedBy(dir)
	if err != nil {
		return fault(err, "cannot measure %s", dir)
	}
	if n > t.max {
		return agentlab.Errorf(agentlab.CodeNoSpace, "the template has %d MiB, and all templates may have %d", n>>20, t.max>>20).
			WithHint("increase qemu.template_cache_gb in config.yaml")
	}
	if err := syncFiles(dir); err != nil {
		return fault(err, "cannot sync %s", dir)
	}
	to := filepath.Join(t.dir, saved.Machine)
	if err := os.Rename(dir, to); err != nil {
		return fault(err, "cannot rename %s", dir)
	}
	if err := durable.SyncPath(t.dir); err != nil {
		return fault(err, "cannot sync %s", t.dir)
	}
	return nil
}

// syncFiles syncs the files in dir, and dir.
func syncFiles(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := durable.SyncPath(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return durable.SyncPath(dir)
}

// discard removes the directory of a template that is being made, and ends its
// VM.
func (t *templates) discard(dir string) error {
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := t.supervised(dir).Halt(context.WithoutCancel(t.ctx), 0); err != nil {
		return vmdir.AsError(err, "ending the VM of a template")
	}
	return vmdir.Empty(dir)
}
