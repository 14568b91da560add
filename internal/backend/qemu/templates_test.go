package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
	"github.com/agentlab-vm/agentlab/test/sample"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// stillTemplates is still for templates without a guest.
func stillTemplates(t *testing.T) (*Driver, fixed) {
	t.Helper()
	d, f := still(t)
	rehost(d, func(h *qemuvm.HostConfig) { h.Accel = qemuvm.AccelTCG })
	d.tmpl.max = 1 << 30
	return d, f
}

// rehost gives a driver a changed view of this machine.
func rehost(d *Driver, change func(*qemuvm.HostConfig)) {
	cfg := d.hostConfig()
	change(&cfg)
	d.host = qemuvm.NewHost(cfg)
}

// templateSize is the size of the memory in a template of putTemplate.
const templateSize = 100 << 10

// putTemplate writes the files of a template for a memory of mb, as a process
// that has made one leaves them. It was used at a time.
func putTemplate(t *testing.T, d *Driver, f fixed, mb int, used time.Time) (key string) {
	t.Helper()
	h := handle{Version: vmdir.Version, Spec: f.spec(1), Image: f.Image, Created: used}
	h.Spec.Resources.MemoryMB = mb
	cfg, err := d.startConfig(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	size, err := h.DiskSize()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(d.tmpl.dir, makingPrefix+"test")
	write := func(name string) error {
		return os.WriteFile(filepath.Join(dir, name), make([]byte, templateSize/4), 0o600)
	}
	layer := newLayerName()
	to := filepath.Join(d.tmpl.dir, cfg.Key)
	err = errors.Join(os.MkdirAll(dir, 0o700), write(fileMemory), write(fileDevices), write(supervisor.FileConsole), write(layer), write(fileRoot),
		durable.ReplaceJSON(filepath.Join(dir, vmdir.FileConfig), h, durable.None),
		durable.ReplaceJSON(filepath.Join(dir, fileMemoryState), savedMemory{Version: memoryVersion, Machine: cfg.Key, DiskSize: size, Saved: used}, durable.None),
		os.Rename(dir, to), os.Chtimes(to, used, used))
	if err != nil {
		t.Fatal(err)
	}
	return cfg.Key
}

// kept returns which of the templates exist, the last used first.
func kept(t *testing.T, d *Driver) (list []backend.Template, keys string) {
	t.Helper()
	list, err := d.Templates(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range list {
		keys += fmt.Sprint(one.Resources.MemoryMB, " ")
	}
	return list, keys
}

// Templates that were not used for the longest time make room, and stale ones
// before all others, but not the one that was just made.
func TestTrimTemplates(t *testing.T) {
	d, f := stillTemplates(t)
	now := time.Now()
	oldest := putTemplate(t, d, f, 512, now)
	putTemplate(t, d, f, 1024, now.Add(time.Minute))
	putTemplate(t, d, f, 2048, now.Add(2*time.Minute))
	if _, keys := kept(t, d); keys != "2048 1024 512 " {
		t.Fatalf("before: %s", keys)
	}
	if f := d.tmpl.check(); f.Level != backend.LevelOK || !strings.Contains(f.Detail, "3 templates with 0 MiB of at most 1024 MiB") {
		t.Errorf("%+v", f)
	}
	d.tmpl.max = 3 * templateSize
	if err := d.tmpl.trim(t.Context(), oldest); err != nil {
		t.Fatal(err)
	}
	if _, keys := kept(t, d); keys != "2048 512 " {
		t.Errorf("with room for two: %s", keys)
	}
	d.tmpl.max = 1 << 30
	stale := filepath.Join(d.tmpl.dir, "0123456789abcdef0123456789abcdef")
	if err := os.Mkdir(stale, 0o700); err != nil { // without any file, as of a format of the future
		t.Fatal(err)
	}
	if list, _ := kept(t, d); len(list) != 3 || !list[2].Stale || list[2].Key != filepath.Base(stale) {
		t.Fatalf("%+v", list)
	}
	if err := d.tmpl.trim(t.Context(), oldest); err != nil {
		t.Fatal(err)
	}
	if _, keys := kept(t, d); keys != "2048 512 " {
		t.Errorf("after a stale one: %s", keys)
	}
	entries, err := os.ReadDir(d.tmpl.dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("left: %v, %v", entries, err)
	}
	d.tmpl.max = 0
	if err := d.tmpl.sweep(); err != nil {
		t.Fatal(err)
	}
	if list, _ := kept(t, d); len(list) > 0 {
		t.Errorf("a driver without templates has %+v", list)
	}
}

// A template has a description. It is stale when what it depends on was replaced.
func TestTemplatesAreDescribed(t *testing.T) {
	used := time.Now().Add(-time.Hour).UTC()
	for name, replace := range map[string]func(d *Driver, f fixed) error{
		"nothing": func(*Driver, fixed) error { return nil },
		"no QEMU": func(d *Driver, _ fixed) error {
			rehost(d, func(h *qemuvm.HostConfig) { h.QEMU = "/nonexistent" })
			return nil
		},
		"agent-runner": func(_ *Driver, f fixed) error {
			return os.WriteFile(f.Runner, []byte("a newer one"), 0o600)
		},
		"QEMU": func(d *Driver, f fixed) error {
			copied := filepath.Join(f.StateDir, "qemu")
			err := os.WriteFile(copied, []byte("#!/bin/sh\nexec "+d.host.QEMU()+` "$@"`), 0o700)
			rehost(d, func(h *qemuvm.HostConfig) { h.QEMU = copied })
			return err
		},
		"accel": func(d *Driver, _ fixed) error {
			rehost(d, func(h *qemuvm.HostConfig) { h.Accel = qemuvm.AccelKVM })
			return nil
		},
		"image": func(_ *Driver, f fixed) error { return os.Remove(f.Image.Kernel) },
	} {
		t.Run(name, func(t *testing.T) {
			d, f := stillTemplates(t)
			f.Runner = filepath.Join(f.StateDir, "runner")
			if err := os.WriteFile(f.Runner, []byte("one"), 0o600); err != nil {
				t.Fatal(err)
			}
			d.rd = qemuvm.NewInitrds(filepath.Join(d.cfg.CacheDir, dirInitrd), f.Runner)
			key := putTemplate(t, d, f, 512, used)
			if err := replace(d, f); err != nil {
				t.Fatal(err)
			}
			list, _ := kept(t, d)
			if len(list) != 1 {
				t.Fatalf("%+v", list)
			}
			one := list[0]
			if one.Key != key || one.Image != f.Image.Ref || one.Resources.Cores != 1 || one.Resources.MemoryMB != 512 ||
				one.Bytes < templateSize || !one.Made.Equal(used) || !one.Used.Equal(used) {
				t.Errorf("%+v", one)
			}
			if want := name == "agent-runner" || name == "QEMU" || name == "image"; one.Stale != want {
				t.Errorf("stale: %v", one.Stale)
			}
		})
	}
}

// Sandboxes that are created while their template is deleted and made again
// start from it or boot, and each has all of its files.
func TestTemplateIsDeletedWhileUsed(t *testing.T) {
	d, f := stillTemplates(t)
	key := putTemplate(t, d, f, 512, time.Now())
	var users, deleter sync.WaitGroup
	const n = 24
	created := make(chan bool, n)
	deleter.Go(func() {
		for range created { // so that some find it
			if err := d.DeleteTemplate(t.Context(), key); err != nil {
				t.Error(err)
			}
			putTemplate(t, d, f, 512, time.Now())
		}
	})
	for i := range n {
		users.Go(func() {
			if err := d.Create(t.Context(), f.spec(i)); err != nil {
				t.Error(err)
			}
			created <- true
		})
	}
	users.Wait()
	close(created)
	deleter.Wait()
	warm := 0
	for i := range n {
		dir := d.dir(f.spec(i).Ref())
		layers, err := layersIn(dir)
		if err != nil {
			t.Fatal(err)
		}
		_, state := readMemory(dir)
		_, memory := os.Stat(filepath.Join(dir, fileMemory))
		_, devices := os.Stat(filepath.Join(dir, fileDevices))
		_, root := os.Stat(filepath.Join(dir, fileRoot))
		if root != nil || state == nil && (memory != nil || devices != nil || len(layers) != 1) {
			t.Errorf("sandbox %d: %v, %v, %v, %v, layers %q", i, root, state, memory, devices, layers)
		}
		if state == nil {
			warm++
		}
	}
	if left, err := d.tmpl.keys(); err != nil || len(left) != 1 {
		t.Errorf("left: %q, %v", left, err)
	}
	if warm == 0 {
		t.Error("none starts from the template")
	}
	t.Logf("%d of %d start from the template", warm, n)
}

// Without room no template is begun, and the next try waits.
func TestNoRoomForTemplate(t *testing.T) {
	for name, change := range map[string]func(d *Driver, sp *backend.Spec) agentlab.Code{
		"memory": func(_ *Driver, sp *backend.Spec) agentlab.Code {
			sp.Resources.MemoryMB = 1 << 20
			return agentlab.CodeUnavailable
		},
		"disk": func(d *Driver, _ *backend.Spec) agentlab.Code {
			d.cfg.PauseBelow = 1 << 60
			return agentlab.CodeNoSpace
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, f := stillTemplates(t)
			sp := f.spec(1)
			want := change(d, &sp)
			_, err := d.WarmTemplate(t.Context(), sp)
			if agentlab.CodeOf(err) != want || agentlab.HintOf(err) == "" {
				t.Errorf("%v (code %s, hint %q)", err, agentlab.CodeOf(err), agentlab.HintOf(err))
			}
			if left, err := os.ReadDir(d.tmpl.dir); err != nil || len(left) != 1 || left[0].Name() != fileTemplateLock {
				t.Errorf("left: %v, %v", left, err)
			}
			if f := d.tmpl.check(); f.Level != backend.LevelWarn || f.Remedy == "" || !strings.Contains(f.Detail, "another guest needs") {
				t.Errorf("%+v", f)
			}
			h := handle{Spec: sp, Image: f.Image}
			cfg, err := d.startConfig(t.Context(), h)
			if err != nil {
				t.Fatal(err)
			}
			d.tmpl.want(found{UID: sp.UID, Dir: t.TempDir(), Handle: h}, cfg)
			d.tmpl.mu.Lock()
			defer d.tmpl.mu.Unlock()
			if d.tmpl.making[cfg.Key] {
				t.Error("it is tried again at once")
			}
		})
	}
}

// A driver that is configured to make no templates refuses to make one.
func TestTemplatesAreOff(t *testing.T) {
	d, f := still(t)
	if _, err := d.WarmTemplate(t.Context(), f.spec(1)); agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
		t.Errorf("%v (hint %q)", err, agentlab.HintOf(err))
	}
	if f := d.tmpl.check(); f.Level != backend.LevelOK || !strings.HasPrefix(f.Detail, "off") {
		t.Errorf("%+v", f)
	}
}

