//go:build !linux

package netguest

import (
	"context"
	"errors"
	"net"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Guest does not exist on this system.
type Guest struct{ Link net.Conn }

// Main returns.
func Main() {}

// Start skips the test.
func Start(t testing.TB, _ Config) *Guest {
	t.Helper()
	t.Skip("network namespaces exist on Linux only")
	return nil
}

// Exec returns an error.
func (*Guest) Exec(context.Context, []guestapi.Probe) ([]guestapi.ProbeResult, error) {
	return nil, errors.ErrUnsupported
}
