// Package doctor checks the host: the backend, the disk, the images, and what
// the other services report about themselves. The status shows its findings, and
// no sandbox is created while the backend cannot start one.
package doctor

import (
	"cmp"
	"context"
	"fmt"
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

// Store counts rows; *store.Store implements it.
type Store interface {
	CountSandboxes(ctx context.Context) (map[agentlab.SandboxState]int, error)
	CountJobs(ctx context.Context) (map[agentlab.JobStatus]int, error)
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

	recheck sync.Mutex // held while an error is checked again

	mu       sync.Mutex
	findings []backend.Finding // of the backend
	images   []backend.Finding
	checked  time.Time     // when findings were found; zero before
	checking chan struct{} // closed when the running check has ended; nil if none runs
}

// New returns a Service that has checked nothing yet.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, clock: cfg.Clock, reporters: []Reporter{cfg.Space}}
	if s.clock == nil {
		s.clock = time.Now
	}
	return s
}

// Add adds the findings of other services. It must be called before the other
// methods.
func (s *Service) Add(r ...Reporter) { s.reporters = append(s.reporters, r...) }

// Start begins the first check, so that slow ones end before the first VM
// starts.
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
		out.Accel = h.Accel(ctx)
	}
	out.Memory, out.MemoryTotal = largest(s.memory(ctx))
	return out, nil
}

// Checks checks the host now, and returns all findings.
func (s *Service) Checks(ctx context.Context) (api.HostChecks, error) {
	b := s.cfg.Fleet.Default()
	info := b.Info()
	limit := cmp.Or(info.CheckLimit, checkLimit)
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	out := api.HostChecks{Backend: b.Name(), Bridge: info.Addresses != nil, Checks: []api.Finding{}}
	local := append(s.reported(), s.checkImages(ctx)...)
	found := b.Check(ctx)
	switch {
	case caller.Err() != nil:
		return out, caller.Err()
	case ctx.Err() != nil: // what it has found until then may be the reason
		found = append(found, backend.Finding{
			Name: "time", Level: backend.LevelError, Remedy: "check again; see 'agentlab daemon logs'",
			Detail: fmt.Sprintf("the check of the backend did not end within %s: what is not listed here is unknown", limit),
		})
	default:
		s.setFindings(found)
	}
	for _, f := range append(local, found...) {
		out.Checks = append(out.Checks, toFinding(f))
	}
	return out, nil
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

// setFindings stores the findings of a check of the backend.
func (s *Service) setFindings(found []backend.Finding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.findings, s.checked = found, s.clock()
}

// backendFindings returns the newest findings, and starts a new check in the
// background if they are old. It waits only if there are none yet.
func (s *Service) backendFindings(ctx context.Context) []backend.Finding {
	s.mu.Lock()
	if s.checking == nil && s.clock().Sub(s.checked) > findingsAge {
		s.checking = make(chan struct{})
		go s.check(context.WithoutCancel(ctx), s.checking)
	}
	running, first := s.checking, s.checked.IsZero()
	s.mu.Unlock()
	if first && running != nil {
		select {
		case <-running:
		case <-ctx.Done():
		case <-time.After(firstFinding):
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.findings
}

// check runs one check. The daemon does not wait for it at its end, because it
// changes nothing.
func (s *Service) check(ctx context.Context, done chan struct{}) {
	b := s.cfg.Fleet.Default()
	ctx, cancel := context.WithTimeout(ctx, max(b.Info().CheckLimit, time.Minute))
	defer cancel()
	s.checkImages(ctx)
	s.setFindings(b.Check(ctx))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checking = nil
	close(done)
}

// Usable returns why the backend cannot start any sandbox. If the last check
// found an error, it checks again, because the user may have fixed the error.
func (s *Service) Usable() error {
	ctx := context.Background()
	asked := s.clock()
	if firstError(s.backendFindings(ctx)) == nil {
		return nil
	}
	s.recheck.Lock() // concurrent callers share one check
	defer s.recheck.Unlock()
	s.mu.Lock()
	found, fresh := s.findings, s.checked.After(asked)
	s.mu.Unlock()
	if fresh && firstError(found) == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, firstFinding)
	defer cancel()
	found = s.cfg.Fleet.Default().Check(ctx)
	s.setFindings(found)
	if f := firstError(found); f != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the backend cannot start sandboxes: %s: %s", f.Name, f.Detail).WithHint("%s", f.Remedy)
	}
	return nil
}

func firstError(found []backend.Finding) *backend.Finding {
	for i := range found {
		if found[i].Level == backend.LevelError {
			return &found[i]
		}
	}
	return nil
}
