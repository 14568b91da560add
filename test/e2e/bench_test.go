package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/link"
)

// Every benchmark here measures both sides of its ratio in one run, in turn,
// and prints the raw samples. Budgets are those of the project's first slice.

const benchSamples = 5

// report prints raw samples in milliseconds and returns the median.
func report(b *testing.B, name string, d []time.Duration) time.Duration {
	b.Helper()
	var raw []string
	for _, v := range d {
		raw = append(raw, strconv.FormatInt(v.Milliseconds(), 10))
	}
	sorted := slices.Sorted(slices.Values(d))
	m := sorted[len(sorted)/2]
	b.Logf("%s: median %d ms of [%s]", name, m.Milliseconds(), strings.Join(raw, " "))
	return m
}

func timed(fn func()) time.Duration {
	start := time.Now()
	fn()
	return time.Since(start)
}

// rawVM is what a sandbox's VM was started with, to start the same by hand.
type rawVM struct {
	qemu, kernel, initrd, root, args string
	machine                          []string
}

// inspectVM reads the running QEMU's own command line.
func (l *lab) inspectVM() rawVM {
	l.Helper()
	pids := l.processes("qemu-system")
	if len(pids) != 1 {
		l.Fatalf("%d QEMUs", len(pids))
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pids[0]))
	if err != nil {
		l.Fatal(err)
	}
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pids[0]))
	if err != nil {
		l.Fatal(err)
	}
	argv := strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
	value := func(flag string) string {
		i := slices.Index(argv, flag)
		if i < 0 || i+1 == len(argv) {
			l.Fatalf("no %s in %q", flag, argv)
		}
		return argv[i+1]
	}
	vm := rawVM{qemu: exe, kernel: value("-kernel"), initrd: value("-initrd"), args: value("-append")}
	for _, flag := range []string{"-machine", "-global", "-accel", "-cpu"} {
		vm.machine = append(vm.machine, flag, value(flag))
	}
	dir := filepath.Join(cacheDir(l), "images", "base")
	current, err := os.ReadFile(filepath.Join(dir, "current"))
	if err != nil {
		l.Fatal(err)
	}
	vm.root = filepath.Join(dir, strings.TrimSpace(string(current)), "root.img")
	return vm
}

// boot starts the same kernel, initrd and disk by hand with plain QEMU, with
// no network and no supervisor, and waits for the first answer.
func (vm rawVM) boot(b *testing.B) {
	b.Helper()
	_, stop := vm.start(b)
	stop()
}

// start boots by hand, with more arguments for QEMU, and returns when the
// guest answers on the control channel.
func (vm rawVM) start(b *testing.B, more ...string) (guest *control.Client, stop func()) {
	b.Helper()
	dir := b.TempDir()
	overlay := filepath.Join(dir, "root.qcow2")
	if out, err := exec.Command("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", vm.root, overlay).CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	socket := filepath.Join(dir, "c.sock")
	args := append([]string{"-m", "1024", "-smp", "2", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", vm.kernel, "-initrd", vm.initrd, "-append", vm.args,
		"-device", "virtio-serial-device", "-chardev", "null,id=con", "-device", "virtconsole,chardev=con",
		"-chardev", "socket,id=ctl,path=" + socket + ",server=on,wait=off", "-device", "virtserialport,chardev=ctl,name=agentlab.control",
		"-drive", "if=none,id=root,format=qcow2,file=" + overlay, "-device", "virtio-blk-device,drive=root,serial=agentlab-root"}, vm.machine...)
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	cmd := exec.CommandContext(ctx, vm.qemu, append(args, more...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		cancel()
		b.Fatal(err)
	}
	end := []func(){cancel, func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }}
	stop = sync.OnceFunc(func() {
		for _, f := range slices.Backward(end) {
			f()
		}
	})
	b.Cleanup(stop)
	var conn net.Conn
	if !eventually(settleLimit, func() bool {
		var err error
		conn, err = net.Dial("unix", socket)
		return err == nil
	}) {
		b.Fatalf("QEMU did not start: %s", stderr.String())
	}
	host := link.Host(ctx, conn)
	end = append(end, func() { _ = host.Close() })
	guest = control.New(host.Dial)
	if !eventually(settleLimit, func() bool {
		_, err := guest.Health(ctx)
		return err == nil
	}) {
		b.Fatalf("no answer: %s", stderr.String())
	}
	return guest, stop
}

