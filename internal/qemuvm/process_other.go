//go:build !linux

package qemuvm

import (
	"os/exec"

	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// StartUnprivileged returns an error: only on Linux does a process lose its privileges
// and end with this one.
func StartUnprivileged(*exec.Cmd, func() error, bool) (<-chan struct{}, error) {
	return nil, hostos.Unsupported("QEMU does not run")
}

func privatePair() ([2]int, error) { return [2]int{}, hostos.Unsupported("QEMU does not run") }

// NoCore does nothing: the limits of another process can be changed on Linux only.
func NoCore(int) {}
