package qemu

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// templates are guests that have booted and have no identity: each one is a
// directory with a memory, the state of the devices and a disk. A sandbox with
// the same machine starts as a copy of one, which takes a small part of the time
// of a boot. They are a cache: one is made in the background after a sandbox had
// to boot, the ones that were not used for the longest time are removed, and each
// may be removed at any time.
type templates struct {
	d   *Driver
	dir string
	max int64 // bytes of all templates; 0: there are none

	ctx  context.Context // ends with the driver
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu     sync.Mutex
	making map[string]bool // by key
}

// makingPrefix marks the directory of a template that is being made. Its VM ends
// when the driver's process that makes it ends, or at its deadline.
const makingPrefix = ".making-"

// fileTemplateLock is held by the process that makes a template: one is made at a
// time.
const fileTemplateLock = ".lock"

const (
	// templatePatience limits the boot of a template's guest.
	templatePatience = 10 * time.Minute
	// templatePause is the time between two looks at a booting guest.
	templatePause = 200 * time.Millisecond
	// bootedUptime is when a guest whose init does not report its state counts as
	// booted.
	bootedUptime = 20 * time.Second
)

func newTemplates(d *Driver, dir string, most int64) *templates {
	t := &templates{d: d, dir: dir, max: most, making: map[string]bool{}}
	t.ctx, t.stop = context.WithCancel(context.Background())
	return t
}

// close ends the making of a template and waits for it.
func (t *templates) close() {
	t.stop()
	t.wg.Wait()
}

// find returns the directory of the template with a key, and records its use. It
// is "" if there is none.
func (t *templates) find(key string) string {
	dir := filepath.Join(t.dir, key)
	if s, err := readMemory(dir); err != nil || s.Machine != key {
		return ""
	}
	now := time.Now()
	_ = os.Chtimes(dir, now, now)
	return dir
}

// want makes a template for the machine of h in the background, unless there is
// one already.
func (t *templates) want(h handle, cfg startConfig) {
	if t.max == 0 || t.find(cfg.Machine) != "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.making[cfg.Machine] || t.ctx.Err() != nil {
		return
	}
	t.making[cfg.Machine] = true
	t.wg.Go(func() {
		err := t.make(t.ctx, h, cfg)
		t.mu.Lock()
		delete(t.making, cfg.Machine)
		t.mu.Unlock()
		if err != nil && t.ctx.Err() == nil {
			t.d.log.Warn("no template was made; sandboxes boot instead", "image", h.Image.Ref, "err", err)
		}
	})
}

// warm makes a template for sandboxes like spec now, unless there is one.
func (d *Driver) warm(ctx context.Context, spec backend.Spec) error {
	if err := d.Validate(spec); err != nil {
		return err
	}
	img, err := d.cfg.Images(ctx, spec.Image)
	if err != nil {
		return asError(err, "cannot find image %s", spec.Image)
	}
	h := handle{Spec: spec, Image: img}
	cfg, err := d.startConfig(ctx, h)
	if err != nil {
		return err
	}
	return d.tmpl.make(ctx, h, cfg)
}

// make boots a guest without identity, and saves it as a template.
func (t *templates) make(ctx context.Context, h handle, cfg startConfig) (err error) {
	if err := os.MkdirAll(t.dir, 0o700); err != nil {
		return fault(err, "cannot create %s", t.dir)
	}
	l, err := lock.Acquire(ctx, filepath.Join(t.dir, fileTemplateLock))
	if err != nil {
		return asError(err, "waiting for another template")
	}
	defer func() { _ = l.Unlock() }()
	if t.find(cfg.Machine) != "" {
		return nil
	}
	began := time.Now()
	dir := filepath.Join(t.dir, makingPrefix+cfg.Machine)
	if err := t.discard(dir); err != nil {
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
	if err := t.settle(ctx, dir); err != nil {
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
	return t.trim(cfg.Machine)
}

func (t *templates) supervised(dir string) supervisor.Dir {
	return supervisor.Dir{Path: dir, Process: processName, Log: t.d.log, At: t.d.at}
}

// boot starts the template's guest: without network, and with the smallest disk.
func (t *templates) boot(ctx context.Context, dir string, h handle, cfg startConfig) error {
	spec := backend.Spec{UID: agentlab.NewUID(), Name: "template", Image: h.Spec.Image, Resources: h.Spec.Resources, Network: agentlab.Network{Mode: agentlab.NetworkOff}}
	spec.Resources.RootSizeGB = 0
	h = handle{Version: handleVersion, Spec: spec, Image: h.Image, Created: time.Now().UTC()}
	if err := durable.ReplaceJSON(filepath.Join(dir, fileConfig), h, durable.None); err != nil {
		return fault(err, "cannot write %s", fileConfig)
	}
	if err := t.d.makeDisk(ctx, dir, h); err != nil {
		return err
	}
	cfg.Load, cfg.Background = false, true
	s := t.supervised(dir)
	if err := s.Start(ctx, t.d.cfg.Supervisor, func(context.Context) (supervisor.Config, error) { return &cfg, nil }); err != nil {
		return err
	}
	return s.SetDeadline(ctx, backend.Deadline{Lease: time.Now(), Left: templatePatience + time.Minute})
}

// settle waits until the guest's init has started everything.
func (t *templates) settle(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, templatePatience, errors.New("the template's guest did not finish its boot in time"))
	defer cancel()
	c := control.New(t.supervised(dir).DialControl)
	for {
		h, err := c.Health(ctx)
		if err == nil && (h.System == "running" || h.System == "degraded" || h.System == "unknown" && h.Uptime > bootedUptime) {
			return nil
		}
		select {
		case <-time.After(templatePause):
		case <-ctx.Done():
			return agentlab.Errorf(agentlab.CodeUnavailable, "waiting for the template's guest: %w", errors.Join(context.Cause(ctx), err))
		}
	}
}

// publish makes the directory of a saved guest the template.
func (t *templates) publish(ctx context.Context, dir string, cfg startConfig) error {
	saved, err := readMemory(dir)
	if err != nil {
		return asError(err, "cannot read %s", fileMemoryState)
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
		case fileMemory, fileDevices, fileMemoryState, fileRoot, supervisor.FileConsole:
		default:
			if layerName.MatchString(e.Name()) {
				continue
			}
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return fault(err, "cannot remove %s", e.Name())
			}
		}
	}
	to := filepath.Join(t.dir, saved.Machine)
	if err := os.Rename(dir, to); err != nil {
		return fault(err, "cannot rename %s", dir)
	}
	return nil
}

