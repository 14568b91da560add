// Package slice limits what users and agents run in a guest, so that the guest itself
// survives it: commands, terminals, the runner with its agent, logins and containers
// are in the cgroup agentlab.slice. Nested guests have a limit of their own in it. Root
// in the guest can change all of it: the limits are against accidents, and the virtual
// machine is the boundary against attacks.
package slice

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Root is where the file system of the cgroups is mounted.
const Root = "/sys/fs/cgroup"

// ReadKills returns the kills since the boot, from the file system of the cgroups. All
// users may read them.
func ReadKills(root string) guestapi.MemoryKills {
	nested := oomKills(filepath.Join(root, guestapi.NestedSlice))
	return guestapi.MemoryKills{Nested: nested, Other: max(0, oomKills(filepath.Join(root, guestapi.Slice))-nested)}
}

// oomKills returns the number of processes of a cgroup, and those in it, that were
// killed.
func oomKills(group string) int {
	b, err := os.ReadFile(filepath.Join(group, "memory.events"))
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(b) {
		if f := bytes.Fields(line); len(f) == 2 && string(f[0]) == "oom_kill" {
			n, _ := strconv.Atoi(string(f[1]))
			return n
		}
	}
	return 0
}
