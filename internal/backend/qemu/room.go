package qemu

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Room implements backend.Host.
func (d *Driver) Room(_ context.Context, r agentlab.Resources) error {
	if err := qemuvm.Room(r, d.cfg.StateDir, d.cfg.PauseBelow); err != nil {
		return agentlab.Errorf(agentlab.CodeNoSpace, "%w", err)
	}
	return nil
}

// guestSize returns how many bytes the memory of a guest will occupy on the disk,
// as far as the host knows: what its process occupies, and the file from which the
// guest continues (nil if there is none), at most all of its memory.
func guestSize(pid int, from *os.File, memory int64) int64 {
	sizes, err := supervisor.ReadSizes(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil || sizes["VmRSS"] == 0 {
		return memory
	}
	size := sizes["VmRSS"]
	if from != nil {
		var st unix.Stat_t
		if unix.Fstat(int(from.Fd()), &st) != nil {
			return memory
		}
		size = max(size, st.Blocks*512+sizes["RssAnon"])
	}
	return min(memory, size)
}

// spaceEvery is how many bytes are written between two looks at the free space.
const spaceEvery = 1 << 20

// memoryFile is a file for a guest's memory. A write fails when it has used the
// space below which all guests are paused.
type memoryFile struct {
	*os.File
	least    uint64 // bytes that stay free
	unlooked int    // bytes written since the last look
}

func (f *memoryFile) WriteAt(b []byte, at int64) (int, error) {
	if f.unlooked += len(b); f.unlooked >= spaceEvery {
		f.unlooked = 0
		if err := qemuvm.RoomFor("the guest's memory", f.Name(), f.least, spaceEvery); err != nil {
			return 0, err
		}
	}
	return f.File.WriteAt(b, at)
}

// Taken implements backend.Host: only this installation gives numbers to VMs.
func (d *Driver) Taken(context.Context, int, int) ([]int, error) { return nil, nil }
