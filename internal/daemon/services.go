package daemon

import (
	"context"
	"log/slog"
	"sync"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/guestserver"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/profile"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/secret"
	"github.com/agentlab-vm/agentlab/internal/server"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// services are the parts of the daemon behind its listeners.
type services struct {
	cfg      Config
	settings config.Config
	log      *slog.Logger

	bus       *bus
	store     *store.Store
	images    *image.Store
	driver    backend.Driver
	bootable  sandbox.Images // what the driver boots
	profiles  *profile.Library
	vault     *secret.Vault
	artifacts *artifact.Service
	sandboxes *sandbox.Service
	guests    *guestserver.Server
}

// openServices makes everything that the API calls. What it opened is undone
// by undo.
func openServices(ctx context.Context, cfg Config, settings config.Config, log *slog.Logger, undo *cleanup) (*services, error) {
	s := &services{cfg: cfg, settings: settings, log: log, bus: newBus(), vault: secret.NewVault(cfg.Paths.Secrets())}
	for _, open := range []func(context.Context, *cleanup) error{s.openStore, s.openImages, s.openDriver, s.openArtifacts, s.openSandboxes} {
		if err := open(ctx, undo); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *services) openStore(ctx context.Context, undo *cleanup) (err error) {
	s.store, err = store.Open(ctx, s.cfg.Paths.Database(), store.Options{Clock: s.cfg.Clock, OnCommit: s.committed})
	if err != nil {
		return err
	}
	undo.add(s.store.Close)
	return nil
}

func (s *services) openImages(context.Context, *cleanup) error {
	s.images = image.NewStore(s.cfg.Paths.Images(), image.Options{
		InUse: func(ref string) (bool, error) {
			used, err := imagesInUse(context.Background(), s.store)
			return used[ref], err
		},
		Now: s.cfg.Clock,
	})
	return nil
}

func (s *services) openDriver(_ context.Context, undo *cleanup) error {
	p, err := openPlace(driverEnv{
		paths: s.cfg.Paths, settings: s.settings, images: s.images, getenv: s.cfg.Getenv, log: s.log.With("part", "driver"),
	})
	if err != nil {
		return err
	}
	s.driver, s.bootable = p.driver, p.images
	undo.add(s.driver.Close)
	s.profiles = profile.NewLibrary(s.cfg.Paths.Profiles(), s.driver.Info())
	return nil
}

func (s *services) openArtifacts(_ context.Context, undo *cleanup) (err error) {
	const mib = 1 << 20
	s.artifacts, err = artifact.New(artifact.Config{
		Dir:   s.cfg.Paths.State,
		Store: s.store,
		Limits: artifact.Limits{
			FileBytes: int64(s.settings.Artifacts.MaxFileMB) * mib, JobBytes: int64(s.settings.Artifacts.MaxJobMB) * mib,
			JobFiles: s.settings.Artifacts.MaxFiles, LogBytes: int64(s.settings.Logs.MaxJobMB) * mib,
		},
		Ended: func(ctx context.Context, jobID string) (bool, error) {
			j, err := s.store.Job(ctx, jobID)
			return j.Status.Final(), err
		},
		Clock:  s.cfg.Clock,
		Logger: s.log.With("part", "artifacts"),
	})
	if err != nil {
		return err
	}
	undo.add(s.artifacts.Close)
	return nil
}

func (s *services) openSandboxes(context.Context, *cleanup) error {
	s.sandboxes = sandbox.New(sandbox.Config{
		Store: sandboxStore{s.store}, Driver: s.driver, Images: s.bootable, Profiles: s.profiles,
		DefaultProfile: s.settings.DefaultProfile, DefaultImage: s.settings.Images.Base,
		Limits: sandbox.Limits{
			VMIDFirst: s.settings.VMIDRange.First, VMIDLast: s.settings.VMIDRange.Last,
			MaxSandboxes: s.settings.Limits.MaxSandboxes, MaxTTL: s.settings.MaxTTL(), BootstrapTTL: s.settings.BootstrapTTL(),
		},
		Clock:  s.cfg.Clock,
		Logger: s.log.With("part", "sandboxes"),
	})
	return nil
}

// committed is told of every event after its commit. It must be quick.
func (s *services) committed(events []agentlab.Event) {
	s.bus.publish(events)
	for _, e := range events {
		if e.Kind == agentlab.EventJobStatus && s.artifacts != nil {
			s.artifacts.WakeLog(e.JobID)
		}
	}
}

// start runs the loops until ctx ends. The channel is closed when all have
// ended; fail is told when one ends by itself.
func (s *services) start(ctx context.Context, fail func(part string, err error)) <-chan struct{} {
	var wg sync.WaitGroup
	run := func(part string, loop func(context.Context) error) {
		wg.Go(func() { fail(part, loop(ctx)) })
	}
	run("sandboxes", s.sandboxes.Run)
	done := make(chan struct{})
	go func() {
		defer close(done)
		wg.Wait()
	}()
	return done
}

// forAPI gives the control API its view of the services.
func (s *services) forAPI(system server.System) server.Services {
	return server.Services{
		Jobs:      jobView{},
		Sandboxes: sandboxView{s.sandboxes},
		Artifacts: artifactView{s.artifacts},
		Profiles:  profileView{s.profiles},
		Secrets:   s.vault,
		Images:    imageView{s.images, s.store},
		Events:    eventView{s.store, s.bus},
		System:    system,
	}
}
