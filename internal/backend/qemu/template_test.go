package qemu

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// theTemplate returns the directory of the only template.
func theTemplate(d *Driver) (string, error) {
	names, err := filepath.Glob(filepath.Join(d.tmpl.dir, "[0-9a-f]*"))
	if err == nil && len(names) != 1 {
		err = fmt.Errorf("there are the templates %q", names)
	}
	if err != nil {
		return "", err
	}
	return names[0], nil
}

// clone creates the nth sandbox from a template, and starts it.
func (b *box) clone(n int, change func(*backend.Spec)) *box {
	b.Helper()
	sp := b.f.spec(n)
	if change != nil {
		change(&sp)
	}
	c := &box{TB: b.TB, f: b.f, d: b.d, ref: sp.Ref(), ctx: b.ctx}
	b.ok(b.d.Create(b.ctx, sp))
	if _, err := readMemory(b.d.dir(c.ref)); err != nil {
		b.Fatalf("it does not start from a template: %v", err)
	}
	c.boot()
	if _, err := os.Lstat(filepath.Join(b.d.dir(c.ref), fileMemoryState)); !errors.Is(err, os.ErrNotExist) {
		b.Errorf("a running sandbox has a saved memory: %v", err)
	}
	return c
}

// The first sandbox of a kind boots, and a template is made. The next one is a
// copy of it with a boot ID and a disk of its own.
func TestStartFromTemplate(t *testing.T) {
	f := vmFixture(t)
	f.TemplateBytes = 1 << 30
	b := newBox(t, f, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 6*bootTimeout) // a template is made with the least CPU time
	t.Cleanup(cancel)
	b.ctx = ctx
	t.Cleanup(func() { _ = b.d.Close() })
	b.d.crash = func(point string) {
		switch point {
		case "template begun":
			if h, err := b.client().Health(b.ctx); err != nil || h.Identity == "" || !booted(h) {
				t.Errorf("a template is made while the sandbox boots: %+v, %v", h, err)
			}
		case "template booted":
			b.inBackground()
		}
	}
	b.boot()
	b.identify()
	eventually(t, 5*bootTimeout, "a template is made", func() error { _, err := theTemplate(b.d); return err })
	second := b.clone(2, nil)
	began := time.Now()
	second.identify()
	t.Logf("identity: %s", time.Since(began))
	h, err := second.client().Health(b.ctx)
	b.ok(err)
	if h.System != "running" || h.Identity != second.ref.UID {
		t.Errorf("%+v", h)
	}
	second.output("echo mine >/root/mine; sync")
	if out := b.output("ls /root"); out != "" {
		t.Errorf("the disk of the first sandbox has %q", out)
	}
	b.ok(b.d.Stop(b.ctx, second.ref, bootTimeout))
	second.boot()
	if out := second.output("cat /root/mine"); out != "mine" {
		t.Errorf("after a restart the disk has %q", out)
	}
}

// inBackground checks that the VM of a template that is being made has the least
// CPU time, also if its session has a priority of its own.
func (b *box) inBackground() {
	dirs, err := filepath.Glob(filepath.Join(b.d.tmpl.dir, makingPrefix+"*"))
	if err != nil || len(dirs) != 1 {
		b.Errorf("%q, %v", dirs, err)
		return
	}
	pid, err := noted(dirs[0], qemuPID)
	if err != nil {
		b.Error(err)
		return
	}
	if n, err := unix.Getpriority(unix.PRIO_PROCESS, pid); err != nil || n != 20-19 {
		b.Errorf("its nice value is %d, %v", 20-n, err)
	}
	group, err := os.ReadFile(fmt.Sprintf("/proc/%d/autogroup", pid))
	if err == nil && !strings.HasSuffix(strings.TrimSpace(string(group)), "nice 19") {
		b.Errorf("the priority of its session: %q", group)
	}
	score, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
	if err != nil || strings.TrimSpace(string(score)) != "1000" {
		b.Errorf("oom_score_adj %q, %v", score, err)
	}
}

// A larger disk than the template's is seen by a guest that never boots, and its
// file system fills it when the guest has its identity.
func TestTemplateLargerDisk(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	c := b.clone(2, func(sp *backend.Spec) { sp.Resources.RootSizeGB = 33 })
	c.identify()
	if out := c.output("cat /sys/block/vda/size"); out != strconv.Itoa(33<<21) {
		t.Errorf("the guest's disk has %s sectors", out)
	}
	if size := c.output("df --output=size -BG / | tail -1 | tr -d ' G'"); size < "31" || size > "33" {
		t.Errorf("the file system has %s GiB", size)
	}
}

