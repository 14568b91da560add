package supervisor

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/durable"
)

// processID identifies a process permanently: a PID can be reused, but not with
// the same start time in the same boot of the host.
type processID struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // field 22 of /proc/PID/stat, in clock ticks since boot
	Boot  string `json:"boot"`  // /proc/sys/kernel/random/boot_id
}

// identify returns the processID of a running process.
func identify(pid int) (processID, error) {
	start, err := startTime(pid)
	return processID{PID: pid, Start: start, Boot: BootID()}, err
}

// BootID identifies the run of the host's kernel; "" means that it is not known.
func BootID() string {
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

// parseStartTime skips the second field, which is in brackets and may contain
// any text, including brackets.
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

// kill sends SIGKILL to the process that p identifies, and to no other. It
// succeeds if that process has ended.
func (p processID) kill() error {
	if p.PID <= 1 || p.Boot != BootID() {
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
	// Read after the pidfd was opened, so that it is the pidfd's process.
	if start, err := startTime(p.PID); err != nil || start != p.Start {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// killNoted kills the process in the file at path, if there is one.
func killNoted(path string) error {
	var p processID
	if err := durable.ReadJSON(path, &p); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	return p.kill()
}
