package supervisor

import (
	"errors"
	"os"

	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/hostos"
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
	start, err := hostos.ProcStart(pid)
	return processID{PID: pid, Start: start, Boot: BootID()}, err
}

// BootID identifies the run of the host's kernel; "" means that it is not known.
func BootID() string { return hostos.BootID() }

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
