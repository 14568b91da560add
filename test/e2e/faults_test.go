package e2e

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/hostvirt"
)

// reportFaultCost prints the cost of a first access to a page, by which machines differ more
// than by the speed of their processors.
func reportFaultCost(b *testing.B) {
	b.Helper()
	cost, err := hostvirt.FaultCost()
	if err != nil {
		b.Fatal(err)
	}
	b.Logf("the first access to a page of memory takes %v", cost)
}

// reportFaults prints how many page faults the only QEMU has taken since it started, and how
// many pages it has in memory, by what they are for. A fault maps one page of the guest's
// memory, of translated code or of a table, and up to 16 of a program file.
func (l *lab) reportFaults(b *testing.B, title string) {
	b.Helper()
	pids := l.processes("qemu-system")
	if len(pids) != 1 {
		b.Fatalf("%d QEMUs", len(pids))
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pids[0]))
	if err != nil {
		b.Fatal(err)
	}
	smaps, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pids[0]))
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	pages := pagesByPurpose(string(smaps))
	b.Logf("%s: %s page faults of QEMU; pages in memory: guest memory %d read and %d written, translated code %d, program files %d, tables and stacks %d",
		title, strings.Fields(rest)[7], pages["guest read"], pages["guest written"], pages["code"], pages["files"], pages["other"])
}

// pagesByPurpose counts the pages of 4 KiB that a QEMU has in memory.
func pagesByPurpose(smaps string) map[string]int {
	pages := map[string]int{}
	var purpose string
	for line := range strings.Lines(smaps) {
		f := strings.Fields(line)
		if len(f) >= 5 && strings.Contains(f[0], "-") { // address, permissions, offset, device, inode, path
			path := ""
			if len(f) > 5 {
				path = f[5]
			}
			switch {
			case strings.HasSuffix(path, "/memory"):
				purpose = "guest"
			case path == "" && strings.Contains(f[1], "x"):
				purpose = "code"
			case strings.HasPrefix(path, "/"):
				purpose = "files"
			default:
				purpose = "other"
			}
			continue
		}
		if len(f) < 2 {
			continue
		}
		kb, err := strconv.Atoi(f[1])
		if err != nil {
			continue
		}
		switch {
		case f[0] == "Anonymous:" && purpose == "guest":
			pages["guest written"] += kb / 4
			pages["guest read"] -= kb / 4
		case f[0] == "Rss:" && purpose == "guest":
			pages["guest read"] += kb / 4
		case f[0] == "Rss:":
			pages[purpose] += kb / 4
		}
	}
	return pages
}

func TestPagesByPurpose(t *testing.T) {
	t.Parallel()
	const smaps = `7f1000000000-7f1040000000 rw-p 00000000 fe:00 123 /var/sandboxes/7/memory
Size:            1048576 kB
Rss:                 400 kB
Anonymous:           100 kB
VmFlags: rd wr mr
7f2000000000-7f2040000000 rwxp 00000000 00:00 0
Rss:                  40 kB
Anonymous:            40 kB
55d000000000-55d000100000 r-xp 00000000 fe:00 99 /usr/bin/qemu-system-x86_64
Rss:                 800 kB
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
Rss:                   8 kB
`
	got := pagesByPurpose(smaps)
	if got["guest read"] != 75 || got["guest written"] != 25 || got["code"] != 10 || got["files"] != 200 || got["other"] != 2 {
		t.Errorf("%v", got)
	}
}
