package devproxy

import (
	"cmp"
	"slices"
)

// Port is one port of a guest, as 'agentlab port list' shows it.
type Port struct {
	VMID     int
	Sandbox  string
	Session  string // "" if it belongs to none
	Port     uint16 // in the guest
	HostPort uint16 // of this machine; 0 if it is not served
	URL      string // "" if it is not served
	Program  string
	Worktree string
	Problem  string // why HostPort is not Port, or why ports are missing
}

// Ports lists the ports on which processes of running guests listen, by sandbox and
// port. A vmid of 0 selects all sandboxes.
func (s *Service) Ports(vmid int) []Port {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := []Port{}
	for _, p := range s.byID {
		w := s.watchers[p.sandbox.UID]
		if !p.exists || w == nil || vmid != 0 && p.sandbox.VMID != vmid {
			continue
		}
		for _, l := range w.listeners {
			e := Port{VMID: w.vmid, Sandbox: p.sandbox.Name, Session: p.session, Port: l.Port, URL: s.urlOf(p, l), Program: l.Program, Worktree: l.Worktree, Problem: w.problem}
			if f := s.fronts[l.Port]; f != nil {
				e.HostPort, e.Problem = f.host, cmp.Or(f.problem, e.Problem)
			} else {
				e.Problem = "the limit of ports of this machine is reached"
			}
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b Port) int { return cmp.Or(cmp.Compare(a.VMID, b.VMID), cmp.Compare(a.Port, b.Port)) })
	return out
}
