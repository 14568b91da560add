package daemon

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/snapshot"
	"github.com/agentlab-vm/agentlab/internal/warmpool"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/audit"
	"github.com/agentlab-vm/agentlab/internal/auth"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/bootstrap"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/devproxy"
	"github.com/agentlab-vm/agentlab/internal/doctor"
	"github.com/agentlab-vm/agentlab/internal/gc"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/guestplane/regcache"
	"github.com/agentlab-vm/agentlab/internal/hostclock"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/job"
	"github.com/agentlab-vm/agentlab/internal/message"
	"github.com/agentlab-vm/agentlab/internal/metrics"
	"github.com/agentlab-vm/agentlab/internal/profile"
	"github.com/agentlab-vm/agentlab/internal/recovery"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/secret"
	"github.com/agentlab-vm/agentlab/internal/server"
	"github.com/agentlab-vm/agentlab/internal/session"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/verify"
	"github.com/agentlab-vm/agentlab/internal/workspace"
)

// services are the parts of the daemon behind its listeners.
type services struct {
	cfg      Config
	settings config.Config
	log      *slog.Logger

	bus          *bus
	metrics      *metrics.Set
	store        *store.Store
	images       *image.Store
	fleet        *fleet.Fleet
	profiles     *profile.Library
	vault        *secret.Vault
	artifacts    *artifact.Service
	space        *doctor.Space
	doctor       *doctor.Service
	backups      *recovery.Backups
	records      *recovery.Records
	installation *recovery.Installation
	clock        *hostclock.Watch
	bootstrap    *bootstrap.Service
	sandboxes    *sandbox.Service
	pool         *warmpool.Pool
	snapshots    *snapshot.Service
	workspaces   *workspace.Service
	sessions     *session.Service
	ports        *devproxy.Service
	messages     *message.Service
	jobs         *job.Service
	guests       *guestplane.Plane
	gc           *gc.Collector
	tokens       *auth.Service
	audit        *audit.Service

	hostNetwork *hostnet.Local
	cache       *regcache.Service // nil: it is off
}

