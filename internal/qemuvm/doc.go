// Package qemuvm is what drivers know about QEMU: its process and its monitor, the machine
// and the devices of a guest, the place of its volume (Slot), initrds, why a VM has ended,
// and the probe of KVM on this host.
package qemuvm
