//go:build !linux

package netlab

import (
	"net/netip"
	"testing"

	"github.com/agentlab-vm/agentlab/test/fakenet"
)

const why = "network namespaces exist on Linux only"

// Main returns.
func Main() {}

// IsInside returns false.
func IsInside(*testing.T) bool { return false }

// Inside skips the test.
func Inside(t *testing.T) bool {
	t.Helper()
	t.Skip(why)
	return false
}

// Sh skips the test.
func Sh(t testing.TB, _ string, _ ...any) {
	t.Helper()
	t.Skip(why)
}

// Resolver skips the test.
func Resolver(t testing.TB, _ netip.Addr) {
	t.Helper()
	t.Skip(why)
}

// Peer does not exist on this system.
type Peer struct {
	Net *fakenet.Net
}

// NewPeer skips the test.
func NewPeer(t testing.TB, _, _ string, _ ...string) *Peer {
	t.Helper()
	t.Skip(why)
	return nil
}