// openServices creates the services that the API calls. undo closes what it
// opened.
func openServices(ctx context.Context, cfg Config, settings config.Config, log *slog.Logger, undo *cleanup) (*services, error) {
	s := &services{cfg: cfg, settings: settings, log: log, bus: newBus(), metrics: metrics.New(), vault: secret.NewVault(cfg.Paths.Secrets()),
		space: doctor.NewSpace(cfg.Paths.State, cfg.Paths.Images(), cfg.Paths.Reserve(), int64(settings.Limits.MinFreeMB)<<20, log.With("part", "space"))}
	s.hostNetwork = hostnet.ForHost(settings, cfg.Paths, log.With("part", "host network"))
	undo.add(s.hostNetwork.Close)
	for _, open := range []func(context.Context, *cleanup) error{s.openStore, s.openImages, s.openDriver, s.openCache, s.openArtifacts, s.openBootstrap, s.openAudit, s.openJobs, s.openGC, s.openMetrics} {
		if err := open(ctx, undo); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *services) openStore(ctx context.Context, undo *cleanup) (err error) {
	s.clock = hostclock.New(s.cfg.Clock, s.log.With("part", "clock"))
	s.cfg.Clock = s.clock.Now // from here on all services use the same clock
	s.store, s.installation, err = recovery.Open(ctx, s.cfg.Paths, store.Options{
		Clock: s.cfg.Clock, OnWrite: s.metrics.Written, OnRead: s.metrics.Read, Full: s.space.Release,
	})
	if err != nil {
		return s.space.AddHint(err)
	}
	undo.add(s.store.Close)
	s.store.Subscribe(s.bus.publish)
	s.store.Subscribe(s.metrics.Committed)
	s.records = recovery.NewRecords(recovery.RecordsConfig{
		Dir: s.cfg.Paths.Records(), Store: s.store, Keep: config.Days(s.settings.Retention.ArtifactsDays), Clock: s.cfg.Clock, Logger: s.log.With("part", "records"),
	})
	undo.add(s.records.Close)
	if err := s.clock.Load(ctx, s.store); err != nil {
		return err
	}
	s.space.MakeReserve()
	s.tokens = auth.New(auth.Config{Store: s.store, Clock: s.cfg.Clock, Logger: s.log.With("part", "tokens")})
	return nil
}

func (s *services) openImages(context.Context, *cleanup) error {
	s.images = image.NewStore(s.cfg.Paths.Images(), image.Options{
		InUse: func(ref string) (bool, error) {
			used, err := s.store.ImagesInUse(context.Background())
			return used[ref] > 0, err
		},
		Now: s.cfg.Clock,
	})
	return nil
}

func (s *services) openDriver(ctx context.Context, undo *cleanup) error {
	var list []*fleet.Backend
	for _, in := range s.settings.Instances() {
		b, err := s.cfg.Backends.Open(in, s.cfg.Paths, registry.Env{
			Config: s.settings, Images: s.images, Network: s.hostNetwork, Getenv: s.cfg.Getenv, Log: s.log.With("part", "driver", "backend", in.Name),
		})
		if err != nil {
			return err
		}
		undo.add(b.Close)
		list = append(list, b)
	}
	s.fleet = fleet.New(list...).Observe(s.metrics)
	_, built := s.fleet.Default().Images.(image.Bootable)
	s.doctor = doctor.New(s.doctorConfig(built))
	if err := s.doctor.Load(ctx); err != nil {
		return err
	}
	var private []agentlab.PrivateTarget
	for _, p := range s.settings.Network.Private {
		private = append(private, agentlab.PrivateTarget{Host: p.Host, Port: p.Port, Reason: p.Reason, Source: profile.SourceConfig})
	}
	certificates, err := profile.ReadCertificates(s.settings.Guest.CACertificates)
	if err == nil {
		err = profile.CheckPrivateTargets(private, s.settings.APIPorts())
	}
	if err != nil {
		return config.At(s.cfg.Paths.ConfigFile(), err)
	}
	s.profiles = profile.NewLibrary(s.cfg.Paths.Profiles(), s.fleet.Infos()...).Names(s.fleet.Names()...).Options(s.cfg.Backends.Options()).AllowPrivate(private).ReservePorts(s.settings.APIPorts()...).TrustCertificates(certificates)
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
			Quarantine: config.Days(s.settings.Retention.ArtifactsDays),
		},
		Space:  s.space.Guard,
		Clock:  s.cfg.Clock,
		Logger: s.log.With("part", "artifacts"),
	})
	if err != nil {
		return err
	}
	undo.add(s.artifacts.Close)
	s.backups = recovery.NewBackups(recovery.BackupsConfig{
		Dir: s.cfg.Paths.Backups(), Store: s.store, Keep: s.settings.Backups, Space: s.space, Clock: s.cfg.Clock, Logger: s.log.With("part", "backups"),
	})
	return nil
}

func (s *services) openBootstrap(context.Context, *cleanup) error {
	s.bootstrap = bootstrap.New(bootstrap.Config{
		Store: s.store, Profiles: s.profiles, Secrets: s.vault, Backends: s.fleet, Cache: s.cache,
		TokenTTL: s.settings.BootstrapTTL(), ArtifactBytes: s.artifacts.Limits().JobBytes,
		Clock: s.cfg.Clock, Logger: s.log.With("part", "bootstrap"),
	})
	return nil
}

// openAudit creates the service that stores the egress log of the backend, if
// the backend has one.
func (s *services) openAudit(context.Context, *cleanup) error {
	cfg := audit.Config{Store: s.store, Log: s.fleet, Clock: s.cfg.Clock, Logger: s.log.With("part", "audit"),
		Limits: audit.Limits{Rows: s.settings.Limits.EgressRecords}, Redactor: s.bootstrap}
	s.audit = audit.New(cfg)
	return nil
}

// doctorConfig returns what the host is checked with; built says that the images
// of sandboxes are built here.
func (s *services) doctorConfig(built bool) doctor.Config {
	cfg := doctor.Config{Store: s.store, Fleet: s.fleet, Space: s.space, Clock: s.cfg.Clock}
	if built {
		cfg.Images, cfg.ImageNames = s.images, []string{s.settings.Images.Base, s.settings.Images.Agents}
	}
	return cfg
}

