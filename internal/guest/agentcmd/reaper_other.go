//go:build !linux

package agentcmd

import "errors"

// becomeReaper returns an error: guests run Linux.
func becomeReaper() error { return errors.ErrUnsupported }
