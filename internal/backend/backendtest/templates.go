package backendtest

import (
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// templates warms a template of its own, starts a sandbox from it, and deletes
// it.
func (s *suite) templates() {
	tm := s.groups().Templates
	if tm == nil {
		s.Skip("skipped: this driver has no Templates")
	}
	sp := s.spec(1)
	sp.Resources.MemoryMB += 64 // templates of other tests stay
	before, err := tm.Templates(s.ctx())
	s.ok("Templates", err)
	made, err := tm.WarmTemplate(s.ctx(), sp)
	if agentlab.CodeOf(err) == agentlab.CodeUnsupported {
		s.Skip("skipped: this driver is configured to make no templates")
	}
	s.ok("WarmTemplate", err)
	again, err := tm.WarmTemplate(s.ctx(), sp)
	s.ok("WarmTemplate again", err)
	if made.Key == "" || again.Key != made.Key || !again.Made.Equal(made.Made) {
		s.Errorf("two calls made %+v and %+v", made, again)
	}
	list := s.templateKeys(tm)
	for _, old := range before {
		if !slices.Contains(list, old.Key) && !old.Stale {
			s.Errorf("template %s was replaced", old.Key)
		}
	}
	if !slices.Contains(list, made.Key) || list[0] != made.Key {
		s.Errorf("the templates are %q, want %s first", list, made.Key)
	}
	if made.Image != sp.Image || made.Resources.Cores != sp.Resources.Cores || made.Resources.MemoryMB != sp.Resources.MemoryMB ||
		made.Bytes <= 0 || made.Made.IsZero() || made.Used.Before(made.Made.Truncate(1e9)) || made.Stale {
		s.Errorf("the template of %+v is %+v", sp, made)
	}
	if s.h.Reopen != nil {
		s.reopen()
		tm = s.groups().Templates
		if list := s.templateKeys(tm); !slices.Contains(list, made.Key) {
			s.Errorf("after a restart the templates are %q", list)
		}
	}
	s.ok("Create", s.d.Create(s.ctx(), sp))
	for range 2 {
		s.ok("DeleteTemplate", tm.DeleteTemplate(s.ctx(), made.Key))
	}
	for _, key := range []string{"", ".", "..", "../x", "no such key"} {
		s.ok("DeleteTemplate of none", tm.DeleteTemplate(s.ctx(), key))
	}
	if list := s.templateKeys(tm); slices.Contains(list, made.Key) {
		s.Errorf("the deleted template is in %q", list)
	}
	if s.cfg.NoVM == "" {
		s.ok("Start", s.d.Start(s.ctx(), sp.Ref()))
		s.awaitControl(sp.Ref())
	}
	other := sp
	other.Image = "no-such-image@0"
	if _, err := tm.WarmTemplate(s.ctx(), other); err != nil {
		s.wantAllowed("WarmTemplate of an unknown image", err)
	}
}

func (s *suite) templateKeys(tm backend.Templates) []string {
	s.Helper()
	list, err := tm.Templates(s.ctx())
	s.ok("Templates", err)
	var keys []string
	for i, one := range list {
		keys = append(keys, one.Key)
		if i > 0 && one.Used.After(list[i-1].Used) && one.Stale == list[i-1].Stale {
			s.Errorf("%s was used after %s, and comes later", one.Key, list[i-1].Key)
		}
	}
	return keys
}

// memory checks the memory of a running sandbox.
func (s *suite) memory(ref backend.Ref) {
	mr := s.groups().Host
	if mr == nil {
		s.Skip("skipped: this driver has no Host")
	}
	m, err := mr.Memory(s.ctx(), ref)
	if agentlab.CodeOf(err) == agentlab.CodeUnsupported {
		s.Skip("skipped: this driver does not know it")
	}
	s.ok("Memory", err)
	if m.Unique <= 0 || m.Proportional < m.Unique || m.Shared < 0 || m.Proportional > m.Unique+m.Shared {
		s.Errorf("the memory of a running sandbox is %+v", m)
	}
	_, err = mr.Memory(s.ctx(), backend.Ref{UID: agentlab.NewUID()})
	s.wantCode("Memory of no sandbox", err, agentlab.CodeNotFound)
}

// room checks that there is no room for a sandbox that no host can have. A test
// host may have no room for a small one.
func (s *suite) room() {
	rc := s.groups().Host
	if rc == nil {
		s.Skip("skipped: this driver has no Host")
	}
	s.wantCode("Room for 4 EiB", rc.Room(s.ctx(), agentlab.Resources{Cores: 1, MemoryMB: 1 << 42}), agentlab.CodeNoSpace)
	if err := rc.Room(s.ctx(), agentlab.Resources{Cores: 1, MemoryMB: 1}); err != nil {
		s.wantCode("Room for 1 MiB", err, agentlab.CodeNoSpace)
	}
}

// memoryStopped checks that a stopped sandbox has no memory.
func (s *suite) memoryStopped(ref backend.Ref) {
	if mr := s.groups().Host; mr != nil {
		_, err := mr.Memory(s.ctx(), ref)
		if agentlab.CodeOf(err) == agentlab.CodeUnsupported {
			return
		}
		s.wantCode("Memory of a stopped sandbox", err, agentlab.CodeConflict)
	}
}
