package qemu

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// templates are guests that have booted and have no identity: each one is a
// directory with a memory, the state of the devices, a disk, and a handle that
// describes it. A sandbox with the same machine starts as a copy of one, which
// takes a small part of the time of a boot. They are a cache: one is made in the
// background after a sandbox had to boot, the ones that were not used for the
// longest time are removed, and each may be removed at any time.
type templates struct {
	d   *Driver
	dir string
	max int64 // bytes of all templates; 0: there are none
	// broken is why there are none although they are configured; it is set when the
	// driver is opened.
	broken error

	ctx  context.Context // ends with the driver
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu      sync.Mutex
	making  map[string]bool           // by key
	booting map[string]supervisor.Dir // sandboxes that boot, by uid
	failed  map[string]failure        // by key
}

// failure is the last failure to make a template.
type failure struct {
	at    time.Time
	image string
	err   error
	times int // of failures without a success between them
}

// pause returns how long no other template of the kind is made after f.
func (f failure) pause() time.Duration {
	return min(templateRetry<<min(f.times-1, 10), maxTemplateRetry)
}

// makingPrefix marks the directory of a template that is being made. Its VM ends
// when the driver's process that makes it ends, or at its deadline.
const makingPrefix = ".making-"

// fileTemplateLock is held by the process that makes a template: one is made at a
// time.
const fileTemplateLock = ".lock"

// templateKey matches the name of a template's directory.
var templateKey = lazyre.New(`^[0-9a-f]{32}$`)

func newTemplates(d *Driver, dir string, most int64) *templates {
	t := &templates{d: d, dir: dir, max: most, making: map[string]bool{}, booting: map[string]supervisor.Dir{}, failed: map[string]failure{}}
	t.ctx, t.stop = context.WithCancel(context.Background())
	return t
}

// disable uses no templates: every sandbox boots.
func (t *templates) disable(why error) {
	t.d.log.Error("templates are not used; sandboxes boot instead", "dir", t.dir, "err", why)
	t.max, t.broken = 0, why
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

// WarmTemplate implements backend.Templates.
func (d *Driver) WarmTemplate(ctx context.Context, spec backend.Spec) (backend.Template, error) {
	if d.tmpl.broken != nil {
		return backend.Template{}, agentlab.Errorf(agentlab.CodeUnavailable, "templates are not used: %w", d.tmpl.broken).
			WithHint("repair or remove %s, and restart the daemon", d.tmpl.dir)
	}
	if d.tmpl.max == 0 {
		return backend.Template{}, agentlab.Errorf(agentlab.CodeUnsupported, "templates are off").
			WithHint("set qemu.template_cache_gb in config.yaml, and restart the daemon")
	}
	if err := d.Validate(spec); err != nil {
		return backend.Template{}, err
	}
	img, err := d.cfg.Images(ctx, spec.Image)
	if err != nil {
		return backend.Template{}, vmdir.AsError(err, "cannot find image %s", spec.Image)
	}
	h := handle{Spec: spec, Image: img}
	cfg, err := d.startConfig(ctx, h)
	if err != nil {
		return backend.Template{}, err
	}
	if err := d.tmpl.make(ctx, h, cfg); err != nil {
		return backend.Template{}, err
	}
	return d.tmpl.read(ctx, cfg.Key)
}

// Templates implements backend.Templates.
func (d *Driver) Templates(ctx context.Context) ([]backend.Template, error) {
	list, err := d.tmpl.list(ctx)
	slices.Reverse(list)
	return list, err
}

// DeleteTemplate implements backend.Templates.
func (d *Driver) DeleteTemplate(_ context.Context, key string) error {
	if !templateKey.MatchString(key) {
		return nil
	}
	return d.tmpl.remove(key)
}

// watch removes a template if a sandbox that was started from it crashes before
// it answers, or does not answer: the template may be damaged.
func (t *templates) watch(f found, key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ctx.Err() != nil {
		return
	}
	t.wg.Go(func() {
		ctx, cancel := context.WithTimeout(t.ctx, answerPatience)
		defer cancel()
		if answered(ctx, t.d.supervised(f)) || t.ctx.Err() != nil {
			return
		}
		t.d.log.Warn("a guest that was started from a template does not answer; the template is removed", "vmid", f.VMID)
		if err := t.remove(key); err != nil {
			t.d.log.Warn("a template was not removed", "err", err)
		}
	})
}

// answered waits until a guest answers. It reports false if the guest crashes
// before, or if ctx ends. A guest that gets its identity is not asked: the first
// answers of an emulated guest are slow, and its user waits for them.
func answered(ctx context.Context, dir supervisor.Dir) bool {
	ictx, cancel := context.WithTimeout(ctx, identityPatience)
	defer cancel()
	if dir.AwaitIdentity(ictx) == nil {
		return true
	}
	for {
		var in backend.Instance
		if err := dir.Power(&in); err != nil || in.Power != backend.PowerRunning {
			return in.Power != backend.PowerCrashed
		}
		hctx, cancel := context.WithTimeout(ctx, 5*templatePause)
		_, err := control.New(dir.DialControl).Health(hctx)
		cancel()
		if err == nil {
			return true
		}
		select {
		case <-time.After(templatePause):
		case <-ctx.Done():
			return false
		}
	}
}

// keys returns the keys of all templates.
func (t *templates) keys() ([]string, error) {
	entries, err := os.ReadDir(t.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fault(err, "cannot read %s", t.dir)
	}
	var keys []string
	for _, e := range entries {
		if templateKey.MatchString(e.Name()) {
			keys = append(keys, e.Name())
		}
	}
	return keys, nil
}

// list returns the templates in the order in which they are removed: stale ones
// first, then the one that was not used for the longest time.
func (t *templates) list(ctx context.Context) ([]backend.Template, error) {
	keys, err := t.keys()
	if err != nil {
		return nil, err
	}
	var all []backend.Template
	for _, key := range keys {
		one, err := t.read(ctx, key)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was removed in the meantime
		}
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b backend.Template) int {
		switch {
		case a.Stale && !b.Stale:
			return -1
		case b.Stale && !a.Stale:
			return 1
		}
		return a.Used.Compare(b.Used)
	})
	return all, nil
}

