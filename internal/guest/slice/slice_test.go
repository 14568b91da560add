//go:build linux

package slice

import (
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/test/guard"
)

const mib = 1 << 20

// What remains for the system is a tenth, within limits, and never more than half.
func TestLimits(t *testing.T) {
	for _, c := range []struct{ memory, slice int64 }{
		{128, 64}, {512, 384}, {2048, 2048 - 204}, {16384, 16384 - 512},
	} {
		l := limitsFor(c.memory*mib, 8000)
		if got := (l.memory + mib - 1) / mib; got != c.slice || l.nested != l.memory/4*3 || l.tasks != 6000 {
			t.Errorf("of %d MiB the slice gets %d MiB, virtual machines %d, tasks %d", c.memory, got, l.nested/mib, l.tasks)
		}
	}
	units := limitsFor(1024*mib, 8000).units()
	for name, want := range map[string]string{
		"agentlab.slice":                "MemoryMax=939524096\nTasksMax=6000\nCPUWeight=80\n",
		"agentlab-nested.slice":         "MemoryMax=704643072\nCPUWeight=50\n",
		"machine.slice.d/agentlab.conf": "MemoryMax=704643072\n",
		"ssh.service.d/agentlab.conf":   "Slice=agentlab.slice\n",
	} {
		if !strings.Contains(units[name], want) {
			t.Errorf("unit %s is\n%s", name, units[name])
		}
	}
}

// fakeSlice is a slice in a directory that takes the place of the file system of the
// cgroups.
func fakeSlice(t *testing.T, log *strings.Builder) *Slice {
	t.Helper()
	s := &Slice{root: t.TempDir(), proc: t.TempDir(), limits: limits{memory: 300, nested: 200, tasks: 100}, log: slog.New(slog.NewTextHandler(log, nil))}
	for _, group := range []string{guestapi.Slice, guestapi.NestedSlice, agentsGroup} {
		put(t, filepath.Join(s.root, group, "memory.events"), "low 0\noom_kill 0\n")
	}
	put(t, filepath.Join(s.root, agentsGroup, "cgroup.procs"), "")
	return s
}

