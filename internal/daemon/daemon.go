package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/backends"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/server"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
	"github.com/agentlab-vm/agentlab/internal/version"
)

// Time limits for the shutdown of the parts.
const (
	serverGrace  = 3 * time.Second // running calls
	serviceGrace = 5 * time.Second // steps of the loops, whose contexts end at once
)

// Config is the configuration of a Daemon. Paths is required.
type Config struct {
	Paths  config.Paths
	Getenv func(string) string // nil means os.Getenv
	Stderr io.Writer           // a second copy of the log; nil means none
	Clock  func() time.Time    // nil means time.Now

	Backends registry.List // nil means backends.All
}

// Daemon is agentlabd. New opens everything, Run serves, Close closes everything.
type Daemon struct {
	cfg     Config
	log     *slog.Logger
	started time.Time
	undo    cleanup

	services *services
	api      *server.Server
	listener net.Listener

	tcp         server.TCP
	tcpListener net.Listener // nil when api.listen is empty

	scrapes        *http.Server
	scrapeListener net.Listener // nil when metrics.listen is empty

	stopOnce sync.Once
	stopping chan struct{} // closed when a stop was requested
}

// New opens the resources of the daemon: directories, lock, log, database,
// driver, services and the control socket. It starts nothing, and after an
// error nothing is open. The error of a second daemon with the same home has
// code exists.
func New(ctx context.Context, cfg Config) (_ *Daemon, err error) {
	if cfg.Getenv == nil {
		cfg.Getenv = os.Getenv
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Backends == nil {
		cfg.Backends = backends.All
	}
	d := &Daemon{cfg: cfg, started: cfg.Clock(), stopping: make(chan struct{})}
	defer func() {
		if err != nil {
			if d.log != nil {
				d.log.Error("the daemon does not start", "err", err)
			}
			err = errors.Join(err, d.Close())
		}
	}()
	if err := cfg.Paths.Ensure(); err != nil {
		return nil, err
	}
	held, err := cfg.Paths.TryLock() // before anything that two daemons could break
	if err != nil {
		return nil, err
	}
	d.undo.add(held.Unlock)
	held.Note(cfg.Paths.Socket()) // for clients with another XDG_RUNTIME_DIR
	if err := d.openLog(); err != nil {
		return nil, err
	}
	settings, err := cfg.Backends.Load(cfg.Paths.ConfigFile())
	if err != nil {
		return nil, err
	}
	if d.services, err = openServices(ctx, cfg, settings, d.log, &d.undo); err != nil {
		return nil, err
	}
	if err := d.openAPI(settings.API); err != nil {
		return nil, err
	}
	if err := d.openTCP(ctx, settings.API); err != nil {
		return nil, err
	}
	if err := d.openScrapes(ctx, settings.Metrics); err != nil {
		return nil, err
	}
	return d, nil
}

// logBytes is the maximum size of the daemon's log: agentlabd.log and its
// older half together.
const logBytes = 24 << 20

func (d *Daemon) openLog() error {
	path := d.cfg.Paths.DaemonLog()
	f, err := bounded.OpenLog(path, logBytes, 0, time.Now)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeDenied, "cannot write the daemon's log: %w", err).WithHint("make %s writable", path)
	}
	d.undo.add(f.Close)
	var w io.Writer = f
	if d.cfg.Stderr != nil {
		w = io.MultiWriter(f, d.cfg.Stderr)
	}
	level := slog.LevelInfo
	if d.cfg.Getenv("AGENTLAB_DEBUG") == "1" {
		level = slog.LevelDebug
	}
	d.log = slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level}))
	return nil
}

func (d *Daemon) openAPI(a config.API) error {
	rules := server.Rules{OwnUID: uint32(os.Geteuid())}
	switch {
	case d.cfg.Paths.System:
		rules.Groups = map[string]server.Access{}
		for group, role := range a.GroupRoles() {
			rules.Groups[group] = server.AccessOf(role)
		}
	case len(a.Groups) > 0:
		return agentlab.Errorf(agentlab.CodeInvalid, "groups are supported only by a system-wide daemon (--system)").
			WithField("api.groups").WithHint("remove the setting, or create a token for other users: agentlab token create NAME")
	}
	api, err := server.New(server.Config{
		Services: d.services.forAPI(d),
		Rules:    rules,
		Logger:   d.log.With("part", "api"),
		Version:  version.Get().Version,
		Proxied:  d.services.settings.UpstreamProxy.URL != "",
		Trash:    config.Days(d.services.settings.Retention.TrashDays),

		DefaultProfile: d.services.settings.DefaultProfile, SessionProfile: d.services.settings.SessionProfile,
	})
	if err != nil {
		return err
	}
	d.api = api
	d.listener, err = d.listen(rules.Groups)
	if err != nil {
		return err
	}
	d.undo.add(closeOnce(d.listener))
	return nil
}

