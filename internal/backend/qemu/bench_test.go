package qemu

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/link"
)

// rawBoot starts QEMU by hand, with the same kernel, initrd and disk, and
// returns how long its guest takes to answer.
func rawBoot(b testing.TB, d *Driver, ref backend.Ref) time.Duration {
	b.Helper()
	h, err := readHandle(d.dir(ref))
	if err != nil {
		b.Fatal(err)
	}
	cfg, err := d.startConfig(b.Context(), h)
	if err != nil {
		b.Fatal(err)
	}
	began := time.Now()
	var files [4]*os.File
	ours := make([]interface{ Close() error }, 4)
	var hostLink *link.HostLink
	for i := range files {
		conn, f, err := socketPair()
		if err != nil {
			b.Fatal(err)
		}
		files[i], ours[i] = f, conn
		if i == 1 {
			hostLink = link.Host(b.Context(), conn)
		}
	}
	cmd := exec.Command(cfg.QEMU, vmArgs(h, cfg, fds{net: 3, control: 4, console: 5, qmp: 6})...) //nolint:gosec // a test's arguments
	cmd.Dir, cmd.ExtraFiles, cmd.Stderr = d.dir(ref), files[:], os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(b.Context(), bootTimeout)
	defer cancel()
	if err := hostLink.WaitUp(ctx); err != nil {
		b.Fatal(err)
	}
	took := time.Since(began)
	_ = hostLink.Close()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	for i := range files {
		_ = files[i].Close()
		_ = ours[i].Close()
	}
	return took
}

// BenchmarkColdBoot compares Create and Start until the guest answers with a
// boot by hand. Both alternate, because the machine's load changes.
func BenchmarkColdBoot(b *testing.B) {
	f := vmFixture(b)
	d, err := f.open()
	if err != nil {
		b.Fatal(err)
	}
	if _, err := d.host.accel(b.Context()); err != nil { // the verdict is there before
		b.Fatal(err)
	}
	var raw, ours []float64
	rounds := max(b.N, 5)
	for i := range rounds {
		hand := f.spec(500)
		if err := d.Create(b.Context(), hand); err != nil {
			b.Fatal(err)
		}
		raw = append(raw, ms(rawBoot(b, d, hand.Ref())))
		if err := d.Destroy(b.Context(), hand.Ref()); err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		x := &box{TB: b, f: f, d: d, ref: f.spec(i).Ref(), ctx: b.Context()}
		x.ok(d.Create(b.Context(), f.spec(i)))
		created := time.Since(began)
		x.ok(d.Start(b.Context(), x.ref))
		started := time.Since(began)
		eventually(b, bootTimeout, "the guest answers", func() error {
			_, err := x.client().Health(b.Context())
			return err
		})
		b.Logf("created %.0f ms, started %.0f ms", ms(created), ms(started))
		ours = append(ours, ms(time.Since(began)))
		if i == 0 {
			time.Sleep(12 * time.Second) // let it fall idle
			b.Logf("shim, idle: %d KiB RSS, %d KiB of it its own", rss(x.noted(shimPID), "VmRSS"), rss(x.noted(shimPID), "RssAnon"))
			b.Logf("QEMU, idle: %d KiB RSS", rss(x.noted(qemuPID), "VmRSS"))
		}
		if err := d.Destroy(b.Context(), x.ref); err != nil {
			b.Fatal(err)
		}
	}
	b.Logf("raw ms: %.0f", raw)
	b.Logf("our ms: %.0f", ours)
	b.ReportMetric(median(raw), "raw-ms")
	b.ReportMetric(median(ours), "ours-ms")
	b.ReportMetric(median(ours)/median(raw), "ratio")
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// rss reads a size of a process in KiB.
func rss(pid int, field string) int {
	b, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, field+":"); ok {
			n, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(v), " kB"))
			return n
		}
	}
	return 0
}
