package doctor

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// Backends describes all backends, the default first.
func (s *Service) Backends() (out []api.Backend) {
	for _, b := range s.cfg.Fleet.All() {
		out = append(out, s.toBackend(b))
	}
	return out
}

func (s *Service) toBackend(b *fleet.Backend) api.Backend {
	out := api.Backend{Name: b.Name(), Driver: b.Info().Name, Default: b == s.cfg.Fleet.Default(), Up: true, Drained: b.Drained(), Supports: supports(b)}
	if err := b.Down(); err != nil {
		out.Up, out.Problem = false, err.Error()
	}
	return out
}

// Load drains the backends that were drained when the daemon before ended. It must come
// before any request.
func (s *Service) Load(ctx context.Context) error {
	names, err := s.drained(ctx)
	for _, b := range s.cfg.Fleet.All() {
		b.SetDrained(slices.Contains(names, b.Name()))
	}
	return err
}

// drained returns the names of the drained backends, including backends that the daemon does
// not have now.
func (s *Service) drained(ctx context.Context) (names []string, err error) {
	text, err := s.cfg.Store.Fact(ctx, store.FactDrained)
	if err == nil && text != "" {
		if err = json.Unmarshal([]byte(text), &names); err != nil {
			err = agentlab.Errorf(agentlab.CodeInternal, "the list of drained backends in the database cannot be decoded: %w", err)
		}
	}
	return names, err
}

// Drain drains a backend, or with false makes it usable again: no sandbox and no workspace is
// made on a drained backend, and jobs that need one wait. What is there stays and can be used.
// It lasts beyond the end of the daemon. The error has code invalid if there is no such
// backend.
func (s *Service) Drain(ctx context.Context, name string, drain bool) (api.Backend, error) {
	s.draining.Lock()
	defer s.draining.Unlock()
	b, err := s.cfg.Fleet.Choose(name)
	if err != nil {
		return api.Backend{}, err
	}
	names, err := s.drained(ctx)
	if err != nil {
		return api.Backend{}, err
	}
	names = slices.DeleteFunc(names, func(n string) bool { return n == name })
	if drain {
		names = append(names, name)
	}
	text, err := json.Marshal(names)
	if err != nil {
		return api.Backend{}, err
	}
	if err := s.cfg.Store.SetFact(ctx, store.FactDrained, string(text)); err != nil {
		return api.Backend{}, err
	}
	b.SetDrained(drain)
	return s.toBackend(b), nil
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
