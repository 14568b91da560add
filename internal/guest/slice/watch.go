//go:build linux

package slice

import (
	"bytes"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// watchKills logs each kill, on the console, until the result is closed.
func (s *Slice) watchKills() (*os.File, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	for _, group := range []string{guestapi.Slice, guestapi.NestedSlice} {
		if _, err := unix.InotifyAddWatch(fd, filepath.Join(s.root, group, "memory.events"), unix.IN_MODIFY); err != nil {
			_ = f.Close()
			return nil, os.NewSyscallError("inotify_add_watch", err)
		}
	}
	last := ReadKills(s.root).Total()
	go func() {
		for buf := make([]byte, 4096); ; {
			if _, err := f.Read(buf); err != nil {
				return
			}
			if now := ReadKills(s.root); now.Total() > last {
				last = now.Total()
				s.log.Warn(now.String())
			}
		}
	}()
	return f, nil
}

// lookEvery is the time between two looks for virtual machines.
const lookEvery = time.Second

// watchVMs confines virtual machines until the process ends. The kernel reports no event
// when one is created. While no process uses the module of the hypervisor, only its
// counter is read.
func (s *Slice) watchVMs(refcount string) {
	for range time.Tick(lookEvery) {
		b, err := os.ReadFile(refcount)
		if n, _ := strconv.Atoi(string(bytes.TrimSpace(b))); err == nil && n > 0 {
			s.confineVMs(strconv.Itoa(os.Getpid()))
		}
	}
}

// confineVMs makes the processes of virtual machines the first that are killed when
// memory is used up. Those that users have started move to the cgroup of nested guests.
// Containers and services keep their cgroups, which their managers need. This process
// is excepted: it tests the device.
func (s *Slice) confineVMs(self string) {
	dirs, _ := filepath.Glob(filepath.Join(s.proc, "[1-9]*")) // the pattern is valid
	for _, dir := range dirs {
		if filepath.Base(dir) == self || !hasVM(dir) {
			continue
		}
		_ = os.WriteFile(filepath.Join(dir, "oom_score_adj"), []byte("1000"), 0) // it may have ended
		if ofUsers(dir) {
			_ = s.set(nestedGroup, "cgroup.procs", filepath.Base(dir))
		}
	}
}

// hasVM reports whether a process has the device of the hypervisor or a virtual machine.
func hasVM(dir string) bool {
	fds, _ := os.ReadDir(filepath.Join(dir, "fd")) // it may have ended
	for _, fd := range fds {
		to, _ := os.Readlink(filepath.Join(dir, "fd", fd.Name()))
		if to == "/dev/kvm" || strings.HasPrefix(to, "anon_inode:kvm-") {
			return true
		}
	}
	return false
}

// ofUsers reports whether a process is in a cgroup in which users start processes
// themselves. The last pattern is that of logins where systemd manages them.
func ofUsers(dir string) bool {
	b, _ := os.ReadFile(filepath.Join(dir, "cgroup")) // it may have ended
	_, group, _ := strings.Cut(string(bytes.TrimSpace(b)), "::/")
	session, _ := path.Match("user.slice/user-*.slice/session-*.scope", group) // the pattern is valid
	return group == agentsGroup || group == loginGroup || session
}