func put(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (s *Slice) read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(s.root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Processes start in the slice, also after its cgroups were removed.
func TestAdd(t *testing.T) {
	var log strings.Builder
	s := fakeSlice(t, &log)
	var first, second syscall.SysProcAttr
	s.Add(&first)
	if !first.UseCgroupFD || first.CgroupFD != int(s.agents.Fd()) {
		t.Fatalf("%+v\n%s", first, log.String())
	}
	for name, want := range map[string]string{
		"agentlab.slice/memory.max": "300", "agentlab.slice/pids.max": "100", "agentlab.slice/cpu.weight": "80",
		"agentlab.slice/agentlab-nested.slice/memory.max": "200", "agentlab.slice/agentlab-nested.slice/cpu.weight": "50",
	} {
		if got := s.read(t, name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if err := os.RemoveAll(filepath.Join(s.root, guestapi.Slice)); err != nil {
		t.Fatal(err)
	}
	s.Add(&second)
	if !second.UseCgroupFD || s.read(t, "agentlab.slice/memory.max") != "300" {
		t.Errorf("after the removal: %+v\n%s", second, log.String())
	}
	_ = s.kills.Close()
}

// Without cgroups, commands still start, and the log says that they have no limits.
func TestNoCgroups(t *testing.T) {
	var log strings.Builder
	logger := slog.New(slog.NewTextHandler(&log, nil))
	var attr syscall.SysProcAttr
	s := Open(t.TempDir(), logger)
	s.Add(&attr)
	s.WatchVMs("kvm_amd")
	if s != nil || attr.UseCgroupFD || !strings.Contains(log.String(), "not limited") {
		t.Errorf("%v %+v\n%s", s, attr, log.String())
	}
	s = &Slice{root: filepath.Join(t.TempDir(), "none", "at", "all"), log: logger}
	log.Reset()
	s.Add(&attr)
	if attr.UseCgroupFD || !strings.Contains(log.String(), "not limited") {
		t.Errorf("%+v\n%s", attr, log.String())
	}
}

func TestReadKills(t *testing.T) {
	s := fakeSlice(t, new(strings.Builder))
	for _, c := range []struct {
		slice, nested string
		want          guestapi.MemoryKills
	}{
		{"oom 9\noom_kill 5\n", "oom_kill 2\noom_group_kill 7\n", guestapi.MemoryKills{Nested: 2, Other: 3}},
		{"oom_kill 1\n", "oom_kill 2\n", guestapi.MemoryKills{Nested: 2}}, // read at different times
		{"oom_kill x\n", "", guestapi.MemoryKills{}},
	} {
		put(t, filepath.Join(s.root, guestapi.Slice, "memory.events"), c.slice)
		put(t, filepath.Join(s.root, guestapi.NestedSlice, "memory.events"), c.nested)
		if got := ReadKills(s.root); got != c.want {
			t.Errorf("%q, %q: %+v, want %+v", c.slice, c.nested, got, c.want)
		}
	}
	if got := ReadKills(t.TempDir()); got.Total() != 0 {
		t.Errorf("without cgroups: %+v", got)
	}
}

// lines is a log that can be waited for.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

// Each kill is logged once.
func TestKillsAreLogged(t *testing.T) {
	s := fakeSlice(t, new(strings.Builder))
	log := make(lines, 8)
	s.log = slog.New(slog.NewTextHandler(log, nil))
	put(t, filepath.Join(s.root, guestapi.Slice, "memory.events"), "oom_kill 4\n") // before
	f, err := s.watchKills()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	put(t, filepath.Join(s.root, guestapi.NestedSlice, "memory.events"), "oom_kill 0\noom 1\n") // no kill
	// Written whole: a file that is read while it is empty has no kills.
	k, err := os.OpenFile(filepath.Join(s.root, guestapi.Slice, "memory.events"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = k.Close() }()
	if _, err := k.WriteString("oom_kill 5\n"); err != nil {
		t.Fatal(err)
	}
	select {
	case line := <-log:
		if !strings.Contains(line, "has killed 5 processes: the memory was used up") {
			t.Error(line)
		}
	case <-time.After(guard.Patience):
		t.Fatal("nothing was logged")
	}
	if len(log) != 0 {
		t.Errorf("and %s", <-log)
	}
}

// Virtual machines are killed first. Those that users started move to the cgroup of
// nested guests; those of containers and services stay.
func TestConfineVMs(t *testing.T) {
	s := fakeSlice(t, new(strings.Builder))
	procs := filepath.Join(nestedGroup, "cgroup.procs")
	put(t, filepath.Join(s.root, procs), "")
	for i, c := range []struct {
		group, fd     string
		killed, moved bool
	}{
		{"agentlab.slice/agents", "/dev/null", false, false},
		{"agentlab.slice/agents", "/dev/kvm", true, true},
		{"agentlab.slice/ssh.service", "anon_inode:kvm-vm", true, true},
		{"user.slice/user-1000.slice/session-3.scope", "anon_inode:kvm-vcpu:0", true, true},
		{"user.slice/user-1000.slice/user@1000.service", "/dev/kvm", true, false},
		{"system.slice/docker-1234.scope", "/dev/kvm", true, false},
		{"agentlab.slice/agentlab-nested.slice/guests", "/dev/kvm", true, false},
	} {
		pid := strconv.Itoa(1000 + i)
		dir := filepath.Join(s.proc, pid)
		put(t, filepath.Join(dir, "cgroup"), "0::/"+c.group+"\n")
		put(t, filepath.Join(dir, "fd", "x"), "")
		if err := os.Symlink(c.fd, filepath.Join(dir, "fd", "7")); err != nil {
			t.Fatal(err)
		}
		put(t, filepath.Join(s.root, procs), "")
		put(t, filepath.Join(dir, "oom_score_adj"), "")
		s.confineVMs("999")
		adj, err := os.ReadFile(filepath.Join(dir, "oom_score_adj"))
		if err != nil {
			t.Fatal(err)
		}
		if killed, moved := string(adj) == "1000", s.read(t, procs) == pid; killed != c.killed || moved != c.moved {
			t.Errorf("%s with %s: killed first %t, moved %t", c.group, c.fd, killed, moved)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	own := filepath.Join(s.proc, "999")
	put(t, filepath.Join(own, "oom_score_adj"), "-900")
	if err := os.Mkdir(filepath.Join(own, "fd"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/kvm", filepath.Join(own, "fd", "3")); err != nil {
		t.Fatal(err)
	}
	s.confineVMs("999")
	if adj, _ := os.ReadFile(filepath.Join(own, "oom_score_adj")); string(adj) != "-900" {
		t.Error("the server is killed first")
	}
}
