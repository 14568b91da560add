//go:build !linux

package qemu

import (
	"os/exec"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// holeFilter is not available.
type holeFilter struct{ memory unix.Stat_t }

// startUnprivileged returns an error: only on Linux does a process lose its privileges
// and end with this one.
func startUnprivileged(*exec.Cmd, *holeFilter, bool) (<-chan struct{}, error) {
	return nil, hostos.Unsupported("the backend qemu does not run")
}

func privatePair() ([2]int, error) {
	return [2]int{}, hostos.Unsupported("the backend qemu does not run")
}

func noHugePages() {}
