package qemu

import (
	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// handle is config.json: the sandbox's specification and image.
type handle = vmdir.Handle

// found is a sandbox in the state directory.
type found = vmdir.Found

// startConfig is the content of start.json: what machine needs in addition to
// the handle.
type startConfig struct {
	supervisor.Start
	QEMU    string `json:"qemu"`               // absolute path
	QEMUImg string `json:"qemu_img,omitempty"` // absolute path
	Key     string `json:"machine,omitempty"`  // machineKey
	// Background gives the VM the least of the host's CPU time.
	Background bool `json:"background,omitempty"`
	Load       bool `json:"load,omitempty"` // load the guest's memory from the sandbox's directory; it does not boot
	qemuvm.Machine
	Initrd string `json:"initrd"` // absolute path
}

// find looks for the sandbox with a uid.
func (d *Driver) find(uid string) (found, error) { return d.set.Find(uid) }

// fault adds the code to an error of the operating system.
func fault(err error, format string, args ...any) *agentlab.Error {
	return vmdir.Fault(err, format, args...)
}
