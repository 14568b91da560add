package qemu

import "github.com/agentlab-vm/agentlab/internal/durable"

// Files in a sandbox's directory, beside those of the supervisor.
const (
	fileRoot = "root.qcow2" // root disk: overlay on the image's root.img; exists once Create has finished

	// processName is supervisor.Dir.Process: QEMU's files are qemu.lock and
	// qemu.pid.
	processName = "qemu"
)

// tmpSuffix marks a file that is being written. It is renamed when complete.
const tmpSuffix = durable.Suffix

// Files and directories under Config.CacheDir.
const (
	dirInitrd = "initrd" // <sha256>.cpio
)
