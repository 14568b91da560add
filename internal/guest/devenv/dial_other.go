//go:build !linux

package devenv

import (
	"context"
	"errors"
	"net"
)

// dialIn returns an error: guests run Linux.
func dialIn(context.Context, int, uint16) (net.Conn, error) { return nil, errors.ErrUnsupported }
