package proxmox

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// cannot returns the error of a method that this driver does not support.
func cannot(what string) error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot %s", Name, what)
}

// SuspendToDisk implements backend.Power. If a suspension to disk fails, the VM keeps a
// lock that a token cannot remove.
func (d *Driver) SuspendToDisk(context.Context, backend.Ref) error {
	return cannot("suspend a sandbox to disk")
}

// SetDeadline implements backend.Power: no process of AgentLab watches a VM.
func (d *Driver) SetDeadline(context.Context, backend.Ref, backend.Deadline) error {
	return cannot("power sandboxes off by themselves")
}

// RecordEgress implements backend.Net: the firewall of the node keeps the log.
func (d *Driver) RecordEgress(context.Context, backend.Ref, agentlab.EgressRecord) error {
	return cannot("add records to the egress log")
}

// Accel implements backend.Host: the node chooses it.
func (d *Driver) Accel(context.Context) string { return "" }

// Memory implements backend.Host.
func (d *Driver) Memory(context.Context, backend.Ref) (backend.Memory, error) {
	return backend.Memory{}, cannot("report the memory of a sandbox")
}
