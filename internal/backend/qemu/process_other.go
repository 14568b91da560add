//go:build !linux

package qemu

import (
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// holeFilter is not available.
type holeFilter struct{ memory unix.Stat_t }

func (*holeFilter) start() error { return hostos.Unsupported("the backend qemu does not run") }

func noHugePages() {}
