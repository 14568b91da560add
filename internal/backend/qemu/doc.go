// Package qemu runs each sandbox in a separate microVM on this host.
//
// Driver, in the daemon, implements backend.Driver. It keeps no state in memory:
// everything is in the sandbox's directory. While a sandbox runs, a process of
// package supervisor runs its QEMU (machine); QEMU ends with that process.
//
// # One directory per sandbox
//
// A sandbox is STATE/sandboxes/<vmid>-<uid>/; the names of its files are in
// filenames.go, and those of its supervisor in package supervisor. The
// directory's name and config.json, which is written before anything else, are
// the mark of ownership. A directory that is being destroyed is first renamed
// to .trash-<vmid>-<uid>.
//
// # The virtual machine
//
// QEMU's microvm machine boots an uncompressed Linux kernel directly, with an
// initrd made of the image's kernel modules and agent-runner as /init. Its
// devices: a virtio-serial bus with the console (hvc0) and the control port
// (ControlPort), a network card whose frames go to the supervisor, the root disk
// (a qcow2 overlay on the image), an entropy source and a balloon that returns
// free memory to the host. The guest finds disks by serial number (RootSerial),
// so their order does not matter.
//
// Two extensions are planned. A disk for /work will be another virtio-blk
// device with its own serial number, with a placeholder file that a volume
// replaces (microvm has no hot-plug). And start.json will be able to name a
// template to resume instead of a kernel to boot.
package qemu
