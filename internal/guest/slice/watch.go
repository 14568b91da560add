package slice

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// ReadKills returns the kills since the boot. All users may read them.
func ReadKills() guestapi.MemoryKills { return readKills(cgroupRoot) }

func readKills(root string) guestapi.MemoryKills {
	nested := oomKills(filepath.Join(root, guestapi.NestedSlice))
	return guestapi.MemoryKills{Nested: nested, Other: max(0, oomKills(filepath.Join(root, guestapi.Slice))-nested)}
}

// oomKills returns the number of processes of a cgroup, and those in it, that were
// killed.
func oomKills(group string) int {
	b, err := os.ReadFile(filepath.Join(group, "memory.events"))
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(b) {
		if f := bytes.Fields(line); len(f) == 2 && string(f[0]) == "oom_kill" {
			n, _ := strconv.Atoi(string(f[1]))
			return n
		}
	}
	return 0
}

// watchKills logs each kill, on the console.
func (s *Slice) watchKills() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return os.NewSyscallError("inotify_init1", err)
	}
	f := os.NewFile(uintptr(fd), "inotify") //nolint:gosec // a file descriptor
	for _, group := range []string{guestapi.Slice, guestapi.NestedSlice} {
		if _, err := unix.InotifyAddWatch(fd, filepath.Join(s.root, group, "memory.events"), unix.IN_MODIFY); err != nil {
			_ = f.Close()
			return os.NewSyscallError("inotify_add_watch", err)
		}
	}
	go func() {
		defer func() { _ = f.Close() }()
		last := readKills(s.root).Total()
		for buf := make([]byte, 4096); ; {
			if _, err := f.Read(buf); err != nil {
				return
			}
			if now := readKills(s.root); now.Total() > last {
				last = now.Total()
				s.log.Warn(now.String())
			}
		}
	}()
	return nil
}

// lookEvery is the time between two looks for virtual machines.
const lookEvery = time.Second

// watchVMs confines the processes that have a virtual machine, or the device of the
// hypervisor, until the process ends. The kernel reports no event when they open it. While
// no process uses the module, only its counter is read.
func (s *Slice) watchVMs(refcount string) {
	for range time.Tick(lookEvery) {
		b, err := os.ReadFile(refcount)
		if n, _ := strconv.Atoi(string(bytes.TrimSpace(b))); err != nil || n == 0 {
			continue
		}
		for _, group := range []string{agentsGroup, loginGroup} {
			pids, _ := os.ReadFile(filepath.Join(s.root, group, "cgroup.procs")) // no file: no process
			for _, pid := range bytes.Fields(pids) {
				if hasVM(string(pid)) {
					s.confine(string(pid))
				}
			}
		}
	}
}

// hasVM reports whether a process has the device of the hypervisor or a virtual machine.
func hasVM(pid string) bool {
	dir := filepath.Join("/proc", pid, "fd")
	fds, _ := os.ReadDir(dir) // it may have ended
	for _, fd := range fds {
		to, _ := os.Readlink(filepath.Join(dir, fd.Name()))
		if to == "/dev/kvm" || strings.HasPrefix(to, "anon_inode:kvm-") {
			return true
		}
	}
	return false
}
