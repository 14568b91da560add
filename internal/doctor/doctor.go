// Package doctor checks the host: the backend, the disk, the images, and what
// the other services report about themselves. The status shows its findings, and
// no sandbox is created while the backend cannot start one.
package doctor

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// The maximum age of the findings of the backend's check before a status
// request starts the next check, and how long the first status request waits
// for them.
const (
	findingsAge  = time.Minute
	firstFinding = 2 * time.Second
)

// checkLimit is the time limit of a check that a client waits for, unless the driver has
// another one.
const checkLimit = 30 * time.Second

// Store counts rows, and keeps which backends are drained; *store.Store implements it.
type Store interface {
	CountSandboxes(ctx context.Context) (map[agentlab.SandboxState]int, error)
	CountJobs(ctx context.Context) (map[agentlab.JobStatus]int, error)
	Fact(ctx context.Context, name string) (string, error)
	SetFact(ctx context.Context, name, value string) error
}

// Reporter is a service that reports findings about itself.
type Reporter interface{ Findings() []backend.Finding }

// Config is what a Service needs.
type Config struct {
	Store Store
	Fleet *fleet.Fleet
	Space *Space

	Images     Images   // nil: sandboxes boot no images that are built here
	ImageNames []string // that sandboxes boot by default, the most needed first

	Clock func() time.Time // nil means time.Now
}

// Service checks the host. It is safe for concurrent use.
type Service struct {
	cfg       Config
	clock     func() time.Time
	reporters []Reporter

	backends []*checked

	draining sync.Mutex // held while the list of drained backends changes

	mu     sync.Mutex
	images []backend.Finding
}

// New returns a Service that has checked nothing yet.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, clock: cfg.Clock, reporters: []Reporter{cfg.Space}}
	if s.clock == nil {
		s.clock = time.Now
	}
	for _, b := range cfg.Fleet.All() {
		s.backends = append(s.backends, &checked{b: b, clock: s.clock})
	}
	s.backends[0].also = func(ctx context.Context) { s.checkImages(ctx) }
	return s
}

// Add adds the findings of other services. It must be called before the other
// methods.
func (s *Service) Add(r ...Reporter) { s.reporters = append(s.reporters, r...) }

// Start begins the first checks, so that slow ones end before the first VM starts.
func (s *Service) Start(ctx context.Context) { go s.backendFindings(ctx) }

// Room returns an error while the disk is too full to start anything.
func (s *Service) Room() error { return s.cfg.Space.Start() }

// Status returns counts and the findings of the last checks. The caller sets the
// fields about the process.
func (s *Service) Status(ctx context.Context) (api.Status, error) {
	out := api.Status{Backend: s.cfg.Fleet.Default().Name(), Sandboxes: map[string]int{}, Jobs: map[string]int{}, Findings: []api.Finding{}}
	sandboxes, err := s.cfg.Store.CountSandboxes(ctx)
	if err != nil {
		return out, err
	}
	for state, n := range sandboxes {
		if state != agentlab.SandboxDestroyed {
			out.Sandboxes[string(state)] = n
		}
	}
	jobs, err := s.cfg.Store.CountJobs(ctx)
	if err != nil {
		return out, err
	}
	for status, n := range jobs {
		out.Jobs[string(status)] = n
	}
	for _, f := range slices.Concat(s.reported(), s.backendFindings(ctx), s.knownImageFindings()) {
		if f.Level != backend.LevelOK {
			out.Findings = append(out.Findings, toFinding(f))
		}
	}
	if h := s.cfg.Fleet.Default().Host; h != nil {
		limited, cancel := context.WithTimeout(ctx, memoryLimit)
		defer cancel()
		out.Accel = h.Accel(limited)
	}
	out.Memory, out.MemoryTotal = largest(s.memory(ctx))
	return out, nil
}

// Checks checks the host now, and returns all findings.
func (s *Service) Checks(ctx context.Context) (api.HostChecks, error) {
	def := s.cfg.Fleet.Default()
	out := api.HostChecks{Backend: def.Name(), Checks: []api.Finding{}}
	for _, b := range s.cfg.Fleet.All() {
		out.Bridge = out.Bridge || b.Info().Addresses != nil
	}
	local := append(s.reported(), s.checkImages(ctx)...)
	found := make([][]backend.Finding, len(s.backends))
	var wait sync.WaitGroup
	for i, c := range s.backends {
		wait.Go(func() { found[i] = c.now(ctx) })
	}
	wait.Wait()
	if err := ctx.Err(); err != nil {
		return out, err
	}
	for i, c := range s.backends {
		local = append(local, s.named(c, found[i])...)
	}
	for _, f := range local {
		out.Checks = append(out.Checks, toFinding(f))
	}
	return out, nil
}

// named returns the findings of a backend, and whether it answers; if there are several
// backends, with its name.
func (s *Service) named(c *checked, found []backend.Finding) []backend.Finding {
	found = c.withDown(found)
	if len(s.backends) == 1 {
		return found
	}
	for i := range found {
		found[i].Name = c.b.Name() + ": " + found[i].Name
	}
	return found
}

// backendFindings returns the newest findings of all backends.
func (s *Service) backendFindings(ctx context.Context) (all []backend.Finding) {
	found := make([][]backend.Finding, len(s.backends))
	var wait sync.WaitGroup
	for i, c := range s.backends {
		wait.Go(func() { found[i] = c.newest(ctx) })
	}
	wait.Wait()
	for i, c := range s.backends {
		all = append(all, s.named(c, found[i])...)
	}
	return all
}

// Usable returns why a backend starts no new sandbox: it is drained, or it cannot. If the last check
// found an error, it checks again, because the user may have fixed the error.
func (s *Service) Usable(name string) error {
	for _, c := range s.backends {
		if c.b.Name() == name {
			if err := c.b.Admits(); err != nil {
				return err
			}
			return c.usable()
		}
	}
	return s.cfg.Fleet.Of(name).Missing()
}

// reported returns the findings of the services.
func (s *Service) reported() (all []backend.Finding) {
	for _, r := range s.reporters {
		all = append(all, r.Findings()...)
	}
	return all
}

// checkImages reports and stores whether this machine has the default images
// or can build them.
func (s *Service) checkImages(ctx context.Context) []backend.Finding {
	if s.cfg.Images == nil {
		return nil
	}
	found := imageFindings(ctx, s.cfg.Images, s.cfg.ImageNames...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.images = found
	return found
}

func (s *Service) knownImageFindings() []backend.Finding {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.images
}

// toFinding converts a finding to the type of the API.
func toFinding(f backend.Finding) api.Finding {
	return api.Finding{Name: f.Name, Level: string(f.Level), Detail: f.Detail, Remedy: f.Remedy}
}

func firstError(found []backend.Finding) *backend.Finding {
	for i := range found {
		if found[i].Level == backend.LevelError {
			return &found[i]
		}
	}
	return nil
}
