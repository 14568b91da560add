package qemuvm

import (
	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// vmOverhead is the memory of a VM in addition to the memory of its guest, in bytes:
// translated code, devices, and the supervisor.
const vmOverhead = 256 << 20

// Room returns an error if the host has no room for another VM: its memory must be
// free now, and the disk of dir must not become so full that the guests of sandboxes
// are paused (RoomFor).
func Room(r agentlab.Resources, dir string, pauseBelow uint64) error {
	memory := int64(r.MemoryMB) << 20
	if sizes, err := supervisor.ReadSizes("/proc/meminfo"); err == nil && sizes["MemAvailable"] < memory+vmOverhead {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the host has %d MiB of free memory, and another guest needs %d", sizes["MemAvailable"]>>20, (memory+vmOverhead)>>20).
			WithHint("end sandboxes that are no longer needed")
	}
	// A guest that has just booted uses a part of its memory.
	return RoomFor("another guest", dir, pauseBelow, memory/4+vmOverhead)
}

// RoomFor returns an error with code no_space if the disk of dir has no room for
// size bytes more: guests that write are paused when less than pauseBelow is free.
// A disk that cannot be measured has room; a write to it reports what is wrong.
func RoomFor(what, dir string, pauseBelow uint64, size int64) error {
	need := int64(pauseBelow) + size
	free, err := hostspace.FreeBytes(dir)
	if err != nil || free >= need {
		return nil //nolint:nilerr // see above
	}
	return agentlab.Errorf(agentlab.CodeNoSpace, "%d MiB are free in %s, and %s needs %d", free>>20, dir, what, need>>20).
		WithHint("free disk space, or destroy sandboxes that are no longer needed")
}
