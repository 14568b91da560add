package qemu

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostvirt"
)

// Nested implements backend.Host.
func (d *Driver) Nested(ctx context.Context) error {
	if d.cfg.NoNested {
		return hostvirt.Refused("it is switched off on this host", "set qemu.nested: true in config.yaml, and restart the daemon")
	}
	return d.host.Nested(ctx)
}

func (d *Driver) checkNested(ctx context.Context) backend.Finding {
	const name = "nested"
	switch err := d.Nested(ctx); {
	case d.cfg.NoNested:
		return backend.Findf(name, backend.LevelOK, "", "off: the configuration says qemu.nested: false")
	case agentlab.CodeOf(err) == agentlab.CodeUnsupported:
		return backend.Findf(name, backend.LevelWarn, agentlab.HintOf(err), "virtual machines do not run in sandboxes: %s", err)
	case err != nil:
		return backend.Findf(name, backend.LevelWarn, agentlab.HintOf(err), "unknown: %s", err)
	}
	return backend.Findf(name, backend.LevelOK, "", "virtual machines can run in sandboxes whose profile has resources.nested")
}
