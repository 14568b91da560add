package backendtest

import (
	"fmt"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// groups returns the groups of the driver.
func (s *suite) groups() backend.Groups { return backend.GroupsOf(s.d) }

// can returns the capabilities of the driver.
func (s *suite) can() backend.Capabilities { return s.d.Info().Capabilities }

// checkOptional returns an error if a driver does not have exactly the groups, and the
// capabilities of their methods, with these names. Otherwise a wrapper that hides one would
// pass, because its tests are skipped.
func checkOptional(d backend.Driver, want []string) error {
	g, can := backend.GroupsOf(d), d.Info().Capabilities
	var got []string
	for name, has := range map[string]bool{
		"Power": g.Power != nil, "Net": g.Net != nil, "Console": g.Console != nil, "Snapshots": g.Snapshots != nil,
		"Templates": g.Templates != nil, "Volumes": g.Volumes != nil, "Host": g.Host != nil,
		"SuspendToDisk": can.SuspendToDisk, "Deadlines": can.Deadlines, "EgressRecords": can.EgressRecords, "SharedNumbers": can.SharedNumbers,
	} {
		if has {
			got = append(got, name)
		}
	}
	slices.Sort(got)
	if want = slices.Sorted(slices.Values(want)); !slices.Equal(got, want) {
		return fmt.Errorf("the driver has %q, and its harness lists %q", got, want)
	}
	return nil
}

// lacking tests the methods that the driver has only because others of their group
// are supported.
func (s *suite) lacking(ref backend.Ref) {
	g, can := s.groups(), s.can()
	if g.Power != nil && !can.SuspendToDisk {
		s.wantCode("SuspendToDisk", g.Power.SuspendToDisk(s.ctx(), ref), agentlab.CodeUnsupported)
	}
	if g.Power != nil && !can.Deadlines {
		s.wantCode("SetDeadline", g.Power.SetDeadline(s.ctx(), ref, backend.Deadline{Lease: time.Now(), Left: time.Hour}), agentlab.CodeUnsupported)
	}
	if g.Net != nil && !can.EgressRecords {
		s.wantCode("RecordEgress", g.Net.RecordEgress(s.ctx(), ref, agentlab.EgressRecord{}), agentlab.CodeUnsupported)
	}
	if g.Host != nil && !can.SharedNumbers {
		if got, err := g.Host.Taken(s.ctx(), 1, 1<<20); err != nil || len(got) != 0 {
			s.Errorf("Taken: %v, %v", got, err)
		}
	}
	if can.SuspendToDisk && g.Power == nil || can.Deadlines && g.Power == nil || can.EgressRecords && g.Net == nil || can.SharedNumbers && g.Host == nil {
		s.Errorf("the driver has capabilities of groups that it lacks: %+v", can)
	}
}
