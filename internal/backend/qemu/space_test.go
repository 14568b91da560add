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

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/test/sample"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// A guest that fills its host's disk is paused long before the disk is full,
// while another one that writes little goes on until half of that space is left.
// The one that filled it goes on when there is room, is paused again, and can be destroyed when there
// is no room at all.
func TestFullDiskPausesGuest(t *testing.T) {
	sample.Long(t, "it boots virtual machines")
	smalldisk.Run(t, "900m", fullDiskPausesGuest)
}

func fullDiskPausesGuest(t *testing.T, dir string) {
	f := vmFixture(t)
	f.StateDir, f.PauseBelow = dir, hostspace.PauseLeast
	t.Cleanup(func() { f.destroyAll(t) })
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 300<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	b, quiet := newBox(t, f, nil), newBox(t, f, func(sp *backend.Spec) { *sp = f.spec(2) })
	quiet.boot()
	quiet.output("systemctl is-system-running --wait || true; sync") // it writes while it starts
	b.boot()
	size := quiet.settled()
	b.sh("dd if=/dev/urandom of=/var/fill bs=1M count=4000 conv=fsync")
	b.awaitPaused(true)
	if free := smalldisk.Free(t, dir); free < hostspace.ReserveBytes || free >= hostspace.PauseLeast {
		t.Errorf("paused with %d MiB free", free>>20)
	}
	b.awaitSilence() // the pause is recorded before it takes effect
	quiet.goesOn(size)
	smalldisk.Fill(t, dir, hostspace.PauseLeast/2)
	quiet.awaitPaused(true)
	quiet.awaitSilence()
	if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
		t.Fatal(err)
	}
	b.ok(quiet.d.Destroy(quiet.ctx, quiet.ref))

	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	b.awaitPaused(false)
	eventually(t, bootTimeout, "the guest goes on", func() error {
		if free := smalldisk.Free(t, dir); free > 250<<20 && !b.answers() {
			return fmt.Errorf("%d MiB free", free>>20)
		}
		return nil
	})
	b.awaitPaused(true)

	smalldisk.Fill(t, dir, 0)
	b.ok(b.d.Destroy(b.ctx, b.ref))
	if free := smalldisk.Free(t, dir); free < 200<<20 {
		t.Errorf("%d MiB free after the guest that filled the disk is destroyed", free>>20)
	}
	if left := processes(dir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// settled waits until the guest's disk has the same size in two looks that are
// a few seconds apart: late first-boot writes would use up its share.
func (b *box) settled() (size uint64) {
	b.Helper()
	var since time.Time
	eventually(b, bootTimeout, "the guest stops writing", func() error {
		now, err := b.diskBytes()
		if err == nil && now == size && time.Since(since) > 5*time.Second {
			return nil
		}
		if now != size {
			size, since = now, time.Now()
		}
		return fmt.Errorf("its disk occupies %d KiB, %v", now>>10, err)
	})
	return size
}

// diskBytes returns how many bytes of the host's disk the guest's disk has.
func (b *box) diskBytes() (uint64, error) {
	var st syscall.Stat_t
	err := syscall.Stat(filepath.Join(b.d.dir(b.ref), fileRoot), &st)
	return uint64(st.Blocks) * 512, err
}

// goesOn checks that the guest, whose disk had this size, is not paused.
func (b *box) goesOn(size uint64) {
	b.Helper()
	now, _ := b.diskBytes()
	b.Logf("the disk of the quiet guest grew from %d to %d KiB", size>>10, now>>10)
	in, err := b.d.Inspect(b.ctx, b.ref)
	if err != nil || in.Power != backend.PowerRunning || in.Reason != "" {
		b.Errorf("%s: %q, %v; %d MiB free", in.Power, in.Reason, err, smalldisk.Free(b, b.f.StateDir)>>20)
	}
	if _, err := b.client().Health(b.ctx); err != nil {
		b.Errorf("it does not answer: %v; %d MiB free", err, smalldisk.Free(b, b.f.StateDir)>>20)
	}
}

func (b *box) answers() bool {
	ctx, cancel := context.WithTimeout(b.ctx, 3*time.Second)
	defer cancel()
	_, err := b.client().Health(ctx)
	return err == nil
}

// awaitSilence waits until a paused guest no longer answers.
func (b *box) awaitSilence() {
	b.Helper()
	eventually(b, bootTimeout, "the guest does not answer", func() error {
		if b.answers() {
			return errors.New("it answers")
		}
		return nil
	})
}

// awaitPaused waits until the sandbox runs, with its guest paused or not.
func (b *box) awaitPaused(want bool) {
	b.Helper()
	eventually(b, bootTimeout, fmt.Sprintf("paused: %v", want), func() error {
		in, err := b.d.Inspect(b.ctx, b.ref)
		switch paused := strings.Contains(in.Reason, "MiB free, less than "); {
		case err != nil:
			return err
		case in.Power != backend.PowerRunning || paused != want || !paused && in.Reason != "":
			return fmt.Errorf("%s: %q, %d MiB free", in.Power, in.Reason, smalldisk.Free(b, b.f.StateDir)>>20)
		}
		return nil
	})
}
