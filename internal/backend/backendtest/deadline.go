package backendtest

import (
	"fmt"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// soon is a deadline that passes during a test.
const soon = time.Second

// deadline sets the deadline of a running sandbox, and ends the driver's
// process: the sandbox must still be powered off. It leaves the sandbox
// running.
func (s *suite) deadline(sp backend.Spec) {
	d := s.groups().Power
	if !s.can().Deadlines {
		s.Skip("skipped: this driver has no deadlines")
	}
	ref := sp.Ref()
	gone := backend.Ref{UID: agentlab.NewUID()}
	lease := time.Now()
	s.wantCode("SetDeadline of no sandbox", d.SetDeadline(s.ctx(), gone, backend.Deadline{Lease: lease, Left: time.Hour}), agentlab.CodeNotFound)
	s.wantCode("SetDeadline without time", d.SetDeadline(s.ctx(), ref, backend.Deadline{Lease: lease}), agentlab.CodeInvalid)

	// The same lease changes nothing.
	s.ok("SetDeadline", d.SetDeadline(s.ctx(), ref, backend.Deadline{Lease: lease, Left: time.Hour}))
	s.ok("SetDeadline of the same lease", d.SetDeadline(s.ctx(), ref, backend.Deadline{Lease: lease, Left: time.Nanosecond}))
	time.Sleep(soon) // enough to detect a moved deadline
	s.wantPower(ref, backend.PowerRunning)
	lease = lease.Add(-time.Minute)
	began := time.Now()
	s.ok("SetDeadline to an earlier one", d.SetDeadline(s.ctx(), ref, backend.Deadline{Lease: lease, Left: soon}))
	if s.h.Reopen != nil {
		s.reopen()
	}
	expired := func() error {
		in, err := s.d.Inspect(s.ctx(), ref)
		if err == nil && (in.Power != backend.PowerStopped || !in.Expired) {
			err = fmt.Errorf("it is %s (%s), expired: %v", in.Power, in.Reason, in.Expired)
		}
		return err
	}
	s.eventually("the sandbox is powered off at its deadline", expired)
	if d := time.Since(began); d < soon {
		s.Errorf("the sandbox was powered off after %s, its deadline was in %s", d, soon)
	}
	if in := s.listed(ref); in == nil || !in.Expired {
		s.Errorf("List has %+v", in)
	}
	s.ok("Stop", s.d.Stop(s.ctx(), ref, 0))
	if in := s.wantPower(ref, backend.PowerStopped); in.Expired {
		s.Error("it is still expired after a Stop")
	}

	// A deadline may be set while the sandbox is off; it holds for its start.
	d = s.groups().Power
	s.ok("SetDeadline while it is off", d.SetDeadline(s.ctx(), ref, backend.Deadline{Lease: lease.Add(time.Second), Left: soon}))
	s.ok("Start", s.d.Start(s.ctx(), ref))
	s.eventually("the sandbox is powered off after its start", expired)
	s.ok("SetDeadline that is replaced", d.SetDeadline(s.ctx(), ref, backend.Deadline{Lease: lease, Left: soon}))
	s.ok("SetDeadline to a later one", d.SetDeadline(s.ctx(), ref, backend.Deadline{Lease: lease.Add(time.Hour), Left: time.Hour}))
	s.ok("Start", s.d.Start(s.ctx(), ref))
	time.Sleep(2 * soon) // past the replaced deadline
	if in := s.wantPower(ref, backend.PowerRunning); in.Expired {
		s.Error("it is expired while it runs")
	}
}
