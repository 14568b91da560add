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
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// rawBoot starts QEMU by hand, with the same kernel, initrd and disk, and
// returns how long its guest takes to answer.
func rawBoot(b testing.TB, d *Driver, ref backend.Ref) time.Duration {
	b.Helper()
	h, err := vmdir.ReadHandle(d.dir(ref))
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
		conn, f, err := qemuvm.SocketPair()
		if err != nil {
			b.Fatal(err)
		}
		files[i], ours[i] = f, conn
		if i == 1 {
			hostLink = link.Host(b.Context(), conn)
		}
	}
	cmd := exec.Command(cfg.QEMU, vmArgs(h, cfg, fds{net: 3, control: 4, console: 5, qmp: 6})...)
	cmd.Dir, cmd.ExtraFiles, cmd.Stderr = d.dir(ref), files[:], os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if err := hostos.EndWithParent(cmd.SysProcAttr); err != nil {
		b.Skip(err)
	}
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
	if _, err := d.host.Accel(b.Context()); err != nil { // the verdict is there before
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

// BenchmarkFork saves a running sandbox and starts 16 others from it, beside boots
// by hand.
func BenchmarkFork(b *testing.B) {
	const children = 16
	f := vmFixture(b)
	x := newBox(b, f, nil)
	x.ctx = b.Context()
	x.boot()
	x.output("systemctl is-system-running --wait; echo 3 >/proc/sys/vm/drop_caches")
	boot := x.bootID()
	var raw, saved, child []float64
	for range max(b.N, 5) {
		hand := f.spec(500)
		x.ok(x.d.Create(x.ctx, hand))
		raw = append(raw, ms(rawBoot(b, x.d, hand.Ref())))
		x.ok(x.d.Destroy(x.ctx, hand.Ref()))
		began := time.Now()
		ref := x.save()
		saved = append(saved, ms(time.Since(began)))
		if len(raw) < max(b.N, 5) {
			x.ok(x.d.DeleteSnapshot(x.ctx, ref))
			continue
		}
		began = time.Now()
		for i := range children {
			sp := f.spec(2 + i)
			sp.From = &ref
			one := time.Now()
			c := &box{TB: b, f: f, d: x.d, ref: sp.Ref(), ctx: x.ctx}
			c.ok(c.d.Create(c.ctx, sp))
			c.boot()
			child = append(child, ms(time.Since(one)))
			if id := c.bootID(); id != boot {
				b.Errorf("child %d has boot %s, want %s", i, id, boot)
			}
		}
		b.Logf("%d children in %.0f ms", children, ms(time.Since(began)))
	}
	log, err := os.ReadFile(filepath.Join(x.d.dir(x.ref), shimLog))
	x.ok(err)
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "CPUs stopped") {
			b.Logf("%s", strings.TrimSpace(line))
		}
	}
	b.Logf("raw ms: %.0f", raw)
	b.Logf("save ms: %.0f", saved)
	b.Logf("child ms: %.0f", child)
	b.ReportMetric(median(raw), "raw-ms")
	b.ReportMetric(median(saved), "save-ms")
	b.ReportMetric(median(child), "child-ms")
	b.ReportMetric(median(child)/median(raw), "child-ratio")
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
