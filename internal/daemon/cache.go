package daemon

import (
	"context"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
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
	outside, err := gate.NewOutside(gate.ProxyConfig(s.settings.UpstreamProxy))
	if err != nil {
		return err
	}
	certificates, err := profile.ReadCertificates(s.settings.Guest.CACertificates)
	if err != nil {
		return err
	}
	cfg := regcache.Configured(c)
	cfg.MinFree, cfg.Base, cfg.Certificates = int64(s.settings.Limits.MinFreeMB)<<20, base, certificates
	cfg.Outside, cfg.Sandboxes, cfg.Profiles, cfg.Audit = outside, s.store, s.profiles, s.fleet
	cfg.Metrics, cfg.Logger = s.metrics, s.log.With("part", "cache")
	if s.cache, err = regcache.New(cfg); err != nil {
		return err
	}
	undo.add(s.cache.Close)
	s.store.Subscribe(func(c agentlab.Commit) {
		for _, sb := range c.Sandboxes {
			s.cache.SandboxChanged(sb)
		}
	})
	s.doctor.Add(s.cache)
	return nil
}
