//go:build linux

package slice

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
)

const (
	agentsGroup = guestapi.Slice + "/agents"       // what this server starts
	nestedGroup = guestapi.NestedSlice + "/guests" // processes that have a virtual machine
	loginGroup  = guestapi.Slice + "/ssh.service"
	unitDir     = "/run/systemd/system"
)

// Slice is agentlab.slice. nil does nothing.
type Slice struct {
	root   string // file system of the cgroups
	proc   string // file system of the processes
	limits limits
	log    *slog.Logger

	vms sync.Once // watches virtual machines

	mu     sync.Mutex
	agents *os.File // directory of agentsGroup; nil if it could not be made
	kills  *os.File // watches the kills; may be nil
}

// limits are the limits of agentlab.slice, and of nested guests in it.
type limits struct{ memory, nested, tasks int64 }

// limitsFor returns the limits for a guest with an amount of memory, in bytes, and a
// number of threads that its kernel can have. What the slice cannot have remains for
// the kernel, the distribution's services and this server.
func limitsFor(memory, threads int64) limits {
	reserve := min(max(memory/10, 128<<20), 512<<20)
	l := limits{memory: max(memory-reserve, memory/2), tasks: threads / 4 * 3}
	l.nested = l.memory / 4 * 3
	return l
}

// units returns the units of systemd, by file name, with the same limits: systemd
// sets those of its units when a service in the slice starts.
func (l limits) units() map[string]string {
	return map[string]string{
		guestapi.Slice: fmt.Sprintf("[Unit]\nDescription=AgentLab: what users and agents run\nDefaultDependencies=no\n\n"+
			"[Slice]\nMemoryMax=%d\nTasksMax=%d\nCPUWeight=%d\n", l.memory, l.tasks, agentsWeight),
		filepath.Base(guestapi.NestedSlice): fmt.Sprintf("[Unit]\nDescription=AgentLab: nested virtual machines\nDefaultDependencies=no\n\n"+
			"[Slice]\nMemoryMax=%d\nCPUWeight=%d\n", l.nested, nestedWeight),
		// Virtual machines of libvirt.
		"machine.slice.d/agentlab.conf": fmt.Sprintf("[Slice]\nMemoryMax=%d\nCPUWeight=%d\n", l.nested, nestedWeight),
		// sshd itself is never killed. If a process of a login is, it continues.
		"ssh.service.d/agentlab.conf":  "[Service]\nSlice=" + guestapi.Slice + "\nOOMPolicy=continue\n",
		"init.scope.d/agentlab.conf":   "[Scope]\nMemoryMin=48M\n", // systemd, and this server
		"system.slice.d/agentlab.conf": "[Slice]\nMemoryMin=48M\n",
	}
}

// Weights of the CPU; that of other slices is 100.
const agentsWeight, nestedWeight = 80, 50

// Open sets up the slice. It may have been set up before. It returns nil if the
// guest has no cgroups.
func Open(root string, log *slog.Logger) *Slice {
	cgroups := filepath.Join("/", root, Root)
	var st unix.Statfs_t
	if err := unix.Statfs(cgroups, &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		log.Warn("what users run is not limited: there are no cgroups", "dir", cgroups)
		return nil
	}
	s := &Slice{root: cgroups, proc: "/proc", limits: limitsFor(memTotal(), threadsMax()), log: log}
	for name, text := range s.limits.units() {
		if err := writeUnit(filepath.Join("/", root, unitDir, name), text); err != nil {
			log.Warn("a unit of systemd was not written", "unit", name, "err", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open()
	return s
}

// open makes the cgroups, and watches them. s.mu is held.
func (s *Slice) open() {
	if s.kills != nil {
		_ = s.kills.Close() // of cgroups that are gone
	}
	s.agents, s.kills = nil, nil
	err := s.make()
	if err == nil {
		s.agents, err = os.Open(filepath.Join(s.root, agentsGroup))
	}
	if err != nil {
		s.log.Warn("what users run is not limited", "err", err)
		return
	}
	if s.kills, err = s.watchKills(); err != nil {
		s.log.Warn("the end of processes without memory is not reported", "err", err)
	}
}

// make creates the cgroups. Without the limit of memory it fails; others may be
// missing.
func (s *Slice) make() error {
	l := s.limits
	for _, dir := range []string{guestapi.Slice, agentsGroup, guestapi.NestedSlice, nestedGroup} {
		parent := filepath.Dir(dir)
		for _, controller := range []string{"memory", "pids", "cpu"} {
			_ = s.set(parent, "cgroup.subtree_control", "+"+controller)
		}
		if err := os.Mkdir(filepath.Join(s.root, dir), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	_ = s.set(guestapi.Slice, "pids.max", strconv.FormatInt(l.tasks, 10))
	_ = s.set(guestapi.Slice, "cpu.weight", strconv.Itoa(agentsWeight))
	_ = s.set(guestapi.NestedSlice, "cpu.weight", strconv.Itoa(nestedWeight))
	return errors.Join(
		s.set(guestapi.Slice, "memory.max", strconv.FormatInt(l.memory, 10)),
		s.set(guestapi.NestedSlice, "memory.max", strconv.FormatInt(l.nested, 10)),
	)
}

func (s *Slice) set(group, name, value string) error {
	return os.WriteFile(filepath.Join(s.root, group, name), []byte(value), 0)
}

// writeUnit writes a file unless it has the text.
func writeUnit(name, text string) error {
	if old, err := os.ReadFile(name); err == nil && string(old) == text {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, []byte(text), 0o644)
}

// Add makes a process start in the slice. If its cgroups are gone, it makes them again:
// systemd removes a slice without processes when the last service in it has stopped.
func (s *Slice) Add(attr *syscall.SysProcAttr) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var st unix.Stat_t
	if s.agents == nil || unix.Fstatat(int(s.agents.Fd()), "cgroup.procs", &st, 0) != nil {
		s.open()
	}
	if s.agents != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, int(s.agents.Fd())
	}
}

// WatchVMs confines the virtual machines of a module of the kernel. It does nothing if
// they are watched already.
func (s *Slice) WatchVMs(module string) {
	if s == nil {
		return
	}
	s.vms.Do(func() { go s.watchVMs(filepath.Join("/sys/module", module, "refcnt")) })
}

// memTotal returns the memory of the guest in bytes.
func memTotal() int64 {
	var si unix.Sysinfo_t
	_ = unix.Sysinfo(&si) // never fails
	return int64(si.Totalram) * int64(max(si.Unit, 1))
}

// threadsMax returns how many threads the kernel can have.
func threadsMax() int64 {
	const least = 4096
	b, err := os.ReadFile("/proc/sys/kernel/threads-max")
	n, perr := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil || perr != nil {
		return least
	}
	return max(n, least)
}
