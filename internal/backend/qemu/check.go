package qemu

import (
	"context"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Check implements backend.Driver. The first call on a host may take as long
// as a probe of KVM.
func (d *Driver) Check(ctx context.Context) []backend.Finding {
	findings := append(d.host.Check(ctx), d.checkNested(ctx), qemuvm.CheckRunner(d.cfg.Runner))
	findings = append(findings, supervisor.CheckProxy(ctx, d.cfg.UpstreamProxy)...)
	return append(findings, d.tmpl.check(), qemuvm.CheckSpace("disk-state", d.cfg.StateDir), qemuvm.CheckSpace("disk-cache", d.cfg.CacheDir))
}

// Accel implements backend.Host.
func (d *Driver) Accel(ctx context.Context) string {
	accel, err := d.host.Accel(ctx)
	if err != nil {
		return ""
	}
	return string(accel)
}