// hash returns the content of a file, and how many bytes it occupies.
func hash(t testing.TB, path string) (sum string, bytes int64) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	if bytes, err = blocksOf(path); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil)), bytes
}

// unique returns the memory of QEMU that no other process has, in bytes.
func (b *box) unique() int64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", b.noted(qemuPID)))
	b.ok(err)
	var sum int64
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && (f[0] == "Private_Clean:" || f[0] == "Private_Dirty:") {
			n, err := strconv.ParseInt(f[1], 10, 64)
			b.ok(err)
			sum += n << 10
		}
	}
	return sum
}

// A guest that gives memory back to its host changes neither the template nor
// the guests that share its memory, and the host gets the memory.
func TestTemplateKeepsItsMemory(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	c := b.clone(2, nil)
	dir, err := theTemplate(b.d)
	b.ok(err)
	path := filepath.Join(dir, fileMemory)
	sum, occupied := hash(t, path)
	before := c.unique()
	const used = 150 << 20
	c.output("head -c " + strconv.Itoa(used) + " /dev/urandom >/dev/shm/fill")
	full := c.unique()
	if full < before+used*9/10 {
		t.Errorf("%d MiB after the guest has used %d MiB more than with %d MiB", full>>20, used>>20, before>>20)
	}
	// The guest drops everything: what the template had cached, too.
	c.output("rm /dev/shm/fill; sync; echo 3 >/proc/sys/vm/drop_caches")
	eventually(t, bootTimeout, "the host gets the memory back", func() error {
		if now := c.unique(); now > full-used*3/4 {
			return fmt.Errorf("%d MiB of %d", now>>20, full>>20)
		}
		return nil
	})
	if s, n := hash(t, path); s != sum || n != occupied {
		t.Errorf("the template's memory has changed: %d bytes before, %d now", occupied, n)
	}
	b.clone(3, nil).output("id")
}