// read describes one template.
func (t *templates) read(ctx context.Context, key string) (backend.Template, error) {
	dir := filepath.Join(t.dir, key)
	info, err := os.Lstat(dir)
	if err != nil {
		return backend.Template{}, fault(err, "cannot check %s", dir)
	}
	one := backend.Template{Key: key, Used: info.ModTime().UTC(), Stale: true}
	if one.Bytes, err = occupiedBy(dir); err != nil {
		return backend.Template{}, fault(err, "cannot check %s", dir)
	}
	saved, err1 := readMemory(dir)
	h, err2 := vmdir.ReadHandle(dir)
	if err1 == nil && err2 == nil { // otherwise no sandbox can start from it
		one.Image, one.Resources, one.Made = h.Image.Ref, h.Spec.Resources, saved.Saved
		one.Stale = t.stale(ctx, h, key)
	}
	if err := ctx.Err(); err != nil {
		return one, agentlab.Errorf(agentlab.CodeUnavailable, "listing templates: %w", err)
	}
	return one, nil
}

// stale reports whether the machine of a template is not the one that this host
// would start now: something was replaced, or its image was removed. A template
// is not stale if the host cannot start anything.
func (t *templates) stale(ctx context.Context, h handle, key string) bool {
	cfg, err := t.d.startConfig(ctx, h)
	return agentlab.CodeOf(err) == agentlab.CodeNotFound || err == nil && cfg.Key != key
}

// sweep removes what a killed process has left of templates, and all of them if
// templates are off.
func (t *templates) sweep() error {
	if _, err := os.Lstat(t.dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	l, err := lock.Try(filepath.Join(t.dir, fileTemplateLock))
	if agentlab.CodeOf(err) == agentlab.CodeBusy {
		return nil // it is alive
	}
	if err != nil {
		return vmdir.AsError(err, "cannot lock %s", t.dir)
	}
	defer func() { _ = l.Unlock() }()
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return fault(err, "cannot read %s", t.dir)
	}
	for _, e := range entries {
		switch {
		case strings.HasPrefix(e.Name(), makingPrefix):
			err = t.discard(filepath.Join(t.dir, e.Name()))
		case t.max == 0 && templateKey.MatchString(e.Name()):
			err = t.remove(e.Name())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// trim removes stale templates, and those that were not used for the longest
// time until all of them have at most max bytes. The one with the key stays.
func (t *templates) trim(ctx context.Context, key string) error {
	all, err := t.list(ctx)
	if err != nil {
		return err
	}
	var total int64
	for _, one := range all {
		total += one.Bytes
	}
	for _, one := range all {
		if one.Key == key || !one.Stale && total <= t.max {
			continue
		}
		if err := t.remove(one.Key); err != nil {
			return err
		}
		total -= one.Bytes
	}
	return nil
}

// check reports the size of all templates, and the last failure to make one.
func (t *templates) check() backend.Finding {
	const name = "templates"
	if t.broken != nil {
		return backend.Findf(name, backend.LevelWarn, "repair or remove "+t.dir+", and restart the daemon", "not used, so every sandbox boots: %s", t.broken)
	}
	if t.max == 0 {
		return backend.Findf(name, backend.LevelOK, "", "off: every sandbox boots")
	}
	keys, err := t.keys()
	var total int64
	for _, key := range keys {
		n, nerr := occupiedBy(filepath.Join(t.dir, key))
		if nerr != nil && !errors.Is(nerr, fs.ErrNotExist) {
			err = errors.Join(err, nerr)
		}
		total += n
	}
	if err != nil {
		return backend.Findf(name, backend.LevelWarn, "check the directory and its permissions", "cannot check %s: %s", t.dir, err)
	}
	var last failure
	t.mu.Lock()
	for _, f := range t.failed {
		if f.at.After(last.at) {
			last = f
		}
	}
	t.mu.Unlock()
	if last.err != nil {
		return backend.Findf(name, backend.LevelWarn, cmp.Or(agentlab.HintOf(last.err), "see 'agentlab daemon logs'"),
			"no template of image %s was made at %s, so its sandboxes boot: %s", last.image, last.at.Format(time.TimeOnly), last.err)
	}
	return backend.Findf(name, backend.LevelOK, "", "%d templates with %d MiB of at most %d MiB in %s", len(keys), total>>20, t.max>>20, t.dir)
}

// remove removes a template. A sandbox that is being created from it has links to
// its files already, or boots.
func (t *templates) remove(key string) error {
	trash := filepath.Join(t.dir, makingPrefix+key+"."+agentlab.NewUID()[:8])
	err := os.Rename(filepath.Join(t.dir, key), trash)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fault(err, "cannot remove template %s", key)
	}
	return vmdir.Empty(trash)
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