// newColdLab makes a home whose sandboxes boot, and returns with what QEMU has
// to be started to boot the same guest by hand.
func newColdLab(b *testing.B) (*lab, rawVM) {
	b.Helper()
	l := newLab(b)
	l.config("qemu:\n  template_cache_gb: 0\n")
	l.ok("sandbox", "new", "--name", "first", "--cores", "2", "--memory-mb", "1024")
	vm := l.inspectVM()
	l.ok("sandbox", "destroy", "first")
	return l, vm
}

// BenchmarkColdStart compares a sandbox that boots, from the request to its first
// exec (budget 1.30), a whole job (1.6) and one with a repository (2.2), with the raw boot
// by hand.
func BenchmarkColdStart(b *testing.B) {
	l, vm := newColdLab(b)
	repo := sampleRepo(b)
	var raw, sandbox, job, jobRepo []time.Duration
	for b.Loop() {
		for i := range startSamples {
			name := fmt.Sprintf("bench-%d", i)
			raw = append(raw, timed(func() { vm.boot(b) }))
			sandbox = append(sandbox, timed(func() {
				l.ok("sandbox", "new", "--name", name, "--cores", "2", "--memory-mb", "1024")
				l.ok("exec", name, "true")
			}))
			l.ok("sandbox", "destroy", name)
			job = append(job, timed(func() { l.ok("job", "run", "--agent", "shell", "--image", "base", "--task", "true"); l.noSandboxes() }))
			jobRepo = append(jobRepo, timed(func() {
				l.ok("job", "run", "--repo", repo, "--agent", "shell", "--image", "base", "--task", "true")
				l.noSandboxes()
			}))
		}
	}
	reportFaultCost(b)
	base := report(b, "raw boot by hand", raw)
	b.ReportMetric(float64(report(b, "sandbox new and exec true", sandbox))/float64(base), "sandbox/raw")
	b.ReportMetric(float64(report(b, "job run true, VM destroyed", job))/float64(base), "job/raw")
	b.ReportMetric(float64(report(b, "the same with a repository", jobRepo))/float64(base), "jobrepo/raw")
}

// rss is a process's resident memory in MiB.
func rss(tb testing.TB, pid int) float64 {
	tb.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		tb.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if kb, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.Fields(kb)[0])
			if err != nil {
				tb.Fatal(err)
			}
			return float64(n) / 1024
		}
	}
	tb.Fatal("no VmRSS")
	return 0
}

// cpuTicks is the processor time that a process has used, in clock ticks.
func cpuTicks(tb testing.TB, pid int) int {
	tb.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		tb.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	f := strings.Fields(rest)
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return user + system
}

// BenchmarkSupervisorMemory measures an idle supervisor with its network (budget
// 25 MiB).
func BenchmarkSupervisorMemory(b *testing.B) {
	l := newLab(b)
	l.ok("sandbox", "new", "--name", "idle")
	l.ok("exec", "idle", "true")
	var worst float64
	for b.Loop() {
		for range benchSamples {
			time.Sleep(time.Second) // what is measured is idleness
			v := rss(b, l.processes("vmm")[0])
			b.Logf("supervisor: %.1f MiB", v)
			worst = max(worst, v)
		}
	}
	b.ReportMetric(worst, "MiB")
}

