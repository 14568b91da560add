//go:build !linux

package supervisor

import (
	"os"

	"github.com/agentlab-vm/agentlab/internal/hostos"
)

func takeLock(*os.File) (bool, error) { return false, errNoLocks() }
func isLocked(*os.File) (bool, error) { return false, errNoLocks() }

// errNoLocks is the error for a lock that can be tested without taking it.
func errNoLocks() error { return hostos.Unsupported("a VM cannot be locked") }
