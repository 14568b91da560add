package backendtest

import (
	"errors"
	"net"
	"reflect"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// EgressTarget is a documentation address, which no policy allows.
const EgressTarget = "192.0.2.7:443"

func allowlist() agentlab.Network {
	return agentlab.Network{
		Mode:  agentlab.NetworkAllowlist,
		Allow: []agentlab.NetworkRule{{Rule: "*.example.org:443"}, {Rule: "192.31.196.0/24", Source: "file:hosts"}},
		Deny:  []agentlab.NetworkRule{{Rule: "bad.example.org"}},
		Ports: []string{"443"}, Limits: agentlab.NetworkLimits{Flows: 10},
		Layers: []agentlab.Network{{Mode: agentlab.NetworkNAT}},
	}
}

func (s *suite) updater() backend.Net {
	s.Helper()
	u := s.groups().Net
	if u == nil {
		s.Skip("skipped: this driver has no Net")
	}
	return u
}

// networkStopped tests UpdateNetwork and EgressLog with a sandbox that does
// not run.
func (s *suite) networkStopped() {
	s.sub("UpdateNetwork", func(s *suite) {
		u := s.updater()
		sp := s.h.Spec(1)
		s.wantCode("UpdateNetwork of what is absent", u.UpdateNetwork(s.ctx(), sp.Ref(), allowlist()), agentlab.CodeNotFound)
		sp = s.create(1)
		wrong := s.wrong(sp.Ref())
		s.wantCode("UpdateNetwork with another mark", u.UpdateNetwork(s.ctx(), wrong, allowlist()), agentlab.CodeNotFound)
		for range 2 {
			s.ok("UpdateNetwork", u.UpdateNetwork(s.ctx(), sp.Ref(), allowlist()))
		}
		s.wantPower(sp.Ref(), backend.PowerStopped)
		bad := allowlist()
		bad.Allow[0].Rule = "not a rule"
		if err := u.UpdateNetwork(s.ctx(), sp.Ref(), bad); err == nil {
			s.Error("UpdateNetwork accepts an invalid rule")
		}
		sp.Network = allowlist()
		s.ok("Create with the updated network", s.d.Create(s.ctx(), sp))
		s.reopen()
		s.ok("Create with the updated network, reopened", s.d.Create(s.ctx(), sp))
		s.wantPower(sp.Ref(), backend.PowerStopped)
		in := s.listed(sp.Ref())
		if in == nil || in.Spec == nil || !reflect.DeepEqual(in.Spec.Network, sp.Network) {
			s.Errorf("List answers %+v, not the updated network", in)
		}
	})
	s.sub("EgressLog", func(s *suite) {
		l := s.updater()
		sp := s.h.Spec(3)
		_, err := l.EgressLog(s.ctx(), sp.Ref(), 0, 10)
		s.wantCode("EgressLog of what is absent", err, agentlab.CodeNotFound)
		sp = s.create(3)
		recs, err := l.EgressLog(s.ctx(), sp.Ref(), 0, 10)
		s.ok("EgressLog", err)
		if len(recs) != 0 {
			s.Errorf("a sandbox that never ran has records: %+v", recs)
		}
		_, err = l.EgressLog(s.ctx(), sp.Ref(), 0, 0)
		s.wantCode("EgressLog with limit 0", err, agentlab.CodeInvalid)
	})
}

// networkRunning changes the policy of a running guest and back.
func (s *suite) networkRunning(sp backend.Spec) {
	u := s.updater()
	s.ok("UpdateNetwork while it runs", u.UpdateNetwork(s.ctx(), sp.Ref(), allowlist()))
	s.wantPower(sp.Ref(), backend.PowerRunning)
	s.awaitControl(sp.Ref())
	changed := sp
	changed.Network = allowlist()
	s.ok("Create with the updated network while it runs", s.d.Create(s.ctx(), changed))
	s.ok("UpdateNetwork back", u.UpdateNetwork(s.ctx(), sp.Ref(), sp.Network))
	s.ok("Create with the old network", s.d.Create(s.ctx(), sp))
}

func (s *suite) egressLog(ref backend.Ref) {
	l := s.updater()
	s.tryEgress(ref)
	first := s.awaitRecord(ref, 0)
	host, port, _ := net.SplitHostPort(EgressTarget)
	switch {
	case first.Seq < 1, first.Count < 1, first.Time.IsZero(), first.Last.Before(first.Time),
		first.Allow, first.Rule == "", first.Proto != "tcp", first.Addr != host, strconv.Itoa(first.Port) != port:
		s.Errorf("a record of a refused flow to %s: %+v", EgressTarget, first)
	}
	s.tryEgress(ref)
	second := s.awaitRecord(ref, first.Seq)
	if second.Seq <= first.Seq {
		s.Errorf("record %d follows %d", second.Seq, first.Seq)
	}
	recs, err := l.EgressLog(s.ctx(), ref, 0, 1)
	s.ok("EgressLog with a limit", err)
	if len(recs) != 1 {
		s.Errorf("limit 1 gives %d records", len(recs))
	}
	recs, err = l.EgressLog(s.ctx(), ref, second.Seq+1<<40, 10)
	s.ok("EgressLog beyond its end", err)
	if len(recs) != 0 {
		s.Errorf("records after the last: %+v", recs)
	}
}

// egressLogLives tests the log over a stop and a start.
func (s *suite) egressLogLives(ref backend.Ref) {
	l := s.updater()
	if len(s.h.EgressCommand) == 0 {
		s.Skip("skipped: the harness names no command that causes a record")
	}
	before, err := l.EgressLog(s.ctx(), ref, 0, 10000)
	s.ok("EgressLog of before", err)
	if len(before) == 0 {
		s.Fatal("the log is empty")
	}
	s.reopen()
	after, err := s.updater().EgressLog(s.ctx(), ref, 0, len(before))
	s.ok("EgressLog after the driver was opened again", err)
	if len(after) != len(before) || after[0] != before[0] || after[len(after)-1] != before[len(before)-1] {
		s.Errorf("%d records became %d others", len(before), len(after))
	}
}

// tryEgress makes the guest try a connection that no policy allows.
func (s *suite) tryEgress(ref backend.Ref) {
	s.Helper()
	if len(s.h.EgressCommand) == 0 {
		s.Skip("skipped: the harness names no command that causes a record")
	}
	if out, code := s.exec(ref, s.h.EgressCommand...); code != 0 {
		s.Fatalf("%q: exit code %d, %s", s.h.EgressCommand, code, out)
	}
}

// awaitRecord waits for a record about EgressTarget after a number.
func (s *suite) awaitRecord(ref backend.Ref, after int64) agentlab.EgressRecord {
	s.Helper()
	host, _, _ := net.SplitHostPort(EgressTarget)
	var found agentlab.EgressRecord
	s.eventually("the record comes", func() error {
		recs, err := s.updater().EgressLog(s.ctx(), ref, after, 1000)
		s.ok("EgressLog", err)
		last := after
		for _, r := range recs {
			if r.Seq <= last {
				s.Fatalf("record %d comes after %d", r.Seq, last)
			}
			last = r.Seq
			if r.Addr == host {
				found = r
				return nil
			}
		}
		return errors.New("not yet")
	})
	return found
}