// listen opens the control socket. The daemon has the lock of the home, so an
// existing socket is that of a dead daemon. Any other file at its path is an
// error.
//
// A file belongs to one group only. With several groups every user can connect,
// and the credentials of the peer alone decide the access.
func (d *Daemon) listen(groups map[string]server.Access) (net.Listener, error) {
	path := d.cfg.Paths.Socket()
	_ = os.Remove(path + config.StoppedSuffix)
	switch {
	case !d.cfg.Paths.System:
		return sockpath.Listen(path, 0o600)
	case len(groups) > 1:
		return sockpath.Listen(path, 0o666)
	}
	l, err := sockpath.Listen(path, 0o660)
	if err != nil {
		return nil, err
	}
	for group := range groups {
		if err := chownGroup(path, group); err != nil {
			// Root can still use it; other users get an error of code denied.
			d.log.Warn("only root can use the control socket", "group", group, "err", err)
		}
	}
	return l, nil
}

func chownGroup(path, group string) error {
	g, err := user.LookupGroup(group)
	if err != nil {
		return err
	}
	gid, err := strconv.Atoi(g.Gid)
	if err != nil {
		return err
	}
	return os.Chown(path, -1, gid)
}

// Run serves until ctx ends or a client stops the daemon, and then waits a few
// seconds for requests and steps that run. VMs continue to run. It returns an
// error if a part of the daemon failed.
func (d *Daemon) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d.log.Info("the daemon runs", "version", version.String(), "pid", os.Getpid(), "backend", d.services.fleet.Default().Name(), "socket", d.cfg.Paths.Socket())

	failed := make(chan error, 1)
	fail := func(part string, err error) {
		if err != nil && ctx.Err() == nil {
			select {
			case failed <- fmt.Errorf("%s: %w", part, err):
			default:
			}
		}
	}
	loops := d.services.start(ctx, fail)
	d.services.doctor.Start(ctx)
	served := make(chan struct{})
	go func() {
		defer close(served)
		var both sync.WaitGroup
		both.Go(func() { fail("control API", d.api.Serve(d.listener)) })
		if d.tcpListener != nil {
			d.log.Info("the control API is served over TCP", "address", d.tcpListener.Addr(), "tls", d.tcp.TLS != nil)
			both.Go(func() { fail("control API over TCP", d.api.ServeTCP(d.tcpListener, d.tcp)) })
		}
		if d.scrapeListener != nil {
			both.Go(func() { fail("metrics", d.serveScrapes()) })
		}
		both.Wait()
	}()
	if err := notify(d.cfg.Getenv, "READY=1"); err != nil { // the socket already accepts calls
		d.log.Warn("cannot notify the service manager that the daemon is ready", "err", err)
	}

	var err error
	select {
	case <-ctx.Done():
	case <-d.stopping:
	case err = <-failed:
		d.log.Error("a component of the daemon failed", "err", err)
	}
	d.log.Info("the daemon ends")
	d.Stop()
	grace, done := context.WithTimeout(context.WithoutCancel(ctx), serverGrace)
	defer done()
	if err := d.api.Shutdown(grace); err != nil {
		d.log.Warn("calls were interrupted", "err", err)
	}
	if d.scrapes != nil {
		_ = d.scrapes.Close() // a scrape is repeated
	}
	<-served
	cancel()
	select {
	case <-loops:
	case <-time.After(serviceGrace):
		d.log.Warn("a service did not end in time")
	}
	return err
}

// Stop implements server.System: it makes Run return. It may be called more than
// once.
func (d *Daemon) Stop() { d.stopOnce.Do(func() { close(d.stopping) }) }

// Health implements server.System. It does no I/O.
func (d *Daemon) Health() api.Health {
	h := api.Health{Status: "ok", Version: version.Get().Version}
	select {
	case <-d.stopping:
		h.Status = "stopping"
	default:
	}
	return h
}

// Status implements server.System.
func (d *Daemon) Status(ctx context.Context) (api.Status, error) {
	s, err := d.services.doctor.Status(ctx)
	info := version.Get()
	s.Version, s.Commit, s.PID, s.StartedAt = info.Version, info.Commit, os.Getpid(), d.started.UTC()
	s.Home, s.StateDir = d.cfg.Paths.Home, d.cfg.Paths.State
	if a := d.TCPAddr(); a != nil {
		s.Listen = a.String()
	}
	if err != nil {
		return s, err
	}
	pool, err := d.services.pool.Status(ctx)
	for _, e := range pool {
		s.WarmPool = append(s.WarmPool, api.PoolStatus{Image: e.Image, Profile: cmp.Or(e.Profile, d.services.settings.DefaultProfile), Count: e.Count, Ready: e.Ready, Problem: e.Problem})
	}
	return s, err
}

// Close closes everything that New opened. Run must have returned.
func (d *Daemon) Close() error { return d.undo.run() }
