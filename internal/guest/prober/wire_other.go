//go:build !linux

package prober

import (
	"context"
	"fmt"
	"runtime"
)

// wire sends no frames: guests run Linux.
type wire struct{}

func (*wire) send(context.Context, []byte) error {
	return fmt.Errorf("frames cannot be sent on %s", runtime.GOOS)
}

func (*wire) close() {}
