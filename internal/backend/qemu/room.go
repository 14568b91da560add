package qemu

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Room implements backend.Host.
func (d *Driver) Room(_ context.Context, r agentlab.Resources) error {
	if err := d.room(r, d.cfg.StateDir); err != nil {
		return agentlab.Errorf(agentlab.CodeNoSpace, "%w", err)
	}
	return nil
}

// room returns an error if the host has no room for another VM: its memory must be
// free now, and the disk must not become so full that the guests of sandboxes are
// paused.
func (d *Driver) room(r agentlab.Resources, dir string) error {
	memory := int64(r.MemoryMB) << 20
	if sizes, err := supervisor.ReadSizes("/proc/meminfo"); err == nil && sizes["MemAvailable"] < memory+vmOverhead {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the host has %d MiB of free memory, and another guest needs %d", sizes["MemAvailable"]>>20, (memory+vmOverhead)>>20).
			WithHint("end sandboxes that are no longer needed")
	}
	// A guest that has just booted uses a part of its memory.
	return roomFor("another guest", dir, d.cfg.PauseBelow, memory/4+vmOverhead)
}

// roomFor returns an error with code no_space if the disk of dir has no room for
// size bytes more: guests that write are paused when less than pauseBelow is free.
// A disk that cannot be measured has room; a write to it reports what is wrong.
func roomFor(what, dir string, pauseBelow uint64, size int64) error {
	need := int64(pauseBelow) + size
	free, err := hostspace.FreeBytes(dir)
	if err != nil || free >= need {
		return nil //nolint:nilerr // see above
	}
	return agentlab.Errorf(agentlab.CodeNoSpace, "%d MiB are free in %s, and %s needs %d", free>>20, dir, what, need>>20).
		WithHint("free disk space, or destroy sandboxes that are no longer needed")
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
		if err := roomFor("the guest's memory", f.Name(), f.least, spaceEvery); err != nil {
			return 0, err
		}
	}
	return f.File.WriteAt(b, at)
}

// Taken implements backend.Host: only this installation gives numbers to VMs.
func (d *Driver) Taken(context.Context, int, int) ([]int, error) { return nil, nil }