// bundles returns what makes doctor bundles.
func (s *services) bundles() *doctor.Bundles {
	return doctor.NewBundles(doctor.BundleConfig{
		Rows: s.store, Egress: s.audit, Logs: s.artifacts, Secrets: s.bootstrap, Fleet: s.fleet, Checks: s.doctor.Checks,
		Settings: s.settings.Shown(), SecretFiles: s.settings.SecretFiles(), LogFile: s.cfg.Paths.DaemonLog(), Made: s.metrics.BundleMade,
	})
}

// openJobs creates the guest plane, the services of sandboxes and jobs, and the
// services for guests. Each has references to the previous ones only.
func (s *services) openJobs(context.Context, *cleanup) error {
	s.guests = guestplane.New(guestplane.Config{Store: s.store, Redactors: s.bootstrap, Clock: s.cfg.Clock, Logger: s.log.With("part", "guests")})
	s.openSandboxes()
	s.jobs = job.New(job.Config{
		Store: s.store, Sandboxes: s.sandboxes, Snapshots: s.snapshots, Profiles: s.profiles, Secrets: s.vault, Bootstrap: s.bootstrap, Artifacts: s.artifacts,
		DefaultProfile: s.settings.DefaultProfile, DefaultAgent: s.settings.DefaultAgent,
		ShellImage: s.settings.Images.Base, AgentsImage: s.settings.Images.Agents,
		Egress: s.audit,
		Clock:  s.cfg.Clock,
		Logger: s.log.With("part", "jobs"),
	})
	s.messages = message.New(s.store, agentlab.MessageLimits(s.settings.Messages))
	s.guests.Add(s.guestServices()...)
	s.sessions = session.New(session.Config{
		Store: s.store, Workspaces: s.workspaces, Sandboxes: s.sandboxes, Profiles: s.profiles, Fleet: s.fleet, DefaultProfile: s.settings.DefaultProfile, AgentsImage: s.settings.Images.Agents,
	})
	s.ports = devproxy.New(devproxy.Config{
		Sandboxes: s.sandboxes, Sessions: s.sessions, Commits: s.store, Off: !s.settings.DevServers.Enabled,
		File: s.cfg.Paths.Ports(), Clock: s.cfg.Clock, Logger: s.log.With("part", "ports"),
	})
	s.doctor.Add(s.snapshots, s.pool, s.sandboxes, s.workspaces, s.backups, s.clock, defaultProfile{s.profiles.Use, s.settings, s.cfg.Paths.ConfigFile()})
	return nil
}

func (s *services) openSandboxes() {
	core := sandbox.NewCore(sandbox.Config{
		Secrets: s.vault,
		Store:   s.store, Sessions: s.store, Fleet: s.fleet, Profiles: s.profiles,
		Bootstrap: s.bootstrap, Artifacts: s.artifacts,
		DefaultProfile: s.settings.DefaultProfile, DefaultImage: s.settings.Images.Base,
		Limits: sandbox.Limits{
			VMIDFirst: s.settings.VMIDRange.First, VMIDLast: s.settings.VMIDRange.Last,
			MaxSandboxes: s.settings.Limits.MaxSandboxes, MaxTTL: s.settings.MaxTTL(), BootTimeout: s.settings.BootTimeout(),
			Salvage: time.Duration(s.settings.Retention.SalvageHours) * time.Hour, SalvageBytes: int64(s.settings.Limits.SalvageGB) << 30,
		},
		Audit: s.audit, Host: s.doctor, Guests: s.guests, Jobs: job.Work{Store: s.store, Artifacts: s.artifacts, Profiles: s.profiles},
		IntentsDir: s.cfg.Paths.Ending(),
		Clock:      s.cfg.Clock,
		Logger:     s.log.With("part", "sandboxes"),
	})
	s.workspaces = workspace.New(workspace.Config{
		Core: core, Store: s.store, Leases: s.store, Fleet: s.fleet,
		Limits: workspace.Limits{
			Quota:  agentlab.WorkspaceQuota{Count: s.settings.Limits.MaxWorkspaces, TotalGB: s.settings.Limits.WorkspacesGB},
			SizeGB: s.settings.Limits.WorkspaceGB,
		},
		Metrics: s.metrics,
		Clock:   s.cfg.Clock, Logger: s.log.With("part", "workspaces"),
	})
	s.pool = warmpool.New(core, s.store, s.poolEntries()...)
	s.snapshots = snapshot.New(snapshot.Config{
		Core: core, Store: s.store, Profiles: s.profiles, Bootstrap: s.bootstrap, Pool: s.pool,
		Quota:      agentlab.SnapshotQuota{Count: s.settings.Limits.MaxSnapshots, Bytes: int64(s.settings.Limits.SnapshotsGB) << 30},
		SetupBytes: int64(s.settings.Limits.SetupCacheGB) << 30,
	})
	s.sandboxes = sandbox.New(core, sandbox.Parts{Pool: s.pool, Snapshots: s.snapshots, Workspaces: s.workspaces})
}

