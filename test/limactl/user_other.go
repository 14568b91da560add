//go:build !linux

package limactl

import (
	"errors"
	"os"
	"syscall"
)

// UserAttr returns an error for root: only on Linux can it be another user.
func UserAttr() (*syscall.SysProcAttr, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	return nil, errors.New("run this test as an ordinary user")
}

// AsUser reports whether the process is root.
func AsUser() (code int, ran bool) {
	_, err := UserAttr()
	if err == nil {
		return 0, false
	}
	_, _ = os.Stderr.WriteString(err.Error() + "\n")
	return 1, true
}
