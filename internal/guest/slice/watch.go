package slice

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"unsafe"

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

// watchOpens calls opens with each process that opens the device, before the device is
// open in it. It returns the error of its set-up, or nil: then the calls follow in
// the background, until the process ends.
func watchOpens(device string, opens func(pid int)) error {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("fanotify_init", err)
	}
	f := os.NewFile(uintptr(fd), "fanotify") //nolint:gosec // a file descriptor
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM, unix.AT_FDCWD, device); err != nil {
		_ = f.Close()
		return os.NewSyscallError("fanotify_mark", err)
	}
	go func() {
		defer func() { _ = f.Close() }() // the kernel then allows what waits
		buf := make([]byte, 4096)
		for {
			n, err := f.Read(buf)
			if err != nil {
				return
			}
			for b := buf[:n]; len(b) >= unix.FAN_EVENT_METADATA_LEN; {
				e := (*unix.FanotifyEventMetadata)(unsafe.Pointer(&b[0]))
				if e.Vers != unix.FANOTIFY_METADATA_VERSION || e.Event_len < unix.FAN_EVENT_METADATA_LEN || int(e.Event_len) > len(b) {
					return
				}
				b = b[e.Event_len:]
				if e.Fd < 0 {
					continue
				}
				if int(e.Pid) != os.Getpid() {
					opens(int(e.Pid))
				}
				answer := unix.FanotifyResponse{Fd: e.Fd, Response: unix.FAN_ALLOW}
				_, err := f.Write(unsafe.Slice((*byte)(unsafe.Pointer(&answer)), unsafe.Sizeof(answer)))
				_ = unix.Close(int(e.Fd))
				if err != nil {
					return
				}
			}
		}
	}()
	return nil
}
