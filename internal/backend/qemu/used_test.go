package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// remember writes a file to the guest's memory and one to its disk.
func (b *box) remember() {
	b.Helper()
	b.output("echo memory >/dev/shm/kept; echo disk >/root/kept; sync")
}

// wantMemory checks that the guest of a boot answers, with what it remembered.
func (b *box) wantMemory(boot string) {
	b.Helper()
	eventually(b, bootTimeout, "the guest answers", func() error { _, err := b.client().Health(b.ctx); return err })
	if id := b.bootID(); id != boot {
		b.Fatalf("boot %s answers, want %s", id, boot)
	}
	if out := b.output("cat /dev/shm/kept /root/kept"); out != "memory\ndisk" {
		b.Errorf("the guest has %q", out)
	}
}

// wantLost checks that a sandbox has lost its memory, and does not boot before a
// Stop.
func (b *box) wantLost() {
	b.Helper()
	in, err := b.d.Inspect(b.ctx, b.ref)
	if err != nil || in.Power != backend.PowerCrashed || !strings.Contains(in.Reason, "memory is lost") {
		b.Errorf("%s (%s), %v", in.Power, in.Reason, err)
	}
	for what, call := range map[string]func(context.Context, backend.Ref) error{"Start": b.d.Start, "Resume": b.d.Resume} {
		if err := call(b.ctx, b.ref); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), "lost") || agentlab.HintOf(err) == "" {
			b.Errorf("%s: %v (code %s, hint %q)", what, err, agentlab.CodeOf(err), agentlab.HintOf(err))
		}
	}
	b.ok(b.d.Stop(b.ctx, b.ref, 0))
	b.wantNoMemory()
	if in, err := b.d.Inspect(b.ctx, b.ref); err != nil || in.Power != backend.PowerStopped {
		b.Errorf("after a Stop: %s (%s), %v", in.Power, in.Reason, err)
	}
}

// wantNoMemory checks that no file of a saved memory is left.
func (b *box) wantNoMemory() {
	b.Helper()
	for _, name := range []string{fileMemory, fileDevices, fileMemoryState, fileMemoryUsed} {
		if _, err := os.Lstat(filepath.Join(b.d.dir(b.ref), name)); !errors.Is(err, os.ErrNotExist) {
			b.Errorf("%s is left: %v", name, err)
		}
	}
}

// continuing is one way in which a sandbox continues from a saved memory.
type continuing struct{ how, point, victim string }

// A supervisor or a QEMU that is killed while a guest continues from its saved
// memory loses nothing before the guest's CPUs run. Afterwards the loss is
// reported: the sandbox does not boot as if its guest had never run.
func TestKilledWhileContinuing(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	b.boot()
	b.identify()
	b.remember()
	boot := b.bootID()
	snap := b.save()
	var cases []continuing
	for _, how := range []string{"resume", "restore", "fork"} {
		for _, point := range []string{"launched", "loaded", "memory claimed", "continued"} {
			for _, victim := range []string{"supervisor", "QEMU"} {
				cases = append(cases, continuing{how, point, victim})
			}
		}
	}
	key := func(c continuing) []string { return []string{c.how, c.point, c.victim} }
	for i, test := range sample.Cover(t, cases, key) {
		t.Run(fmt.Sprintf("%s/%s/%s", test.how, test.point, test.victim), func(t *testing.T) {
			c := *b
			c.TB = t
			call := c.d.Resume
			switch test.how {
			case "fork":
				sp := c.f.spec(2 + i)
				sp.From = &snap
				c.ref, call = sp.Ref(), c.d.Start
				c.ok(c.d.Create(c.ctx, sp))
				t.Cleanup(func() { c.ok(c.d.Destroy(context.WithoutCancel(c.ctx), c.ref)) })
			case "restore":
				c.ok(c.d.RestoreSnapshot(c.ctx, snap))
			case "resume":
				c.ok(c.d.RestoreSnapshot(c.ctx, snap))
				c.ok(c.d.Resume(c.ctx, c.ref))
				c.wantMemory(boot)
				c.ok(c.d.SuspendToDisk(c.ctx, c.ref))
			}
			before, err := c.d.Inspect(c.ctx, c.ref)
			c.ok(err)
			dir := c.d.dir(c.ref)
			c.ok(os.WriteFile(filepath.Join(dir, fileCrash), []byte(test.point+"/"+test.victim), 0o600))
			if err := call(c.ctx, c.ref); err == nil {
				t.Fatal("the point was not reached")
			}
			eventually(t, bootTimeout, "no process is left", func() error {
				if left := processes(dir); len(left) > 0 {
					return fmt.Errorf("%q", left)
				}
				return nil
			})
			if test.point == "memory claimed" || test.point == "continued" {
				c.wantLost()
				return
			}
			if in, err := c.d.Inspect(c.ctx, c.ref); err != nil || before.Power == backend.PowerSuspended && in.Power != before.Power {
				t.Errorf("%s (%s), want %s, %v", in.Power, in.Reason, before.Power, err)
			}
			c.ok(call(c.ctx, c.ref))
			c.wantMemory(boot)
		})
	}
}

