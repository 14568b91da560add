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
// (qemuvm.ControlPort), a network card whose frames go to the supervisor, the root disk
// (a qcow2 overlay on the image), the place of a volume, an entropy source and a
// balloon that returns free memory to the host. The guest finds disks by serial
// number (qemuvm.RootSerial, backend.VolumeSerial), so their order does not matter.
//
// # Templates, snapshots and forks
//
// A template (STATE/templates/<key>/) is a booted guest without identity, and a
// snapshot (STATE/snapshots/<uid>/) is a saved sandbox: a disk, and a memory with
// the state of the devices (memory.go). A sandbox that is suspended to disk has
// such a memory in its own directory. A sandbox that starts from one of them has
// hard links to what is large, which never changes, and an overlay of its own
// (layers.go). So each directory can be deleted without a look at the others.
//
// # Volumes
//
// A volume is STATE/volumes/<uid>/. Every VM has a place for one, a disk of size 0
// whose file QEMU replaces (slot.go): microvm has no hot-plug.
package qemu
