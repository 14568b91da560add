package backendtest

import (
	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// wrong returns a Ref with the handle of one sandbox and the mark of another.
func (s *suite) wrong(ref backend.Ref) backend.Ref {
	s.Helper()
	in, err := s.d.Inspect(s.ctx(), ref)
	s.ok("Inspect", err)
	return backend.Ref{UID: s.h.Spec(2).UID, Handle: in.Ref.Handle}
}

// handle tests that every method works without a handle, with the one of
// Inspect, and with an invalid one.
func (s *suite) handle() {
	for range 2 {
		sp := s.create(1)
		in := s.wantPower(sp.Ref(), backend.PowerStopped)
		if len(in.Ref.Handle) > backend.MaxHandle {
			s.Errorf("a handle of %d bytes", len(in.Ref.Handle))
		}
		if l := s.listed(sp.Ref()); l == nil || l.Ref != in.Ref || l.VMID != sp.VMID || in.VMID != sp.VMID {
			s.Errorf("List has %+v, Inspect %+v", l, in)
		}
		if s.h.Reopen != nil {
			s.reopen()
		}
		for _, handle := range []string{in.Ref.Handle, "nonsense", "1", ""} {
			s.stopped(backend.Ref{UID: sp.UID, Handle: handle})
		}
		s.ok("Destroy", s.d.Destroy(s.ctx(), backend.Ref{UID: sp.UID, Handle: "nonsense"}))
		s.wantAbsent(in.Ref)
	}
}

// stopped calls the methods that are allowed for a stopped sandbox.
func (s *suite) stopped(ref backend.Ref) {
	s.Helper()
	s.wantPower(ref, backend.PowerStopped)
	s.ok("Stop", s.d.Stop(s.ctx(), ref, 0))
	_, err := s.d.DialControl(s.ctx(), ref)
	s.wantCode("DialControl", err, agentlab.CodeUnavailable)
	_, err = s.d.DialGuest(s.ctx(), ref, 22)
	s.wantCode("DialGuest", err, agentlab.CodeUnavailable)
	s.listen(ref)
	s.suspendStopped(ref)
	s.lacking(ref)
	if u := s.groups().Net; u != nil {
		s.ok("UpdateNetwork", u.UpdateNetwork(s.ctx(), ref, s.h.Spec(1).Network))
	}
	if l := s.groups().Net; l != nil {
		_, err := l.EgressLog(s.ctx(), ref, 0, 1)
		s.ok("EgressLog", err)
	}
	if l := s.groups().Console; l != nil {
		rc, err := l.ConsoleLog(s.ctx(), ref, false)
		s.ok("ConsoleLog", err)
		s.ok("close", rc.Close())
	}
}
