package bootstrap

import (
	"maps"
	"slices"
)

// Deliveries returns the UIDs of the sandboxes that the service has a delivery
// for.
func (s *Service) Deliveries() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.deliveries))
}
