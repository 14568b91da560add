package guestapi

import "fmt"

// Names of cgroups in a guest, as of its root cgroup. Services of systemd and
// containers that users start belong into Slice, too (Slice=, cgroup-parent).
const (
	Slice       = "agentlab.slice"                 // everything that users and agents run
	NestedSlice = Slice + "/agentlab-nested.slice" // their virtual machines
)

// MemoryKills are how many processes of Slice the kernel of a guest has ended since its
// boot, because memory was used up.
type MemoryKills struct {
	Nested int `json:"nested"` // in NestedSlice
	Other  int `json:"other"`
}

// Total returns the number of all of them.
func (k MemoryKills) Total() int { return k.Nested + k.Other }

func (k MemoryKills) String() string {
	count := func(n int) string {
		if n == 1 {
			return "1 process"
		}
		return fmt.Sprintf("%d processes", n)
	}
	text := "the kernel of the sandbox has killed "
	switch {
	case k.Other == 0:
		return text + count(k.Nested) + " of nested guests: the memory that these may have was used up"
	case k.Nested == 0:
		return text + count(k.Other) + ": the memory was used up"
	}
	return fmt.Sprintf("%s%s, %d of them of nested guests: the memory was used up", text, count(k.Total()), k.Nested)
}
