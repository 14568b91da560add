package qemu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/test/sample"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// works checks that the guest of a boot reads and writes its disk.
func (b *box) works(boot string) {
	b.Helper()
	if id := b.bootID(); id != boot {
		b.Fatalf("boot %s answers, want %s", id, boot)
	}
	const script = "date +%N >/root/works && sync && cp /root/works /root/copy && sync && echo 3 >/proc/sys/vm/drop_caches && cmp /root/works /root/copy && echo well"
	if out := b.output(script); out != "well" {
		b.Errorf("the guest's disk: %q", out)
	}
}

// A save that is given up at any time leaves the guest running with a good disk.
// Every whole save adds a layer, and the next start merges them.
func TestSaveOfRunningGuest(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	b.boot()
	b.output("echo first >/root/first; sync")
	boot := b.bootID()
	dir := b.d.dir(b.ref)
	for _, ms := range sample.Of(t, 4, []int{5, 20, 40, 80, 120, 200, 400}) {
		after := time.Duration(ms) * time.Millisecond
		ctx, cancel := context.WithTimeout(b.ctx, after)
		_, err := b.d.SaveSnapshot(ctx, b.ref, agentlab.NewUID())
		cancel()
		t.Logf("given up after %s: %v", after, err)
		b.works(boot)
	}
	first, err := layersIn(dir)
	b.ok(err)
	for i := len(first); i < mergeFrom; i++ {
		ref := b.save()
		b.output(fmt.Sprintf("echo %d >/root/count; sync", i))
		if i < mergeFrom-1 {
			b.ok(b.d.DeleteSnapshot(b.ctx, ref))
		}
	}
	b.works(boot)
	open, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", b.noted(qemuPID)))
	b.ok(err)
	open = slices.DeleteFunc(open, func(name string) bool {
		to, err := os.Readlink(name)
		return err != nil || !strings.Contains(to, "memfd:devices")
	})
	if len(open) != 1 {
		t.Errorf("QEMU has %d files for the state of its devices open", len(open))
	}
	layers, err := layersIn(dir)
	if err != nil || len(layers) < mergeFrom {
		t.Errorf("the disk has %d layers after %d saves, %v", len(layers), mergeFrom, err)
	}
	b.ok(b.d.SuspendToDisk(b.ctx, b.ref))
	b.ok(b.d.Resume(b.ctx, b.ref))
	eventually(t, bootTimeout, "the guest answers", func() error { _, err := b.client().Health(b.ctx); return err })
	b.works(boot)
	if layers, err := layersIn(dir); err != nil || len(layers) != 1 {
		t.Errorf("after the sandbox was resumed from disk, its disk has the layers %q, %v", layers, err)
	}
	if out := b.output("cat /root/first /root/count"); out != fmt.Sprintf("first\n%d", mergeFrom-1) {
		t.Errorf("the disk has %q", out)
	}
}

// writer writes a number to every page of a large memory, then the next number. It
// ends when a page does not have the number that it wrote last.
const writer = `import mmap, os, sys
m, n = mmap.mmap(-1, 32 << 20), 0
while True:
    was, n = n % 251, n + 1
    for at in range(0, len(m), 4096):
        if m[at] != was:
            sys.exit("page %d has %d, want %d" % (at // 4096, m[at], was))
        m[at] = n % 251
    open("/run/passes.new", "w").write(str(n))
    os.replace("/run/passes.new", "/run/passes")
`

// A guest that writes to its memory while it is saved continues from the snapshot with
// everything that it has written.
func TestSaveOfWritingGuest(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	b.boot()
	b.output("cat >/run/writer.py <<'EOF'\n" + writer + "EOF\nsetsid python3 /run/writer.py >/run/writer.log 2>&1 </dev/null & echo")
	passes := func(least int) (last int) {
		t.Helper()
		eventually(t, bootTimeout, "the guest writes its memory", func() error {
			out := b.output("pgrep -f writer.py >/dev/null || { cat /run/writer.log; exit; }; cat /run/passes 2>/dev/null || echo 0")
			n, err := strconv.Atoi(out)
			if err != nil {
				t.Fatalf("the writer has ended: %s", out)
			}
			if last = n; n < least {
				return fmt.Errorf("%d passes", n)
			}
			return nil
		})
		return last
	}
	n := passes(1)
	for range 2 {
		snap := b.save()
		b.ok(b.d.RestoreSnapshot(b.ctx, snap))
		b.ok(b.d.Resume(b.ctx, b.ref))
		n = passes(n + 2)
	}
}

// spaceLeft is the free space that fillTo leaves: a guest that is saved then uses
// more than half of what must stay free.
const spaceLeft = hostspace.PauseLeast/2 + 16<<20

// fillTo fills the disk of a sandbox's directory as smalldisk.Fill does.
func fillTo(dir string, left int64) {
	path := filepath.Join(filepath.Dir(filepath.Dir(dir)), "fill")
	free, err := hostspace.FreeBytes(dir)
	if err == nil {
		err = os.WriteFile(path, make([]byte, max(free-left, 0)), 0o600)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

// minFree returns the least free space on the disk of dir until done.
func minFree(t *testing.T, dir string, done <-chan struct{}) int64 {
	least := smalldisk.Free(t, dir)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return least
		case <-tick.C:
			least = min(least, smalldisk.Free(t, dir))
		}
	}
}

