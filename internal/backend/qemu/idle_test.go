package qemu

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// program builds a program of the module as a release has it.
func program(b testing.TB, name string) string {
	b.Helper()
	dir, err := guard.Programs("../../..", "./cmd/"+name)
	if err != nil {
		b.Fatal(err)
	}
	return filepath.Join(dir, name)
}

// cpuTime returns the CPU time of a process.
func cpuTime(b testing.TB, pid int) time.Duration {
	b.Helper()
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		b.Fatal(err)
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var ticks int
	for _, f := range fields[11:13] { // utime and stime
		n, err := strconv.Atoi(f)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// uniqueMB returns the memory that only a process has, as supervisor.Dir.Memory
// counts it.
func uniqueMB(b testing.TB, pid int) float64 {
	b.Helper()
	sizes, err := supervisor.ReadSizes("/proc/" + strconv.Itoa(pid) + "/smaps_rollup")
	if err != nil {
		b.Fatal(err)
	}
	return float64(sizes["Private_Dirty"]) / 1e6
}

// BenchmarkIdleClones starts copies of a template, gives each an identity, and
// measures their memory and CPU time while they are idle. AGENTLAB_BENCH_CLONES
// is how many; default 40.
func BenchmarkIdleClones(b *testing.B) {
	most := 40
	if v, err := strconv.Atoi(os.Getenv("AGENTLAB_BENCH_CLONES")); err == nil {
		most = v
	}
	f := warmFixture(b)
	d, err := f.open()
	if err != nil {
		b.Fatal(err)
	}
	d.cfg.Supervisor = []string{program(b, "agentlabd"), "vmm"}
	var all []*box
	for _, n := range []int{1, 5, 10, 20, 40} {
		if n > most {
			break
		}
		for i := len(all); i < n; i++ {
			x := &box{TB: b, f: f, d: d, ref: f.spec(i + 1).Ref(), ctx: b.Context()}
			x.ok(d.Create(b.Context(), f.spec(i+1)))
			x.boot()
			x.identify()
			all = append(all, x)
		}
		time.Sleep(15 * time.Second) // until they are idle
		over := 15 * time.Second
		if n == most {
			over = time.Minute
		}
		cpu := func() (sum time.Duration) {
			for _, x := range all {
				sum += cpuTime(b, x.noted(qemuPID)) + cpuTime(b, x.noted(shimPID))
			}
			return sum
		}
		before := cpu()
		time.Sleep(over)
		percent := 100 * (cpu() - before).Seconds() / over.Seconds() / float64(n)
		var vm, shim, whole float64
		for _, x := range all {
			vm += uniqueMB(b, x.noted(qemuPID)) / float64(n)
			shim += uniqueMB(b, x.noted(shimPID)) / float64(n)
			m, err := d.Memory(b.Context(), x.ref)
			x.ok(err)
			whole += float64(m.Proportional) / 1e6 / float64(n)
		}
		b.Logf("%2d clones: each %.1f MB unique (QEMU %.1f, supervisor %.1f), %.1f MB proportional, %.2f %% CPU over %s", n, vm+shim, vm, shim, whole, percent, over)
		b.ReportMetric(vm+shim, "unique-MB-"+strconv.Itoa(n))
		b.ReportMetric(percent, "cpu-%-"+strconv.Itoa(n))
		if n == most {
			break
		}
	}
}
