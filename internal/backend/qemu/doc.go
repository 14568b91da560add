// Package qemu runs each sandbox in a microVM of its own on this host.
//
// Two halves share the package:
//
//   - Driver, in the daemon, implements backend.Driver. It keeps no state in
//     memory that matters: everything is in the sandbox's directory.
//   - RunShim, in a process of its own per running sandbox ("agentlabd vmm
//     DIR"), owns the QEMU process, the VM's private network, its console and
//     its control link. It outlives the daemon; QEMU dies with it.
//
// # One directory per sandbox
//
// A sandbox is STATE/sandboxes/<vmid>-<uid>/; the names of the files in it
// are in filenames.go and nowhere else. The directory's name and config.json,
// which is written before anything else, are the mark of ownership. A
// directory that is being destroyed is first renamed to .trash-<vmid>-<uid>.
//
// # What is true
//
// A sandbox's shim is alive exactly while somebody holds the lock of
// shim.lock; the driver takes it before it starts the shim and hands it down,
// so there is no moment between. QEMU is alive exactly while somebody holds
// qemu.lock. Process ids are hints: before a process is signalled, its start
// time is compared with what was written down. How the last run ended is in
// state.json; "running" there without a held lock means that the shim was
// killed.
//
// # The virtual machine
//
// QEMU's microvm machine boots an uncompressed Linux kernel directly, with an
// initrd made of the image's kernel modules and agent-runner as /init. Its
// devices: a virtio-serial bus with the console (hvc0) and the control port
// (ControlPort), a network card whose frames go to the shim, the root disk
// (a qcow2 overlay on the image), an entropy source and a balloon that gives
// free memory back. The guest finds disks by serial number (RootSerial), so
// their order means nothing.
//
// Two places are left free on purpose. A disk for /work will be one more
// virtio-blk device with its own serial, behind a placeholder file that a
// volume is swapped into (microvm has no hot-plug). And start.json will say
// "resume this template" where it now says which kernel to boot.
package qemu
