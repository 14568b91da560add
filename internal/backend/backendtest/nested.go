package backendtest

import (
	"crypto/rand"
	"errors"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// nested tests Spec.Resources.Nested as far as no VM is needed.
func (s *suite) nested() {
	sp := s.spec(1)
	sp.Resources.Nested = "perhaps"
	s.wantCode("Validate of an unknown value", s.d.Validate(sp), agentlab.CodeInvalid)
	checker := s.groups().Host
	if checker == nil {
		s.Skip("skipped: this driver has no Host")
	}
	for range 2 {
		err := checker.Nested(s.ctx())
		if err == nil {
			continue
		}
		s.wantCode("Nested", err, agentlab.CodeUnsupported)
		if e, _ := errors.AsType[*agentlab.Error](err); e.Field != "resources.nested" || e.Hint == "" {
			s.Errorf("the error of Nested has field %q and hint %q", e.Field, e.Hint)
		}
		sp.Resources.Nested = agentlab.NestedOn
		s.ok("Create", s.d.Create(s.ctx(), sp))
		s.wantCode("Start of a sandbox that requires it", s.d.Start(s.ctx(), sp.Ref()), agentlab.CodeUnsupported)
		s.ok("Destroy", s.d.Destroy(s.ctx(), sp.Ref()))
	}
}

// newIdentity returns the identity of a sandbox.
func (s *suite) newIdentity(sp backend.Spec) guestapi.Identity {
	id := guestapi.Identity{UID: sp.UID, Hostname: sp.Name, Time: time.Now(), Entropy: make([]byte, 64), Network: s.d.Info().GuestNetwork}
	_, _ = rand.Read(id.Entropy) // never fails
	return id
}

// nestedGuest tests what a guest finds. The first sandbox is one without virtualization.
func (s *suite) nestedGuest(off backend.Spec) {
	checker := s.groups().Host
	if checker == nil {
		s.Skip("skipped: this driver has no Host")
	}
	state := func(sp backend.Spec) agentlab.NestedState {
		s.Helper()
		id := s.newIdentity(sp)
		id.Nested = string(agentlab.NestedAuto)
		h, err := s.client(sp.Ref()).SetIdentity(s.ctx(), id)
		s.ok("SetIdentity", err)
		return agentlab.NestedState(h.Nested)
	}
	if s.h.NoCPU {
		s.Skip("skipped: the guests of this harness have the processor of the tests")
	}
	if got := state(off); got != agentlab.NestedNoCPU {
		s.Errorf("the CPUs of a sandbox without nested have it: %q", got)
	}
	if checker.Nested(s.ctx()) != nil {
		return
	}
	on := s.spec(2)
	on.Resources.Nested = agentlab.NestedAuto
	s.ok("Create", s.d.Create(s.ctx(), on))
	s.ok("Start", s.d.Start(s.ctx(), on.Ref()))
	s.awaitControl(on.Ref())
	if got := state(on); got != agentlab.NestedWorks {
		s.Errorf("virtualization does not work where the host provides it: %q", got)
	}
	s.ok("Destroy", s.d.Destroy(s.ctx(), on.Ref()))
}
