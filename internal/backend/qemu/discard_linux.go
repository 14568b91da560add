package qemu

import (
	"errors"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A VM that starts from a snapshot maps the snapshot's memory file privately: it
// shares the pages that it does not change with all other VMs from that
// snapshot. Its balloon device gives free pages back to the host. For this, QEMU
// punches holes into the file of the memory, also if the mapping is private
// (ram_block_discard_range in softmmu/physmem.c). A guest could so replace the
// memory of all other guests with zeros.
//
// Therefore a seccomp filter passes each request of QEMU for a hole to the
// supervisor. For the memory file the supervisor answers that the hole was
// punched, and punches none. QEMU then gives its own copies of the pages back
// (MADV_DONTNEED), which is what the balloon is for. Holes in disks are punched.
// When the supervisor does not answer, the request fails.

// punchHole is the mode with which QEMU discards memory and parts of disks.
const punchHole = unix.FALLOC_FL_KEEP_SIZE | unix.FALLOC_FL_PUNCH_HOLE

// Requests of the filter (linux/seccomp.h); package unix does not have them.
const (
	ioctlNotifRecv = 0xc0502100 // SECCOMP_IOCTL_NOTIF_RECV
	ioctlNotifSend = 0xc0182101 // SECCOMP_IOCTL_NOTIF_SEND
)

// seccompNotif is struct seccomp_notif.
type seccompNotif struct {
	id        uint64
	pid       uint32
	flags     uint32
	number    int32
	arch      uint32
	ip        uint64
	arguments [6]uint64
}

// seccompReply is struct seccomp_notif_resp.
type seccompReply struct {
	id    uint64
	value int64
	err   int32
	flags uint32
}

// holeFilter is the seccomp filter of one QEMU.
type holeFilter struct {
	memory   unix.Stat_t // the file without holes
	listener int
}

// start installs the filter on the calling thread, and answers its calls.
func (f *holeFilter) start() error {
	err := f.install()
	if err == nil {
		go f.serve()
	}
	return err
}

// install adds the filter to the calling thread and the processes that it
// starts. The thread must not be used for anything else afterwards.
func (f *holeFilter) install() error {
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	unless := func(value uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: skip, K: value}
	}
	result := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	// Offsets in struct seccomp_data: 0 number, 4 architecture, 16 the first
	// argument.
	program := []unix.SockFilter{
		load(4), unless(unix.AUDIT_ARCH_X86_64, 5),
		load(0), unless(unix.SYS_FALLOCATE, 3),
		load(16 + 8), unless(punchHole, 1),
		result(unix.SECCOMP_RET_USER_NOTIF),
		result(unix.SECCOMP_RET_ALLOW),
	}
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&p)))
	if errno != 0 {
		return os.NewSyscallError("seccomp", errno)
	}
	f.listener = int(fd)
	return nil
}

// serve answers until every process with the filter has ended.
func (f *holeFilter) serve() {
	defer func() { _ = unix.Close(f.listener) }()
	for {
		poll := []unix.PollFd{{Fd: int32(f.listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		switch {
		case poll[0].Revents&unix.POLLIN != 0:
			f.answer()
		case poll[0].Revents != 0:
			return
		}
	}
}

// answer answers one request. If it fails, the thread that asked has ended.
func (f *holeFilter) answer() {
	var n seccompNotif
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(f.listener), ioctlNotifRecv, uintptr(unsafe.Pointer(&n))); errno != 0 {
		return
	}
	r := seccompReply{id: n.id, err: -int32(unix.EPERM)}
	var st unix.Stat_t
	name := "/proc/" + strconv.FormatUint(uint64(n.pid), 10) + "/fd/" + strconv.Itoa(int(int32(n.arguments[0])))
	switch err := unix.Stat(name, &st); {
	case err != nil:
	case st.Dev == f.memory.Dev && st.Ino == f.memory.Ino:
		r.err = 0
	default:
		r.err, r.flags = 0, unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE
	}
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(f.listener), ioctlNotifSend, uintptr(unsafe.Pointer(&r)))
}
