package qemu

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// processID names a process for good: the number alone may be another's after
// a while, but not with the same start time in the same boot of the host.
type processID struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // field 22 of /proc/PID/stat, in clock ticks since boot
	Boot  string `json:"boot"`  // /proc/sys/kernel/random/boot_id
}

// identify returns the processID of a process that is known to live.
func identify(pid int) (processID, error) {
	start, err := startTime(pid)
	return processID{PID: pid, Start: start, Boot: bootID()}, err
}

func bootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b))
}

var errNoStat = errors.New("/proc/PID/stat is not as expected")

func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	return parseStartTime(b)
}

// parseStartTime skips the second field, which is in brackets and may hold
// anything, brackets too.
func parseStartTime(stat []byte) (uint64, error) {
	i := bytes.LastIndexByte(stat, ')')
	if i < 0 {
		return 0, errNoStat
	}
	fields := bytes.Fields(stat[i+1:])
	if len(fields) < 20 {
		return 0, errNoStat
	}
	return strconv.ParseUint(string(fields[19]), 10, 64)
}

// kill sends SIGKILL to the process that p names, and to no other. A process
// that is gone is a success.
func (p processID) kill() error {
	if p.PID <= 1 || p.Boot != bootID() {
		return nil
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	// Looked at after the pidfd was opened: now it is the pidfd's process.
	if start, err := startTime(p.PID); err != nil || start != p.Start {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// killNoted kills the process that the file at path names, if there is one.
func killNoted(dir, name string) error {
	var p processID
	if err := readJSON(filepath.Join(dir, name), &p); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	return p.kill()
}

// noCore keeps a process from writing its memory, and with it the guest's
// secrets, into a core file.
func noCore(pid int) {
	_ = unix.Prlimit(pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil)
}

// giveUpPrivileges makes what this thread starts run without any capability,
// also when it is root's, and without a way to get one. The thread must not do
// anything else afterwards.
func giveUpPrivileges() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("no_new_privs", err)
	}
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		// An older kernel does not know the last ones. Who may not drop them
		// is no root that could pass them on, or one that a container bounds.
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EPERM) {
			return os.NewSyscallError("capbset_drop", err)
		}
	}
	return nil
}

// oomKills counts the processes that this host killed for lack of memory.
func oomKills() uint64 {
	b, _ := os.ReadFile("/proc/vmstat")
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "oom_kill "); ok {
			n, _ := strconv.ParseUint(strings.TrimSpace(v), 10, 64)
			return n
		}
	}
	return 0
}

// signalName names what ended a process, e.g. "SIGKILL".
func signalName(s syscall.Signal) string {
	if n := unix.SignalName(s); n != "" {
		return n
	}
	return s.String()
}
