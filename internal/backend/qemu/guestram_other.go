//go:build !linux

package qemu

import (
	"context"
	"os"

	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// guestRAM is not available.
type guestRAM struct{}

func openRAM(int, uint64, int64) (*guestRAM, error) {
	return nil, hostos.Unsupported("the backend qemu does not run")
}

func (*guestRAM) Close() error                                   { return nil }
func (*guestRAM) copyWritten(context.Context, *memoryFile) error { return nil }
func memoryFD() (f, w *os.File, err error) {
	return nil, nil, hostos.Unsupported("the backend qemu does not run")
}
func copyData(context.Context, *memoryFile, *os.File) error { return nil }
