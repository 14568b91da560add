package daemon

import (
	"context"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
	"github.com/agentlab-vm/agentlab/internal/guestplane/regcache"
	"github.com/agentlab-vm/agentlab/internal/profile"
)

// openCache opens the registry cache, if it is enabled.
func (s *services) openCache(_ context.Context, undo *cleanup) error {
	c := s.settings.Cache
	if !c.Enabled {
		return nil
	}
	base := s.fleet.Default().Info().ControllerURL
	for _, b := range s.fleet.All() {
		if b.Net == nil || !b.Can().EgressRecords || b.Info().ControllerURL != base {
			return b.Without("cannot record the requests to the registry cache in the egress log").
				WithField("cache.enabled").WithHint("set cache.enabled: false, or use another backend")
		}
	}
	if c.Dir == "" {
		c.Dir = filepath.Join(s.cfg.Paths.Cache, "registries")
	}
	network, err := gate.NewOutside(gate.ProxyConfig(s.settings.UpstreamProxy))
	if err != nil {
		return err
	}
	certificates, err := profile.ReadCertificates(s.settings.Guest.CACertificates)
	if err != nil {
		return err
	}
	log := s.log.With("part", "cache")
	out := outside.New(outside.Config{Network: network, Sandboxes: s.store, Audit: s.fleet, Certificates: certificates, Logger: log})
	undo.add(out.Close)
	s.store.Subscribe(func(c agentlab.Commit) {
		for _, sb := range c.Sandboxes {
			out.SandboxChanged(sb)
		}
	})
	s.cache, err = regcache.New(regcache.Config{
		Cache: c, MinFree: int64(s.settings.Limits.MinFreeMB) << 20, Base: base, Outside: out, Profiles: s.profiles, Metrics: s.metrics, Logger: log,
	})
	if err != nil {
		return err
	}
	undo.add(s.cache.Close)
	s.doctor.Add(s.cache)
	return nil
}