// A process with the filter punches holes into every file but the memory, and
// does not notice the difference.
func TestHoleFilter(t *testing.T) {
	dir := t.TempDir()
	memory, disk := filepath.Join(dir, fileMemory), filepath.Join(dir, fileRoot)
	for _, path := range []string{memory, disk} {
		if err := os.WriteFile(path, bytes.Repeat([]byte{7}, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	sum, occupied := hash(t, memory)
	var f holeFilter
	if err := unix.Stat(memory, &f.memory); err != nil {
		t.Fatal(err)
	}
	script := `for f in "$@"; do fallocate --punch-hole --offset 0 --length 524288 "$f" || exit 3; done`
	cmd := exec.Command("sh", "-c", script, "sh", memory, disk)
	var out bytes.Buffer
	cmd.Stderr = &out
	ended, err := qemuvm.StartUnprivileged(cmd, f.start, false)
	if err != nil {
		t.Fatal(err)
	}
	<-ended
	if code := cmd.ProcessState.ExitCode(); code != 0 {
		t.Fatalf("code %d: %s", code, &out)
	}
	if s, n := hash(t, memory); s != sum || n != occupied {
		t.Errorf("the memory has changed: %d bytes, %d before", n, occupied)
	}
	if _, n := hash(t, disk); n != occupied/2 {
		t.Errorf("the disk occupies %d bytes, want %d", n, occupied/2)
	}
}

// The copy of a template that does not fit is removed before a sandbox boots. The
// memory of a sandbox that is suspended to disk stays, and it does not start.
func TestMemoryOfAnotherMachine(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	dir := d.dir(sp.Ref())
	for text, want := range map[string]agentlab.Code{
		`{"version":1,"machine":"other","boot":"` + supervisor.BootID() + `"}`: "",
		`{"version":1,"machine":"this","boot":"yesterday"}`:                    "",
		`{"version":1,"machine":"other"}`:                                      agentlab.CodeUnsupported,
	} {
		for name, content := range map[string]string{fileMemory: "", fileDevices: "", fileMemoryState: text} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		sb, err := d.find(sp.UID)
		if err != nil {
			t.Fatal(err)
		}
		if load, err := d.memoryOf(sb, startConfig{Key: "this"}); load || agentlab.CodeOf(err) != want {
			t.Errorf("%s: %v, %v", text, load, err)
		}
		if _, err := readMemory(dir); (err == nil) != (want != "") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// A process that dies while it makes a template leaves no VM and no files behind
// the next one.
func TestTemplateMakerDies(t *testing.T) {
	f := vmFixture(t)
	f.TemplateBytes = 1 << 30
	points := []string{"supervisor started", "template booted", "template settled", "template saved"}
	for _, point := range sample.Of(t, 1, points) {
		c := doomed{Fixed: f, Method: methodWarm, Point: point, Spec: f.spec(1)}
		if c.dieIn() == nil {
			t.Fatalf("%s was not reached", point)
		}
		d, err := f.open()
		if err != nil {
			t.Fatalf("%s: %v", point, err)
		}
		if left, err := os.ReadDir(d.tmpl.dir); err != nil || len(left) != 1 || left[0].Name() != fileTemplateLock {
			t.Errorf("%s: %v, %v", point, left, err)
		}
		if left := processes(f.StateDir); len(left) > 0 {
			t.Errorf("%s: %q", point, left)
		}
	}
	d, err := f.open()
	if err == nil {
		_, err = d.WarmTemplate(t.Context(), f.spec(1))
	}
	if err != nil {
		t.Fatalf("%v (%s)", err, agentlab.HintOf(err))
	}
	if _, err := theTemplate(d); err != nil {
		t.Error(err)
	}
}

// A supervisor or a QEMU that is killed while its template is made leaves nothing behind.
// The error comes at once, and the next attempt makes the template.
func TestTemplateVMIsKilled(t *testing.T) {
	f := vmFixture(t)
	f.TemplateBytes = 1 << 30
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	type death struct{ point, victim string }
	var cases []death
	for _, point := range []string{"template booted", "template settled"} {
		cases = append(cases, death{point, qemuPID}, death{point, shimPID})
	}
	for _, c := range sample.Of(t, 1, cases) {
		ctx, cancel := context.WithCancel(t.Context())
		d.crash = func(point string) {
			if point != c.point {
				return
			}
			dirs, err := filepath.Glob(filepath.Join(d.tmpl.dir, makingPrefix+"*"))
			if err != nil || len(dirs) != 1 {
				t.Errorf("%q, %v", dirs, err)
				return
			}
			pid, err := noted(dirs[0], c.victim)
			if err == nil {
				err = unix.Kill(pid, unix.SIGKILL)
			}
			if err != nil {
				t.Errorf("%s: %v", c.victim, err)
			}
			time.AfterFunc(bootTimeout, cancel)
		}
		_, err := d.WarmTemplate(ctx, f.spec(1))
		if err == nil || ctx.Err() != nil {
			t.Errorf("%s of %s: %v, %v", c.point, c.victim, err, ctx.Err())
		}
		cancel()
		if left, err := os.ReadDir(d.tmpl.dir); err != nil || len(left) != 1 || left[0].Name() != fileTemplateLock {
			t.Errorf("%s of %s: %v, %v", c.point, c.victim, left, err)
		}
		if left := processes(f.StateDir); len(left) > 0 {
			t.Errorf("%s of %s: %q", c.point, c.victim, left)
		}
	}
	d.crash = nil
	if _, err := d.WarmTemplate(t.Context(), f.spec(1)); err != nil {
		t.Fatalf("%v (%s)", err, agentlab.HintOf(err))
	}
	if _, err := theTemplate(d); err != nil {
		t.Error(err)
	}
}

// A template that is damaged is removed by the first start from it. A sandbox that
// does not start from it boots.
func TestDamagedTemplate(t *testing.T) {
	f := vmFixture(t)
	f.TemplateBytes = 1 << 30
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	for i, name := range sample.Of(t, 1, []string{fileDevices, fileMemory}) {
		sp := f.spec(i + 1)
		one, err := d.WarmTemplate(t.Context(), sp)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(d.tmpl.dir, one.Key, name)
		st, err := os.Stat(path)
		if err == nil {
			err = errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o600), os.Truncate(path, st.Size()))
		}
		if err == nil {
			err = d.Create(t.Context(), sp)
		}
		if err != nil {
			t.Fatal(err)
		}
		b := &box{TB: t, f: f, d: d, ref: sp.Ref(), ctx: t.Context()}
		if _, err := readMemory(d.dir(b.ref)); err != nil {
			t.Fatalf("it does not start from the template: %v", err)
		}
		if name == fileDevices {
			b.boot()
		} else if err := d.Start(t.Context(), b.ref); err != nil {
			t.Logf("%s: %v", name, err)
		}
		eventually(t, bootTimeout, "the template is removed: "+name, func() error {
			if d.tmpl.find(one.Key) == filepath.Join(d.tmpl.dir, one.Key) {
				return errors.New("it is still there")
			}
			return nil
		})
		if err := d.Destroy(t.Context(), b.ref); err != nil {
			t.Error(err)
		}
	}
}
