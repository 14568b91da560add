// Package hostos has the calls of the kernel that differ between the operating systems
// of hosts: the identity of a boot, the time since the boot, the start of a process, and
// its end with the one that started it. What a system does not have is an error.
package hostos

import (
	"runtime"

	"github.com/agentlab-vm/agentlab"
)

// Unsupported returns the error for what only works on Linux, with code unsupported.
func Unsupported(what string) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "%s on %s", what, runtime.GOOS).
		WithHint("run the daemon on a Linux machine, and set --host or AGENTLAB_HOST to its URL (docs/access.md)")
}
