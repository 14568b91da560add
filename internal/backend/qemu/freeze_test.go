package qemu

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// patchKernel makes the guest's kernel patch its own code while other
// processes run it: each line of output is one round of switching static keys
// that guard the scheduler and the timers.
const patchKernel = `
cd /proc/sys/kernel || exit
for i in 1 2 3; do (while :; do /bin/true; done) & done
trap 'kill 0' EXIT
while :; do
	echo 1 >sched_schedstats; echo 0 >timer_migration
	echo 0 >sched_schedstats; echo 1 >timer_migration
	echo round
done`

const (
	// patchRounds is more than most guests with a thread for each CPU survive;
	// patchRoundsFull is many times that.
	patchRounds, patchRoundsFull = 100, 1500
	// freezeTakes bounds the wait for a freeze of such a guest. It took
	// between 23 and 154 seconds.
	freezeTakes = 6 * time.Minute
	// frozenAfter is how long a guest is silent that is expected to freeze, and that
	// is not just slow.
	frozenAfter = 30 * time.Second
)

// TestEmulatedGuestSurvivesKernelPatching switches static keys in a guest of two
// CPUs on a busy host. The guest must not freeze.
func TestEmulatedGuestSurvivesKernelPatching(t *testing.T) {
	b := newBox(t, vmFixture(t), twoCPUs)
	most, began := patchRounds, time.Now()
	if sample.Full() {
		most = patchRoundsFull
	}
	if rounds, frozen := b.patch(most, 0); frozen {
		t.Fatalf("the guest froze after %d rounds", rounds)
	}
	t.Logf("the guest survived %d rounds, %s", most, time.Since(began).Round(time.Second))
	if got := b.output("echo alive"); got != "alive" {
		t.Errorf("%q", got)
	}
}

// TestThreadsFreezeAGuest shows that the test above provokes the fault that it
// is about: with a thread for each CPU the guest freezes. When that happens is
// chance, so it runs with the full tests only.
func TestThreadsFreezeAGuest(t *testing.T) {
	f := vmFixture(t)
	if !sample.Full() {
		t.Skip("skipped: AGENTLAB_TEST_FULL is not 1, and this waits for a freeze that comes by chance")
	}
	f.QEMU = multiThreaded(t)
	b := newBox(t, f, twoCPUs)
	began := time.Now()
	rounds, frozen := b.patch(0, freezeTakes)
	if !frozen {
		t.Fatalf("the guest did not freeze in %d rounds, %s", rounds, time.Since(began))
	}
	t.Logf("the guest froze after %d rounds, %s", rounds, time.Since(began).Round(time.Second))
}

func twoCPUs(s *backend.Spec) { s.Resources = agentlab.Resources{Cores: 2, MemoryMB: 512} }

// multiThreaded returns a program that runs QEMU with a thread for each CPU.
func multiThreaded(t *testing.T) string {
	t.Helper()
	qemu, err := exec.LookPath(qemuvm.DefaultQEMU)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(stateDir(t), "qemu")
	script := "#!/bin/bash\nexec " + qemu + ` "${@/thread=single/thread=multi}"` + "\n"
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// patch boots the guest and lets it patch its kernel until it did so for the
// given rounds (0: no end) or time (0: no end), or is silent for too long.
func (b *box) patch(most int, within time.Duration) (rounds int, frozen bool) {
	b.Helper()
	b.boot()
	b.loadHost()
	lines := make(chan struct{})
	conn := b.sh(patchKernel)
	go func() {
		defer close(lines)
		frames := stream.NewReader(conn)
		for {
			kind, p, err := frames.Next()
			if err != nil || kind == stream.Exit {
				return
			}
			for in := bufio.NewScanner(strings.NewReader(string(p))); kind == stream.Stdout && in.Scan(); {
				lines <- struct{}{}
			}
		}
	}()
	defer func() {
		_ = conn.Close()
		for range lines {
		}
	}()
	var end <-chan time.Time
	limit := guard.Patience
	if within > 0 {
		end, limit = time.After(within), frozenAfter
	}
	silence := time.NewTimer(limit)
	defer silence.Stop()
	for ; most == 0 || rounds < most; rounds++ {
		select {
		case _, ok := <-lines:
			if !ok {
				b.Fatalf("the guest stopped patching after %d rounds", rounds)
			}
			silence.Reset(limit)
		case <-silence.C:
			return rounds, true
		case <-end:
			return rounds, false
		}
	}
	return rounds, false
}

// loadHost keeps every CPU of the host busy until the test ends.
func (b *box) loadHost() {
	ctx, cancel := context.WithCancel(context.Background())
	b.Cleanup(cancel)
	for range runtime.NumCPU() {
		go func() {
			for ctx.Err() == nil {
			}
		}()
	}
}