// Until a guest that continues has its identity, its end loses the memory. Then
// it is a crash like any other.
func TestCrashAfterContinuing(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	b.boot()
	b.identify()
	b.remember()
	snap := b.save()
	for n, identified := range []bool{false, true} {
		c := b.fork(10+n, snap)
		if identified {
			c.identify()
			eventually(t, bootTimeout, "the marker is removed", func() error {
				if memoryLost(c.d.dir(c.ref)) {
					return errors.New("it is there")
				}
				return nil
			})
			c.wantNoMemory()
		}
		c.signal(qemuPID, syscall.SIGKILL)
		if in := c.awaitPower(backend.PowerCrashed); strings.Contains(in.Reason, "lost") == identified {
			t.Errorf("identified %v: %s", identified, in.Reason)
		}
		if !identified {
			c.wantLost()
		}
		c.boot()
		if out := c.output("ls /dev/shm/kept 2>/dev/null; cat /root/kept"); out != "disk" {
			t.Errorf("identified %v: after the crash the guest has %q", identified, out)
		}
		b.ok(b.d.Destroy(b.ctx, c.ref))
	}
}

// The caller of a start from a saved memory gives up. The next call of any method
// finds the guest, which continues.
func TestGivenUpWhileContinuing(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	b.boot()
	b.identify()
	b.remember()
	boot := b.bootID()
	snap := b.save()
	sp := b.f.spec(2)
	sp.From = &snap
	child := *b
	child.ref = sp.Ref()
	b.ok(b.d.Create(b.ctx, sp))
	giveUp := func(c *box, used bool, call func(context.Context, backend.Ref) error) {
		t.Helper()
		ctx, cancel := context.WithCancel(c.ctx)
		defer cancel()
		dir := c.d.dir(c.ref)
		if used {
			c.ok(os.WriteFile(filepath.Join(dir, fileCrash), []byte("memory claimed/nothing"), 0o600))
		}
		c.d.crash = func(point string) {
			switch {
			case point != "supervisor started":
			case used:
				go func() {
					for !memoryLost(dir) && ctx.Err() == nil {
						time.Sleep(time.Millisecond)
					}
					cancel()
				}()
			default:
				cancel()
			}
		}
		defer func() { c.d.crash = nil }()
		if err := call(ctx, c.ref); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Fatalf("the call that was given up: %v (code %s)", err, agentlab.CodeOf(err))
		}
	}
	giveUp(&child, true, b.d.Start)
	b.ok(b.d.Start(b.ctx, child.ref))
	child.wantMemory(boot)
	for what, next := range map[string]func() error{
		"Resume":        func() error { return b.d.Resume(b.ctx, b.ref) },
		"SuspendToDisk": func() error { return b.d.SuspendToDisk(b.ctx, b.ref) },
		"SaveSnapshot": func() error {
			s, err := b.d.SaveSnapshot(b.ctx, b.ref, agentlab.NewUID())
			if err == nil && !s.Memory {
				err = errors.New("the snapshot has no memory")
			}
			return err
		},
	} {
		b.ok(b.d.SuspendToDisk(b.ctx, b.ref))
		giveUp(b, what == "Resume", b.d.Resume)
		if err := next(); err != nil {
			t.Fatalf("%s after a Resume that was given up: %v", what, err)
		}
		if in, err := b.d.Inspect(b.ctx, b.ref); err != nil || (in.Power == backend.PowerSuspended) != (what == "SuspendToDisk") {
			t.Errorf("%s: %s, %v", what, in.Power, err)
		}
		b.ok(b.d.Resume(b.ctx, b.ref))
		b.wantMemory(boot)
	}
}
