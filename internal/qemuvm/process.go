package qemuvm

import (
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// OOMKills returns how many processes this host killed for lack of memory.
func OOMKills() uint64 {
	b, _ := os.ReadFile("/proc/vmstat")
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "oom_kill "); ok {
			n, _ := strconv.ParseUint(strings.TrimSpace(v), 10, 64)
			return n
		}
	}
	return 0
}

// signalName returns the name of a signal, e.g. "SIGKILL".
func signalName(s syscall.Signal) string {
	if n := unix.SignalName(s); n != "" {
		return n
	}
	return s.String()
}

// fault adds the code to an error of the operating system.
func fault(err error, format string, args ...any) *agentlab.Error {
	return fsfault.Own(err, "free disk space, or destroy sandboxes that are no longer needed", format, args...)
}
