package daemon

import (
	"context"
	"errors"
	"net"
	"net/http"

	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/connlimit"
	"github.com/agentlab-vm/agentlab/internal/metrics"
	"github.com/agentlab-vm/agentlab/internal/version"
)

// maxScrapers is the maximum number of connections to the port for Prometheus.
const maxScrapers = 16

func (s *services) openMetrics(context.Context, *cleanup) error {
	from := metrics.Sources{Store: s.store, Sandboxes: s.sandboxes, Jobs: s.jobs, Messages: s.messages, Boots: s.sandboxes, VMs: s.doctor, Workspaces: s.workspaces,
		ImageUse: s.imageUse, Fleet: s.fleet, State: s.cfg.Paths.State, Images: s.cfg.Paths.Images(), Database: s.cfg.Paths.Database()}
	for _, e := range s.poolEntries() {
		from.PoolWanted += e.Count
	}
	s.metrics.Start(metrics.Config{Sources: from, Version: version.Get().Version, Backend: s.fleet.Default().Name(), Logger: s.log.With("part", "metrics")})
	return nil
}

// imageUse counts the images on the host and their bytes, by whether they are current.
func (s *services) imageUse(ctx context.Context) (map[bool]int, map[bool]int64, error) {
	list, err := s.images.List(ctx)
	count, bytes := map[bool]int{}, map[bool]int64{}
	for _, img := range list {
		count[img.Current]++
		bytes[img.Current] += img.DiskUsage()
	}
	return count, bytes, err
}

// openScrapes opens the port for Prometheus, if one is configured. It reads the
// token before any client connects.
func (d *Daemon) openScrapes(ctx context.Context, m config.Metrics) error {
	if m.Listen == "" {
		return nil
	}
	token, err := metrics.ReadToken(m.TokenFile)
	if err != nil {
		return config.At(d.cfg.Paths.ConfigFile(), err)
	}
	l, err := d.listenTCP(ctx, "metrics.listen", m.Listen)
	if err != nil {
		return err
	}
	d.scrapeListener, d.scrapes = connlimit.New(l, maxScrapers, maxScrapers), d.services.metrics.Server(token)
	return nil
}

func (d *Daemon) serveScrapes() error {
	d.log.Info("metrics are served", "address", d.scrapeListener.Addr())
	if err := d.scrapes.Serve(d.scrapeListener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// ScrapeAddr returns the address of the port for Prometheus, nil if there is none.
func (d *Daemon) ScrapeAddr() net.Addr {
	if d.scrapeListener == nil {
		return nil
	}
	return d.scrapeListener.Addr()
}
