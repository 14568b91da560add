//go:build !linux

package agentcmd

import "errors"

// becomeReaper returns an error: guests run Linux.
func becomeReaper() error { return errors.ErrUnsupported }

// awaitExit returns at once: Wait follows.
func awaitExit(int) {}