// killAt kills a process of the sandbox as soon as a condition is true.
func (b *box) killAt(ctx context.Context, file string, there func() bool) {
	pid := b.noted(file)
	for !there() && ctx.Err() == nil {
		time.Sleep(200 * time.Microsecond)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
}

// A supervisor or a QEMU that is killed while its guest is saved takes nothing
// with it: the sandbox starts with all that was synced, and can be saved.
func TestKilledWhileSaving(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	dir := b.d.dir(b.ref)
	type death struct{ file, victim string }
	var cases []death
	for _, file := range []string{fileMemory, layerPrefix, fileDevices, fileMemoryState} {
		cases = append(cases, death{file, qemuPID}, death{file, shimPID})
	}
	for i, c := range sample.Of(t, 3, cases) {
		file := c.file
		b.boot()
		b.output(fmt.Sprintf("echo %d >/root/count; sync", i))
		uid := agentlab.NewUID()
		before, err := layersIn(dir)
		b.ok(err)
		ctx, cancel := context.WithCancel(b.ctx)
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			b.killAt(ctx, c.victim, func() bool {
				if file == layerPrefix {
					now, err := layersIn(dir)
					return err == nil && len(now) > len(before)
				}
				_, err := os.Lstat(filepath.Join(b.d.snapshots(), uid, file))
				return err == nil
			})
		}()
		_, err = b.d.SaveSnapshot(b.ctx, b.ref, uid)
		cancel()
		<-killed
		t.Logf("%s killed when %s was there: %v", c.victim, file, err)
		b.awaitPower(backend.PowerCrashed)
		if _, err := b.d.SaveSnapshot(b.ctx, b.ref, uid); err != nil {
			t.Fatal(err)
		}
		b.boot()
		if out := b.output("cat /root/count"); out != fmt.Sprint(i) {
			t.Errorf("%s: the disk has %q, want %d", file, out, i)
		}
		b.works(b.bootID())
		b.ok(b.d.DeleteSnapshot(b.ctx, backend.SnapshotRef{UID: uid, Of: b.ref}))
		b.ok(b.d.Stop(b.ctx, b.ref, 0))
	}
	if left, err := os.ReadDir(b.d.snapshots()); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A snapshot for which the host's disk has no space fails, and the guest
// continues.
func TestSaveOnFullDisk(t *testing.T) { testFullDisk(t, false) }

// So does one of a guest that continues from a saved memory.
func TestSaveOfWarmGuestOnFullDisk(t *testing.T) { testFullDisk(t, true) }

func testFullDisk(t *testing.T, warm bool) {
	sample.Long(t, "it boots virtual machines")
	smalldisk.Run(t, "1100m", func(t *testing.T, dir string) {
		f := vmFixture(t)
		f.StateDir, f.PauseBelow = dir, hostspace.PauseLeast
		t.Cleanup(func() { f.destroyAll(t) })
		if warm {
			f.TemplateBytes, f.TemplateDir = 4<<30, ""
			d, err := f.open()
			if err == nil {
				_, err = d.WarmTemplate(t.Context(), f.spec(1))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		b := newBox(t, f, nil)
		b.boot()
		boot := b.bootID()
		before, err := layersIn(b.d.dir(b.ref))
		b.ok(err)
		save := func() error { _, err := b.d.SaveSnapshot(b.ctx, b.ref, agentlab.NewUID()); return err }
		toDisk := func() error { return b.d.SuspendToDisk(b.ctx, b.ref) }
		for _, call := range []func() error{save, toDisk} {
			for _, begins := range []bool{false, true} {
				if begins { // then the space is used by others
					b.ok(os.WriteFile(filepath.Join(b.d.dir(b.ref), fileCrash), []byte("save begun/space"), 0o600))
				} else {
					smalldisk.Fill(t, dir, hostspace.PauseLeast+16<<20)
				}
				least := make(chan int64)
				done := make(chan struct{})
				go func() { least <- minFree(t, dir, done) }()
				err := call()
				close(done)
				if agentlab.CodeOf(err) != agentlab.CodeNoSpace || agentlab.HintOf(err) == "" || !strings.Contains(fmt.Sprint(err), "the guest's memory needs") {
					t.Errorf("begins %v: %v (code %s), want no_space and a hint", begins, err, agentlab.CodeOf(err))
				}
				if free := <-least; free < hostspace.PauseLeast/2-4*spaceEvery {
					t.Errorf("begins %v: only %d MiB were left free", begins, free>>20)
				}
				b.ok(os.Remove(filepath.Join(dir, "fill")))
				b.works(boot)
				b.wantNoMemory()
			}
		}
		if left, err := b.d.Snapshots(b.ctx); err != nil || len(left) != 0 {
			t.Errorf("left: %+v, %v", left, err)
		}
		if layers, err := layersIn(b.d.dir(b.ref)); err != nil || !slices.Equal(layers, before) {
			t.Errorf("left: %q, %v, before %q", layers, err, before)
		}
	})
}
