package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
)

// startSamples is the number of samples of each figure of BenchmarkWarmStart and
// BenchmarkColdStart.
const startSamples = 9

// forkedChildren is the number of children of one fork.
const forkedChildren = 16

// destroyAll destroys all sandboxes.
func (l *lab) destroyAll() {
	l.Helper()
	var list api.List[api.Sandbox]
	if err := json.Unmarshal([]byte(l.ok("--json", "sandbox", "list")), &list); err != nil {
		l.Fatal(err)
	}
	for _, sb := range list.Items {
		l.ok("sandbox", "destroy", strconv.Itoa(sb.VMID))
	}
}

// pauseOfSave returns how long the CPUs of the only guest that was saved stopped.
func (l *lab) pauseOfSave() time.Duration {
	l.Helper()
	logs, err := filepath.Glob(filepath.Join(l.home, "state", "sandboxes", "*", "shim.log"))
	if err != nil {
		l.Fatal(err)
	}
	for _, name := range logs {
		text, err := os.ReadFile(name)
		if err != nil {
			l.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			var entry struct {
				Msg string
				MS  int64
			}
			if json.Unmarshal([]byte(line), &entry) == nil && entry.Msg == "the guest's CPUs stopped for a save" {
				return time.Duration(entry.MS) * time.Millisecond
			}
		}
	}
	l.Fatalf("none of %q has a save", logs)
	return 0
}

// BenchmarkWarmStart compares what starts from a saved guest with the raw boot
// by hand: a sandbox from the request to its first exec (budget 0.15; 0.22 where a first
// access to a page takes more than 3 µs), a whole job (0.45), one child of a fork (0.08; 0.16)
// and the pause of its source (0.02), suspend to disk with the resume and an exec (0.35), and
// a sandbox of the warm pool (0.05). All samples are
// taken in turn.
func BenchmarkWarmStart(b *testing.B) {
	cold, vm := newColdLab(b)
	cold.ok("daemon", "stop")
	l := newLab(b)
	limits := fmt.Sprintf("limits:\n  max_sandboxes: %d\n", forkedChildren+8)
	l.config(limits)
	l.profile("bench", "name: bench\nnetwork: {mode: nat}\nresources: {cores: 2, memory_mb: 1024}\n")
	l.ok("image", "warm", "base", "--profile", "bench")
	fresh := func(name string) {
		l.ok("sandbox", "new", "--name", name, "--profile", "bench")
		l.ok("exec", name, "true")
	}
	var raw, sandbox, job, fork, paused, suspend, pool []time.Duration
	for b.Loop() {
		for i := range startSamples {
			name := "bench-" + strconv.Itoa(i)
			raw = append(raw, timed(func() { vm.boot(b) }))
			sandbox = append(sandbox, timed(func() { fresh(name) }))
			suspend = append(suspend, timed(func() {
				l.ok("sandbox", "suspend", "--to-disk", name)
				l.ok("sandbox", "resume", name)
				l.ok("exec", name, "true")
			}))
			l.ok("sandbox", "destroy", name)
			job = append(job, timed(func() {
				l.ok("job", "run", "--agent", "shell", "--image", "base", "--profile", "bench", "--task", "true")
				l.noSandboxes()
			}))
			fresh("source")
			fork = append(fork, timed(func() {
				l.ok("sandbox", "fork", "source", "--count", strconv.Itoa(forkedChildren), "--name-prefix", "child")
			})/forkedChildren)
			paused = append(paused, l.pauseOfSave())
			l.destroyAll()

			l.ok("daemon", "stop") // it has no pool, so that nothing is made beside the other samples
			l.config(limits + "warm_pool: {base/bench: 1}\n")
			l.waiting()
			pool = append(pool, timed(func() { fresh("pooled") }))
			l.ok("daemon", "stop")
			l.config(limits)
			l.destroyAll()
		}
	}
	fresh("counted")
	l.reportFaults(b, "one warm start")
	l.ok("sandbox", "destroy", "counted")
	reportFaultCost(b)
	base := report(b, "raw boot by hand", raw)
	for _, m := range []struct {
		name, unit string
		of         []time.Duration
	}{
		{"sandbox new and exec true", "sandbox/raw", sandbox},
		{"sandbox new from the pool and exec true", "pool/raw", pool},
		{"job run true, VM destroyed", "job/raw", job},
		{fmt.Sprintf("one of %d children of a fork", forkedChildren), "child/raw", fork},
		{"pause of the source of a fork", "pause/raw", paused},
		{"suspend to disk, resume and exec true", "suspend/raw", suspend},
	} {
		b.ReportMetric(float64(report(b, m.name, m.of))/float64(base), m.unit)
	}
}
