package regcache

import "github.com/agentlab-vm/agentlab/internal/hostspace"

// SetSpace replaces the guard of the disk.
func (s *Service) SetSpace(g *hostspace.Guard) { s.store.space = g }
