//go:build !linux

package qemu

import (
	"errors"
	"os"
)

func lockAsSupervisor(*os.File) error { return errors.ErrUnsupported }
