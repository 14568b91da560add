// Package qemu runs each sandbox in a microVM of its own on this host.
//
// Driver, in the daemon, implements backend.Driver. It keeps no state in memory:
// everything is in the sandbox's directory. While a sandbox runs, a process of
// package supervisor runs its QEMU (machine); QEMU ends with that process.
//
// # One directory per sandbox
//
// A sandbox is STATE/sandboxes/<vmid>-<uid>/; the names of the files in it are
// in filenames.go, and those of its supervisor in that package. The directory's
// name and config.json, which is written before anything else, are the mark of
// ownership. A directory that is being destroyed is first renamed to
// .trash-<vmid>-<uid>.
//
// # The virtual machine
//
// QEMU's microvm machine boots an uncompressed Linux kernel directly, with an
// initrd made of the image's kernel modules and agent-runner as /init. Its
// devices: a virtio-serial bus with the console (hvc0) and the control port
// (ControlPort), a network card whose frames go to the supervisor, the root disk
// (a qcow2 overlay on the image), an entropy source and a balloon that gives
// free memory back. The guest finds disks by serial number (RootSerial), so
// their order means nothing.
//
// Two places are left free on purpose. A disk for /work will be one more
// virtio-blk device with its own serial, behind a placeholder file that a
// volume is swapped into (microvm has no hot-plug). And start.json will say
// "resume this template" where it now says which kernel to boot.
package qemu
