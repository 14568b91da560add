// Package testdaemon is the program agentlabd for tests: it also has the fake
// backend.
package testdaemon

import (
	"slices"

	"github.com/agentlab-vm/agentlab/internal/backends"
	"github.com/agentlab-vm/agentlab/internal/daemon"
	"github.com/agentlab-vm/agentlab/test/fakebackend"
)

// Main is daemon.Main with more backends.
func Main(args []string) int {
	return daemon.Main(args, append(slices.Clip(backends.All), fakebackend.Backend)...)
}
