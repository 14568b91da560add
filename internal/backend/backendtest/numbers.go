package backendtest

import (
	"errors"
	"slices"

	"github.com/agentlab-vm/agentlab/internal/backend"
)

// numbers is what NumberChecker promises: whatever is on the backend is told,
// ours and others', and only what was asked about.
func (s *suite) numbers() {
	c, ok := s.d.(backend.NumberChecker)
	if !ok {
		s.Skip("skipped: nobody else takes numbers on this backend (capability SharedNumbers)")
	}
	sp := s.create(1)
	others := s.h.Spec(2)
	if s.h.Foreign != nil {
		defer s.h.Foreign(s.T, others)(s.T)
	}
	s.eventually("the numbers are told", s.cfg.BootTimeout, func() error {
		taken, err := c.Taken(s.ctx(), sp.VMID, others.VMID)
		s.ok("Taken", err)
		if !slices.Contains(taken, sp.VMID) || s.h.Foreign != nil && !slices.Contains(taken, others.VMID) {
			return errors.New("not yet")
		}
		return nil
	})
	taken, err := c.Taken(s.ctx(), others.VMID+1, others.VMID+100)
	s.ok("Taken", err)
	if len(taken) != 0 {
		s.Errorf("numbers that nothing has, or that were not asked about: %v", taken)
	}
}
