// Package machine runs real virtual machines for the fake node: QEMU with the
// devices that Proxmox VE gives it, qcow2 files as its directory storages keep
// them, and a cloud-init ISO as it generates one at every cold start.
//
// It knows nothing of the node's model: it is given a configuration as the
// node's file of a VM has it, and files. A machine is a child of this process
// and ends with it.
//
// Where it differs from Proxmox VE: CPUs are emulated unless the caller says
// that KVM works; there is no VNC; sockets lie in a directory of
// the caller.
package machine
