// Package backends lists the backends of AgentLab.
package backends

import (
	"github.com/agentlab-vm/agentlab/internal/backend/lima"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox"
	"github.com/agentlab-vm/agentlab/internal/backend/qemu"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
)

// All lists the backends, one in each line. The first is the default.
var All = registry.List{
	qemu.Backend,
	proxmox.Backend,
	lima.Backend,
}