// discard removes the directory of a template that is being made, and ends its
// VM.
func (t *templates) discard(dir string) error {
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := t.supervised(dir).Halt(context.WithoutCancel(t.ctx), 0); err != nil {
		return asError(err, "ending the VM of a template")
	}
	return empty(dir)
}

// sweep removes what a killed process has left of templates.
func (t *templates) sweep() error {
	if _, err := os.Lstat(t.dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	l, err := lock.Try(filepath.Join(t.dir, fileTemplateLock))
	if agentlab.CodeOf(err) == agentlab.CodeBusy {
		return nil // it is alive
	}
	if err != nil {
		return asError(err, "cannot lock %s", t.dir)
	}
	defer func() { _ = l.Unlock() }()
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return fault(err, "cannot read %s", t.dir)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), makingPrefix) {
			if err := t.discard(filepath.Join(t.dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// trim removes the templates that were not used for the longest time, until all
// of them have at most max bytes. The one with the key stays.
func (t *templates) trim(key string) error {
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return fault(err, "cannot read %s", t.dir)
	}
	type kept struct {
		dir   string
		used  time.Time
		bytes int64
	}
	var all []kept
	var total int64
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		k := kept{filepath.Join(t.dir, e.Name()), info.ModTime(), 0}
		if k.bytes, err = occupiedBy(k.dir); err != nil {
			return fault(err, "cannot check %s", k.dir)
		}
		total += k.bytes
		if e.Name() != key {
			all = append(all, k)
		}
	}
	slices.SortFunc(all, func(a, b kept) int { return a.used.Compare(b.used) })
	for _, k := range all {
		if total <= t.max {
			break
		}
		if err := t.remove(k.dir); err != nil {
			return err
		}
		total -= k.bytes
	}
	return nil
}

// remove removes a template. A sandbox that is being created from it has links to
// its files already, or boots.
func (t *templates) remove(dir string) error {
	trash := filepath.Join(t.dir, makingPrefix+cmp.Or(filepath.Base(dir), "removed")+".trash")
	if err := os.Rename(dir, trash); err != nil {
		return fault(err, "cannot remove %s", dir)
	}
	return empty(trash)
}

// occupiedBy returns how many bytes the files in dir occupy on the disk.
func occupiedBy(dir string) (int64, error) {
	var sum int64
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		n, err := blocksOf(path)
		sum += n
		return err
	})
	return sum, err
}

// copyTemplate gives a new sandbox's directory the memory, the devices, the
// console output and last the disk of a template, with a size in bytes.
func (d *Driver) copyTemplate(ctx context.Context, from, to, qemuImg string, size int64) error {
	saved, err := readMemory(from)
	if err != nil {
		return err
	}
	layers, err := layersIn(from)
	if err != nil {
		return err
	}
	if err := linkFiles(from, to, append(layers, fileMemory, fileDevices)...); err != nil {
		return err
	}
	saved.Boot = supervisor.BootID()
	if err := durable.ReplaceJSON(filepath.Join(to, fileMemoryState), saved, durable.None); err != nil {
		return err
	}
	if err := copyFile(filepath.Join(from, supervisor.FileConsole), filepath.Join(to, supervisor.FileConsole)); err != nil {
		return err
	}
	root := filepath.Join(to, fileRoot)
	if err := copyFile(filepath.Join(from, fileRoot), root+tmpSuffix); err != nil {
		return err
	}
	if size != saved.DiskSize {
		if err := runQEMUImg(ctx, qemuImg, to, "resize", "-q", fileRoot+tmpSuffix, strconv.FormatInt(size, 10)); err != nil {
			return err
		}
	}
	d.at("disk not named")
	return os.Rename(root+tmpSuffix, root)
}

// copyFile copies a small file.
func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
