package lima

import (
	"context"
	"os"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Check implements backend.Driver. The first call on a host may take as long
// as a probe of KVM.
func (d *Driver) Check(ctx context.Context) []backend.Finding {
	findings := append(d.host.Check(ctx), d.checkLimactl(ctx), checkUser(os.Geteuid()), qemuvm.CheckRunner(d.cfg.Runner))
	findings = append(findings, supervisor.CheckProxy(ctx, d.cfg.UpstreamProxy)...)
	return append(findings, qemuvm.CheckSpace("disk-state", d.cfg.StateDir), qemuvm.CheckSpace("disk-cache", d.cfg.CacheDir))
}

func (d *Driver) checkLimactl(ctx context.Context) backend.Finding {
	v, err := d.version(ctx)
	switch {
	case err != nil:
		return backend.Findf("limactl", backend.LevelError, agentlab.HintOf(err), "%s", err)
	case v.Less(minLima):
		return backend.Findf("limactl", backend.LevelError, installLimactl, "limactl %s is too old, %s is needed", v.Text, minLima)
	}
	return backend.Findf("limactl", backend.LevelOK, "", "limactl %s", v.Text)
}

func checkUser(uid int) backend.Finding {
	if uid == 0 {
		return backend.Findf("user", backend.LevelError, "run the daemon as an ordinary user, or use another backend", "limactl does not run as root")
	}
	return backend.Findf("user", backend.LevelOK, "", "the daemon is not root")
}
