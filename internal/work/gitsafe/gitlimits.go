package gitsafe

import (
	"fmt"
	"syscall"
)

// Resource limits of git when it reads objects of a guest.
const (
	gitMemory  = 1 << 30 // bytes of private memory; mappings of packs do not count
	gitSeconds = 600     // of CPU time
	gitFile    = 4 << 30 // bytes of a file that it writes
)

// gitSmall are options that reduce the memory use of git.
var gitSmall = []string{
	"-c", "core.bigFileThreshold=32m",
	"-c", "core.deltaBaseCacheLimit=32m",
	"-c", "pack.threads=1",
	"-c", "pack.windowMemory=64m",
	"-c", "pack.deltaCacheSize=16m",
	"-c", "diff.renames=false",
}

// underLimits returns a command that sets the limits on itself and then executes
// the program. patient leaves out the limit of time.
func underLimits(program string, args []string, patient bool) []string {
	script := ""
	for _, l := range []struct {
		resource int
		option   byte
		most     uint64
		unit     uint64 // of the option
	}{
		{syscall.RLIMIT_CORE, 'c', 0, 512},
		{syscall.RLIMIT_DATA, 'd', gitMemory, 1024},
		{syscall.RLIMIT_CPU, 't', gitSeconds, 1},
		{syscall.RLIMIT_FSIZE, 'f', gitFile, 512},
	} {
		if patient && l.resource == syscall.RLIMIT_CPU {
			continue
		}
		most := l.most
		var now syscall.Rlimit
		if syscall.Getrlimit(l.resource, &now) == nil && uint64(now.Max) < most { //nolint:unconvert // its type differs between systems
			most = now.Max // a hard limit cannot be raised
		}
		script += fmt.Sprintf("ulimit -%c %d && ", l.option, most/l.unit)
	}
	return append([]string{"/bin/sh", "-c", script + `exec "$0" "$@"`, program}, args...)
}
