package guesttest

import (
	"context"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/guestplane/artifacts"
	"github.com/agentlab-vm/agentlab/internal/guestplane/bootstrap"
	"github.com/agentlab-vm/agentlab/internal/guestplane/lease"
	"github.com/agentlab-vm/agentlab/internal/guestplane/messages"
	"github.com/agentlab-vm/agentlab/internal/guestplane/report"
)

// Plane returns the guest plane of the controller, with all its services.
func (c *Controller) Plane(cfg guestplane.Config) *guestplane.Plane {
	cfg.Store, cfg.Redactors = grants{c}, c
	return guestplane.New(cfg, c.Services()...)
}

// Services returns the services of Plane.
func (c *Controller) Services() []guestplane.Service {
	return []guestplane.Service{bootstrap.Service(c, c), report.Service(c), artifacts.Service(c.Service), messages.Service(c), lease.Service(c)}
}

// PlaneOf returns a guest plane of the controller with other services.
func (c *Controller) PlaneOf(services ...guestplane.Service) *guestplane.Plane {
	return guestplane.New(guestplane.Config{Store: grants{c}, Redactors: c}, services...)
}

// Unlimited is Plane without limits of rates, for tests that make many calls.
func (c *Controller) Unlimited() *guestplane.Plane {
	p := guestplane.New(guestplane.Config{Store: grants{c}, Redactors: c, Limits: guestplane.PlaneLimits{Rate: 1e9}})
	for _, s := range c.Services() {
		p.Add(Unlimited(s))
	}
	return p
}

// Unlimited returns a service without the limits of its routes.
func Unlimited(s guestplane.Service) guestplane.Service {
	s.Routes = slices.Clone(s.Routes)
	for i := range s.Routes {
		s.Routes[i].Limits = guestplane.Limits{}
	}
	return s
}

// grants is the store of the plane.
type grants struct{ *Controller }

// Job implements guestplane.Store.
func (g grants) Job(_ context.Context, id string) (agentlab.Job, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return agentlab.Job{ID: id, Status: agentlab.JobCompleted}, nil
	}
	return agentlab.Job{ID: id, Status: agentlab.JobRunning}, nil
}
