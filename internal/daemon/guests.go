package daemon

import (
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/guestplane/artifacts"
	"github.com/agentlab-vm/agentlab/internal/guestplane/bootstrap"
	"github.com/agentlab-vm/agentlab/internal/guestplane/lease"
	"github.com/agentlab-vm/agentlab/internal/guestplane/messages"
	"github.com/agentlab-vm/agentlab/internal/guestplane/report"
)

// guestServices returns the services for guests.
func (s *services) guestServices() []guestplane.Service {
	return append([]guestplane.Service{
		bootstrap.Service(s.bootstrap, s.jobs),
		report.Service(s.jobs),
		artifacts.Service(s.artifacts),
		messages.Service(s.messages),
		lease.Service(s.sandboxes),
	}, s.cache.Services()...)
}
