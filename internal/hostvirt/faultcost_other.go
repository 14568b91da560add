//go:build !linux

package hostvirt

import (
	"errors"
	"time"
)

// FaultCost works on Linux only.
func FaultCost() (time.Duration, error) {
	return 0, errors.New("page faults are measured on Linux only")
}
