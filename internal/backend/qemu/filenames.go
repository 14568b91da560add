package qemu

import (
	"github.com/agentlab-vm/agentlab/internal/boundedlog"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// Files in a sandbox's directory.
const (
	fileConfig   = "config.json"   // what the sandbox is: handle; written first; later only its network changes
	fileRoot     = "root.qcow2"    // root disk: overlay on the image's root.img; there once Create is done
	fileStart    = "start.json"    // what the shim shall run: startConfig; written at every Start
	fileState    = "state.json"    // how the last run stands or ended: runState
	fileDeadline = "deadline.json" // when the shim powers the VM off by itself: deadline
	fileConsole  = "console.log"   // what the guest wrote to its console
	fileEgress   = "egress.log"    // every decision about the guest's network flows, JSON lines
	fileShimLog  = "shim.log"      // the shim's own log, JSON lines
	fileQEMULog  = "qemu.log"      // what QEMU wrote to stderr
	fileStderr   = "shim.stderr"   // stderr of the shim of the last run: Go's last words

	fileShimLock = "shim.lock" // held by the shim, and by the driver while it starts it
	fileQEMULock = "qemu.lock" // held by QEMU itself
	fileShimPID  = "shim.pid"  // processID of the shim
	fileQEMUPID  = "qemu.pid"  // processID of QEMU

	fileShimSock  = "shim.sock"  // the shim's HTTP API, for the driver
	fileGuestSock = "guest.sock" // where the shim takes connections of the guest to the controller
)

// oldSuffix marks the older half of a bounded log.
const oldSuffix = boundedlog.OldSuffix

// tmpSuffix marks a file that is being written; it is renamed when complete.
const tmpSuffix = durable.Suffix

// trashPrefix marks the directory of a sandbox that is being destroyed.
const trashPrefix = ".trash-"

// Files and directories under Config.CacheDir.
const (
	dirInitrd   = "initrd"        // <sha256>.cpio
	fileVerdict = "kvm.json"      // verdict
	fileProbe   = "kvm-probe.elf" // the probe's kernel
)
