package doctor

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// Backends describes all backends, the default first.
func (s *Service) Backends() (out []api.Backend) {
	for i, b := range s.cfg.Fleet.All() {
		one := api.Backend{Name: b.Name(), Driver: b.Info().Name, Default: i == 0, Up: true, Supports: supports(b)}
		if err := b.Down(); err != nil {
			one.Up, one.Problem = false, err.Error()
		}
		out = append(out, one)
	}
	return out
}

// supports lists the groups and capabilities of a backend.
func supports(b *fleet.Backend) []string {
	can, out := b.Can(), []string{}
	for _, c := range []struct {
		name string
		ok   bool
	}{
		{"allowlist", can.Allowlist}, {"network-off", can.NetworkOff}, {"private", can.Private}, {"egress-log", b.Net != nil},
		{"suspend", b.Power != nil}, {"suspend-to-disk", can.SuspendToDisk}, {"deadlines", can.Deadlines}, {"console", b.Console != nil},
		{"snapshots", b.Snapshots != nil}, {"forks", can.Forks}, {"templates", b.Templates != nil},
		{"workspaces", b.Volumes != nil}, {"workspace-hotplug", can.VolumeHotplug}, {"attached-workspace-snapshots", can.AttachedVolumeSnapshots},
	} {
		if c.ok {
			out = append(out, c.name)
		}
	}
	return out
}

// CheckBackend checks the backend with that name now, and returns all findings. The error
// has code invalid if there is none.
func (s *Service) CheckBackend(ctx context.Context, name string) (api.HostChecks, error) {
	b, err := s.cfg.Fleet.Choose(name)
	if err != nil {
		return api.HostChecks{}, err
	}
	out := api.HostChecks{Backend: b.Name(), Bridge: b.Info().Addresses != nil, Checks: []api.Finding{}}
	for _, c := range s.backends {
		if c.b == b {
			for _, f := range c.withDown(c.now(ctx)) {
				out.Checks = append(out.Checks, toFinding(f))
			}
		}
	}
	return out, ctx.Err()
}