// A driver whose directory of templates cannot be used has its sandboxes, which
// boot.
func TestTemplatesAreBroken(t *testing.T) {
	_, f := still(t)
	f.TemplateBytes, f.TemplateDir = 1<<30, filepath.Join(t.TempDir(), "templates")
	if err := os.WriteFile(f.TemplateDir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Create(t.Context(), f.spec(1)); err != nil {
		t.Error(err)
	}
	if list, err := d.List(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := d.WarmTemplate(t.Context(), f.spec(1)); agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" {
		t.Errorf("%v (hint %q)", err, agentlab.HintOf(err))
	}
	if f := d.tmpl.check(); f.Level != backend.LevelWarn || f.Remedy == "" {
		t.Errorf("%+v", f)
	}
}

// A template's VM has a deadline before it is started: it ends also if the
// process that makes the template dies.
func TestTemplateDeadline(t *testing.T) {
	d, f := stillTemplates(t)
	d.cfg.Supervisor = []string{"/bin/false"} // no VM is needed
	h := handle{Spec: f.spec(1), Image: f.Image}
	cfg, err := d.startConfig(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	dir, reached := t.TempDir(), false
	d.crash = func(point string) {
		if point == "start written" {
			reached = true
			if _, err := os.Stat(filepath.Join(dir, "deadline.json")); err != nil {
				t.Error(err)
			}
		}
	}
	if err := d.tmpl.boot(t.Context(), dir, h, cfg); err == nil || !reached {
		t.Errorf("%v, reached %v", err, reached)
	}
}

// A template of which a file cannot be synced is not published.
func TestTemplateIsSynced(t *testing.T) {
	for _, broken := range []string{"", fileMemory, fileDevices, vmdir.FileConfig, supervisor.FileConsole} {
		d, f := stillTemplates(t)
		key := putTemplate(t, d, f, 512, time.Now())
		dir := filepath.Join(d.tmpl.dir, makingPrefix+key)
		if err := os.Rename(filepath.Join(d.tmpl.dir, key), dir); err != nil {
			t.Fatal(err)
		}
		if broken != "" { // to open it is an error
			path := filepath.Join(dir, broken)
			if err := errors.Join(os.Remove(path), os.Symlink("/nonexistent", path)); err != nil {
				t.Fatal(err)
			}
		}
		err := d.tmpl.publish(t.Context(), dir, startConfig{QEMUImg: d.host.QEMUImg()})
		if (err == nil) != (broken == "") {
			t.Errorf("%q: %v", broken, err)
		}
		if d.tmpl.find(key) != "" != (broken == "") {
			t.Errorf("%q: the template is %q", broken, d.tmpl.find(key))
		}
	}
}

// When the disk becomes full while a template is made, nothing of it is left,
// and a running sandbox is not affected.
func TestFullDiskTemplate(t *testing.T) {
	sample.Long(t, "it boots virtual machines")
	smalldisk.Run(t, "1g", func(t *testing.T, dir string) {
		f := vmFixture(t)
		f.StateDir, f.TemplateBytes, f.TemplateDir = dir, 1<<30, filepath.Join(dir, "templates")
		t.Cleanup(func() { f.destroyAll(t) })
		b := newBox(t, f, nil)
		b.boot()
		b.d.crash = func(point string) {
			if point == "template settled" {
				smalldisk.Fill(t, dir, 32<<20)
			}
		}
		_, err := b.d.WarmTemplate(b.ctx, f.spec(2))
		if agentlab.CodeOf(err) != agentlab.CodeNoSpace {
			t.Errorf("%v (code %s), want code no_space", err, agentlab.CodeOf(err))
		}
		if left, err := os.ReadDir(b.d.tmpl.dir); err != nil || len(left) != 1 || left[0].Name() != fileTemplateLock {
			t.Errorf("left: %v, %v", left, err)
		}
		if out := b.output("echo here >/root/file; sync; cat /root/file"); out != "here" {
			t.Errorf("the sandbox answers %q", out)
		}
	})
}

// A copy of a template that is interrupted, and made again when the template was
// replaced by another one, has nothing of the first.
func TestInterruptedCopyOfReplacedTemplate(t *testing.T) {
	d, f := stillTemplates(t)
	sp := f.spec(1)
	sp.Resources.MemoryMB = 512
	put := func(content string) (key string) {
		key = putTemplate(t, d, f, 512, time.Now())
		for _, name := range []string{fileMemory, fileDevices, fileRoot} {
			if err := os.WriteFile(filepath.Join(d.tmpl.dir, key, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return key
	}
	key := put("first")
	func() {
		defer func() { _ = recover() }()
		d.crash = func(point string) {
			if point == "disk not named" {
				panic("killed")
			}
		}
		_ = d.Create(t.Context(), sp)
		t.Error("it was not killed")
	}()
	d.crash = nil
	if err := d.DeleteTemplate(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	if again := put("second"); again != key {
		t.Fatal("it has another key")
	}
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{fileMemory, fileDevices, fileRoot} {
		if got, err := os.ReadFile(filepath.Join(d.dir(sp.Ref()), name)); err != nil || string(got) != "second" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// A template whose VM does not start is tried again soon, then less often. Its error
// has the reason, and names no file: the directory is removed.
func TestTemplateVMDoesNotStart(t *testing.T) {
	d, f := stillTemplates(t) // its kernel is none
	sp := f.spec(1)
	for _, want := range []time.Duration{time.Minute, 2 * time.Minute} {
		_, err := d.WarmTemplate(t.Context(), sp)
		if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), "did not start: ") || !strings.Contains(err.Error(), "QEMU failed") {
			t.Errorf("%v, want QEMU's reason", err)
		}
		if hint := agentlab.HintOf(err); hint == "" || strings.Contains(hint, d.tmpl.dir) {
			t.Errorf("hint %q", hint)
		}
		for _, last := range d.tmpl.failed {
			if got := last.pause(); got != want {
				t.Errorf("another attempt after %s, want %s", got, want)
			}
		}
	}
	if got := d.tmpl.supervised(d.tmpl.dir).StartPatience; got < templateStartPatience {
		t.Errorf("the whole start may take %s", got)
	}
	if got := (failure{times: 50}).pause(); got != maxTemplateRetry {
		t.Errorf("after 50 failures: %s", got)
	}
}

// The boot of a template's guest is limited by its progress, and the error has a reason.
func TestTemplateBootIsLimitedByProgress(t *testing.T) {
	began := time.Now()
	minute := func(n int) time.Time { return began.Add(time.Duration(n) * time.Minute) }
	slow := newBootWatch(began)
	for n := range 60 {
		if err := slow.look(minute(n), int64(n/9), "starting", nil); err != nil {
			t.Fatalf("after %d minutes: %v", n, err)
		}
	}
	if err := slow.look(minute(61), 100, "starting", nil); err == nil || !strings.Contains(err.Error(), "did not finish its boot in 1h; its state is starting") {
		t.Errorf("endless: %v", err)
	}
	if err := newBootWatch(began).look(minute(11), 0, "", errors.New("no\nanswer")); err == nil || !strings.Contains(err.Error(), "made no progress in its boot for 10m; it does not answer: no answer") || agentlab.HintOf(err) == "" {
		t.Errorf("hangs: %v", err)
	}
	for want, in := range map[string]backend.Instance{
		"has ended: killed":                   {Power: backend.PowerCrashed, Reason: "killed"},
		"has ended: it was powered off":       {Power: backend.PowerStopped},
		"has ended: it was powered off after": {Power: backend.PowerStopped, Expired: true},
	} {
		if err := templateEnded(in); !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestCallsOfATemplateArePatient(t *testing.T) {
	calls := 0
	err := patiently(t.Context(), func(context.Context) error {
		if calls++; calls < 3 {
			return agentlab.Errorf(agentlab.CodeTimeout, "the guest did not answer: %w", context.DeadlineExceeded)
		}
		return errors.New("failed")
	})
	if calls != 3 || err == nil || err.Error() != "failed" {
		t.Errorf("%d calls, %v", calls, err)
	}
}