// BenchmarkDaemon measures the daemon with the fake driver, whose guests are in its
// process: memory and idle processor time with 100 sandboxes (budget 60 MiB, about 0),
// 1,000, and 10,000 (budget 120 MiB, 1 %), 'status' (budget 50 ms, 10 KB at 10,000),
// 1,000 sandboxes through the API, and 'sandbox list' at 10,000 against 1,000 (budget 12
// times; of a page of default length 1.5).
func BenchmarkDaemon(b *testing.B) {
	l := newLabIn(b, newHome(b)) // without images
	l.testDaemon()
	l.config("backend: fake\nlimits:\n  max_sandboxes: 20000\nvmid_range:\n  first: 1000\n  last: 99999\n")
	l.ok("daemon", "start")
	pid := l.processes("agentlabd", "run")[0]
	c := l.client()
	made := 0
	fill := func(total int) {
		for ; made < total; made++ {
			if _, err := c.CreateSandbox(b.Context(), api.SandboxCreate{Name: fmt.Sprintf("s-%d", made)}); err != nil {
				b.Fatal(err)
			}
		}
		l.allReady(b, total)
	}
	for b.Loop() {
		fill(100)
		benchIdle(b, pid, 100)
		var status []time.Duration
		for range benchSamples {
			status = append(status, timed(func() { l.ok("status") }))
		}
		b.ReportMetric(float64(report(b, "status", status).Microseconds())/1000, "status-ms")
		b.ReportMetric(timed(func() { fill(1000) }).Seconds(), "900-creates-s")
		benchIdle(b, pid, 1000)
		small, page := benchList(b, c, 1000, 0), benchList(b, c, 1000, benchPage)
		b.ReportMetric(timed(func() { fill(10000) }).Seconds(), "9000-creates-s")
		b.ReportMetric(float64(benchList(b, c, 10000, 0))/float64(small), "list10k/1k")
		b.ReportMetric(float64(benchList(b, c, 10000, benchPage))/float64(page), "page10k/1k")
		benchIdle(b, pid, 10000)
		s, err := c.Status(b.Context())
		text, jerr := json.Marshal(s)
		if err = cmp.Or(err, jerr); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(len(text))/1000, "status-KB-at-10000")
	}
	l.ok("daemon", "stop")
	if err := os.RemoveAll(filepath.Join(l.home, "state")); err != nil {
		b.Fatal(err)
	}
}

// benchIdle measures an idle daemon with total sandboxes. Before, it waits until what has
// to do with their starts has ended.
func benchIdle(b *testing.B, pid, total int) {
	b.Helper()
	const span = 30
	time.Sleep(span * time.Second)
	before := cpuTicks(b, pid)
	time.Sleep(span * time.Second) // what is measured is idleness
	b.ReportMetric(float64(cpuTicks(b, pid)-before)/span, fmt.Sprintf("idle-cpu-%%-at-%d", total))
	b.ReportMetric(rss(b, pid), fmt.Sprintf("MiB-at-%d", total))
}

// allReady waits until all sandboxes of the fake driver are up.
func (l *lab) allReady(b *testing.B, total int) {
	b.Helper()
	if !eventually(commandLimit, func() bool {
		s, err := l.client().Status(context.Background())
		return err == nil && s.Sandboxes["READY"] == total
	}) {
		s, err := l.client().Status(context.Background())
		b.Fatalf("not all of %d are ready: %v, %v", total, s.Sandboxes, err)
	}
}

// benchPage is the default length of a page.
const benchPage = 1000

// benchList lists at most limit of the sandboxes that exist; 0 means all.
func benchList(b *testing.B, c *client.Client, exist, limit int) time.Duration {
	b.Helper()
	var d []time.Duration
	for range benchSamples {
		d = append(d, timed(func() {
			n := 0
			for _, err := range c.EachSandbox(b.Context(), client.SandboxQuery{Limit: limit}) {
				if err != nil {
					b.Fatal(err)
				}
				n++
			}
			if n != exist && n != limit {
				b.Fatalf("listed %d of %d", n, exist)
			}
		}))
	}
	return report(b, fmt.Sprintf("sandbox list at %d, limit %d", exist, limit), d)
}
