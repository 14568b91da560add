package supervisor

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/hostos"
)

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
	if start, err := hostos.ProcStart(p.PID); err != nil || start != p.Start {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}
