// Package lima runs each sandbox in an instance of Lima on this host.
//
// Driver, in the daemon, implements backend.Driver. limactl creates the instance and
// its disk, and starts it; a process of package supervisor owns the VM's network,
// console and control link, as for every driver on this host.
//
// # Directories
//
// STATE/lima/home is the LIMA_HOME of all instances of AgentLab: a user's own
// instances, which are elsewhere, are never listed or changed. A sandbox is
// STATE/lima/sandboxes/<vmid>-<uid>/ (package vmdir), the mark of ownership, and the
// instance whose name is the last 16 characters of its UID.
//
// A volume is home/_disks/<uid>/, a disk of Lima with the mark of vmdir.Volumes
// (volume.go).
//
// # The boundary
//
// What Lima would give a VM is not enough for a hostile guest: a network with a way to
// the host's loopback, serial logs without a size, a cloud-init disk with the user's
// name and home directory, disks whose format QEMU guesses from their content. So
// limactl finds no QEMU but a wrapper (STATE/lima/bin), which hands the command line to
// the supervisor. The supervisor checks that it is for this instance and starts QEMU
// itself, with the devices of package qemuvm only: no NIC but the frames of the gate,
// no disk but the instance's and its volume, no mount, no SSH port. If limactl starts
// anything else, nothing runs: its PATH has no other QEMU.
//
// Lima's host agent sees its QEMU in the wrapper, which ends with the VM, and a monitor
// socket, so that 'limactl list' and 'limactl stop' work with that LIMA_HOME. 'limactl
// shell' does not: there is no SSH. If the host agent is killed, the VM runs on.
//
// A user's own 'limactl start' finds the real QEMU. It starts none: the instance has a
// CPU model that no QEMU knows.
package lima