// poolEntries returns the entries of the warm pool.
func (s *services) poolEntries() (out []warmpool.Entry) {
	list, _ := s.settings.Pool() // valid: the file was checked when it was read
	for _, e := range list {
		out = append(out, warmpool.Entry(e))
	}
	return out
}

func (s *services) openGC(context.Context, *cleanup) error {
	s.gc = gc.New(gc.Config{
		Store: s.store, Files: s.artifacts, Jobs: s.jobs, Profiles: s.profiles, Time: s.clock,
		Sweepers: []gc.Sweeper{s.artifacts, s.records, s.bootstrap}, Installation: s.installation,
		Artifacts: config.Days(s.settings.Retention.ArtifactsDays), Bundles: config.Days(s.settings.Retention.BundlesDays),
		Events:    config.Days(s.settings.Retention.EventsDays),
		Egress:    config.Days(s.settings.Retention.EgressDays),
		Snapshots: s.snapshots, SnapshotAge: config.Days(s.settings.Retention.SnapshotsDays),
		Workspaces: s.workspaces, Trash: config.Days(s.settings.Retention.TrashDays),
		Rows:   config.Days(s.settings.Retention.JobsDays),
		Clock:  s.cfg.Clock,
		Logger: s.log.With("part", "gc"),
	})
	return nil
}

// start runs the loops until ctx ends. The channel is closed when all have
// ended; fail is called when a loop ends by itself.
func (s *services) start(ctx context.Context, fail func(part string, err error)) <-chan struct{} {
	var wg sync.WaitGroup
	run := func(part string, loop func(context.Context) error) {
		wg.Go(func() { fail(part, loop(ctx)) })
	}
	run("sandboxes", s.sandboxes.Run)
	run("warm pool", s.pool.Run)
	run("snapshots", s.snapshots.Run)
	run("workspaces", s.workspaces.Run)
	run("jobs", s.jobs.Run)
	run("gc", s.gc.Run)
	run("space", func(ctx context.Context) error { return s.space.Run(ctx, s.store) })
	run("backups", s.backups.Run)
	run("records", s.records.Run)
	run("ports", s.ports.Run)
	run("clock", s.clock.Run)
	run("audit", s.audit.Run)
	run("host network", func(ctx context.Context) error { return s.hostNetwork.Run(ctx, os.Geteuid() == 0) })
	run("images", func(ctx context.Context) error { s.images.Sweep(ctx); return nil })
	done := make(chan struct{})
	go func() {
		defer close(done)
		wg.Wait()
	}()
	return done
}

// events are the stored events and the ones to come.
type events struct {
	*store.Store
	bus *bus
}

// Subscribe implements server.Events.
func (e events) Subscribe() (<-chan agentlab.Event, func()) { return e.bus.Subscribe() }

// forAPI returns the services that the control API calls.
func (s *services) forAPI(d *Daemon) server.Services {
	return server.Services{
		Jobs:        s.jobs,
		Sandboxes:   s.sandboxes,
		Snapshots:   s.snapshots,
		Artifacts:   s.artifacts,
		Profiles:    s.profiles,
		Secrets:     s.vault,
		Images:      s.images,
		ImageUse:    s.store,
		Templates:   s.snapshots,
		Workspaces:  s.workspaces,
		Sessions:    s.sessions,
		Ports:       s.ports,
		Events:      events{s.store, s.bus},
		Messages:    s.messages,
		Egress:      s.audit,
		Verify:      verify.New(verify.Config{Sandboxes: s.sandboxes, Fleet: s.fleet}),
		System:      d,
		Doctor:      s.doctor,
		Bundles:     s.bundles(),
		Backups:     s.backups,
		Clock:       s.clock,
		Metrics:     s.metrics,
		HostNetwork: s.hostNetwork,
		Tokens:      s.tokens,
		Cache:       s.cache,
	}
}
