package backendtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// The tests of this file need no running VM.

func (s *suite) info() {
	a, b := s.d.Info(), s.d.Info()
	if a.Name == "" || a.Version == "" {
		s.Errorf("name %q, version %q: neither may be empty", a.Name, a.Version)
	}
	if a.Name != b.Name || a.Version != b.Version || a.Capabilities != b.Capabilities || a.ControllerURL != b.ControllerURL {
		s.Error("Info is not constant")
	}
	seen := map[string]bool{}
	for _, o := range a.Options {
		if seen[o.Path] || o.Path == "" || (o.Name == "") == (o.Image == nil) || seen["name "+o.Name] {
			s.Errorf("option %q (name %q) is not one of its own", o.Path, o.Name)
		}
		seen[o.Path], seen["name "+o.Name] = true, o.Name != ""
		switch o.Zero {
		case "", false, 0:
		default:
			s.Errorf("the zero value of option %s is %v", o.Path, o.Zero)
		}
	}
	for what, raw := range map[string]string{"ControllerURL": a.ControllerURL, "UploadURL": a.UploadURL} {
		if u, err := url.Parse(raw); err != nil || u.Scheme != "http" || u.Port() == "" {
			s.Errorf("%s %q is not a URL with a port", what, raw)
		}
	}
	if ok := s.groups().Console != nil; ok != (a.ConsoleHint == "") {
		s.Errorf("Console is implemented: %v, the hint about the console is %q", ok, a.ConsoleHint)
	}
	if p := a.Addresses; p != nil && (!p.IPv4.IsValid() || len(p.Reserved) == 0) {
		s.Errorf("addresses are leased from %v, of which the host has none: %v", p.IPv4, p.Reserved)
	}
}

func (s *suite) check() {
	seen := map[string]bool{}
	for _, f := range s.d.Check(s.ctx()) {
		switch {
		case f.Name == "" || seen[f.Name]:
			s.Errorf("finding %q has no name of its own", f.Name)
		case f.Level != backend.LevelOK && f.Level != backend.LevelWarn && f.Level != backend.LevelError:
			s.Errorf("finding %s: unknown level %q", f.Name, f.Level)
		case f.Detail == "":
			s.Errorf("finding %s does not say what was seen", f.Name)
		case (f.Level == backend.LevelOK) != (f.Remedy == ""):
			s.Errorf("finding %s is %s with remedy %q", f.Name, f.Level, f.Remedy)
		}
		seen[f.Name] = true
	}
	all, err := s.d.List(s.ctx())
	s.ok("List", err)
	if len(all) != 0 {
		s.Errorf("Check changed something: %v", all)
	}
}

func (s *suite) unsupported() {
	s.ok("Validate of a good spec", s.d.Validate(s.h.Spec(0)))
	if len(s.h.Unsupported) == 0 {
		s.Skip("skipped: the harness names nothing that this driver refuses")
	}
	for field, spoil := range s.h.Unsupported {
		s.sub(field, func(s *suite) {
			sp := s.spec(1)
			spoil(&sp)
			for what, err := range map[string]error{"Validate": s.d.Validate(sp), "Create": s.d.Create(s.ctx(), sp)} {
				s.wantCode(what, err, agentlab.CodeUnsupported)
				if e, _ := errors.AsType[*agentlab.Error](err); e.Field != field {
					s.Errorf("%s names field %q, want %q", what, e.Field, field)
				}
			}
			s.wantAbsent(sp.Ref())
		})
	}
	if !s.can().NetworkOff {
		sp := s.h.Spec(1)
		sp.Network.Mode = agentlab.NetworkOff
		s.wantCode("Validate of network off without the capability", s.d.Validate(sp), agentlab.CodeUnsupported)
	}
	s.options()
	opened := s.h.Spec(1)
	opened.Network.Private = []agentlab.PrivateTarget{{Host: "gateway.corp", Port: 443, Reason: "conformance"}}
	if err := s.d.Validate(opened); s.can().Private {
		s.ok("Validate of a private destination", err)
	} else {
		s.wantCode("Validate of a private destination without the capability", err, agentlab.CodeUnsupported)
	}
	sp := s.h.Spec(1)
	sp.Network = allowlist()
	if err := s.d.Validate(sp); s.can().Allowlist {
		s.ok("Validate of an allowlist", err)
	} else {
		s.wantCode("Validate of an allowlist without the capability", err, agentlab.CodeUnsupported)
	}
}

// options tests that options are accepted, or rejected with their key as the
// field.
func (s *suite) options() {
	validate := func(name string, value any) error {
		text, err := json.Marshal(map[string]any{name: value})
		s.ok("Marshal", err)
		sp := s.h.Spec(1)
		sp.Options = agentlab.Options(text)
		return s.d.Validate(sp)
	}
	refused := func(what string, err error, code agentlab.Code, field string) {
		s.wantCode(what, err, code)
		if e, _ := errors.AsType[*agentlab.Error](err); e.Field != field {
			s.Errorf("%s names field %q, want %q", what, e.Field, field)
		}
	}
	refused("Validate with an unknown option", validate("no_such_option", true), agentlab.CodeUnsupported, "no_such_option")
	for _, o := range s.d.Info().Options {
		if o.Image != nil {
			continue
		}
		good, accepted := s.h.Options[o.Path]
		if accepted {
			s.ok("Validate with "+o.Path, validate(o.Name, good))
		} else if s.h.Unsupported[o.Path] == nil {
			s.Errorf("the harness has no value of %s", o.Path)
		}
		refused("Validate with a list as "+o.Path, validate(o.Name, []int{1}), agentlab.CodeInvalid, o.Path)
	}
}

func (s *suite) createTwice() {
	sp := s.create(1)
	in := s.wantPower(sp.Ref(), backend.PowerStopped)
	if in.Name != sp.Name {
		s.Errorf("name %q, want %q", in.Name, sp.Name)
	}
	s.ok("Create again", s.d.Create(s.ctx(), sp))
	s.wantPower(sp.Ref(), backend.PowerStopped)
	renamed := sp // as the warm pool hands a sandbox out
	renamed.Name += "-renamed"
	s.ok("Create with another name", s.d.Create(s.ctx(), renamed))
	if in := s.wantPower(sp.Ref(), backend.PowerStopped); in.Name != sp.Name && in.Name != renamed.Name {
		s.Errorf("name %q, want %q or %q", in.Name, sp.Name, renamed.Name)
	}
	if s.listed(sp.Ref()) == nil {
		s.Error("List does not have it")
	}
	s.suspendStopped(sp.Ref())
	s.memoryStopped(sp.Ref())
	s.ok("Stop of a stopped one", s.d.Stop(s.ctx(), sp.Ref(), 0))
	s.wantPower(sp.Ref(), backend.PowerStopped)
	_, err := s.d.DialControl(s.ctx(), sp.Ref())
	s.wantCode("DialControl of a stopped one", err, agentlab.CodeUnavailable)
}

// numberTaken tests that a number can be reused without effect on other
// sandboxes.
func (s *suite) numberTaken() {
	sp, other := s.create(1), s.spec(2)
	other.VMID = sp.VMID
	if err := s.d.Create(s.ctx(), other); err == nil {
		s.wantPower(other.Ref(), backend.PowerStopped)
	} else {
		s.wantCode("Create with another mark", err, agentlab.CodeExists)
		_, err = s.d.Inspect(s.ctx(), other.Ref())
		s.wantCode("Inspect of the one that was refused", err, agentlab.CodeNotFound)
	}
	if in := s.wantPower(sp.Ref(), backend.PowerStopped); in.Name != sp.Name {
		s.Errorf("the first one is %+v", in)
	}
	s.ok("Destroy of the second", s.d.Destroy(s.ctx(), other.Ref()))
	s.wantAbsent(other.Ref())
	s.wantPower(sp.Ref(), backend.PowerStopped)
	if s.listed(sp.Ref()) == nil {
		s.Error("List does not have the first one")
	}
}

func (s *suite) absent() {
	ref := s.h.Spec(1).Ref()
	_, err := s.d.Inspect(s.ctx(), ref)
	s.wantCode("Inspect", err, agentlab.CodeNotFound)
	s.ok("Destroy", s.d.Destroy(s.ctx(), ref))
	s.wantCode("Start", s.d.Start(s.ctx(), ref), agentlab.CodeNotFound)
	s.wantCode("Stop", s.d.Stop(s.ctx(), ref, time.Second), agentlab.CodeNotFound)
	_, err = s.d.DialControl(s.ctx(), ref)
	s.wantCode("DialControl", err, agentlab.CodeNotFound)
	_, err = s.d.DialGuest(s.ctx(), ref, 22)
	s.wantCode("DialGuest", err, agentlab.CodeNotFound)
	_, err = s.d.ListenGuest(s.ctx(), ref)
	s.wantCode("ListenGuest", err, agentlab.CodeNotFound)
	if cl := s.groups().Console; cl != nil {
		_, err = cl.ConsoleLog(s.ctx(), ref, false)
		s.wantCode("ConsoleLog", err, agentlab.CodeNotFound)
	}
	all, err := s.d.List(s.ctx())
	s.ok("List", err)
	if len(all) != 0 {
		s.Errorf("List of an empty place: %v", all)
	}
}

// wrongMark uses an existing handle with another mark.
func (s *suite) wrongMark() {
	sp := s.create(1)
	wrong := s.wrong(sp.Ref())
	_, err := s.d.Inspect(s.ctx(), wrong)
	s.wantCode("Inspect", err, agentlab.CodeNotFound)
	s.wantCode("Start", s.d.Start(s.ctx(), wrong), agentlab.CodeNotFound)
	s.wantCode("Stop", s.d.Stop(s.ctx(), wrong, 0), agentlab.CodeNotFound)
	_, err = s.d.ListenGuest(s.ctx(), wrong)
	s.wantCode("ListenGuest", err, agentlab.CodeNotFound)
	s.ok("Destroy of what does not exist", s.d.Destroy(s.ctx(), wrong))
	s.wantPower(sp.Ref(), backend.PowerStopped)
}

func (s *suite) destroyStopped() {
	sp := s.create(1)
	s.ok("Destroy", s.d.Destroy(s.ctx(), sp.Ref()))
	s.wantAbsent(sp.Ref())
	s.ok("Destroy again", s.d.Destroy(s.ctx(), sp.Ref()))
	next := s.spec(2)
	next.VMID = sp.VMID
	s.ok("Create with the number that came free", s.d.Create(s.ctx(), next))
	s.wantPower(next.Ref(), backend.PowerStopped)
	s.ok("Destroy the new one", s.d.Destroy(s.ctx(), next.Ref()))
}

func (s *suite) foreign() {
	if s.h.Foreign == nil {
		s.Skip("skipped: this harness cannot make a foreign object")
	}
	sp := s.spec(1)
	untouched := s.h.Foreign(s.T, sp)
	if !s.h.ForeignHidden {
		s.numberKnown(sp.VMID)
	}
	s.ok("Destroy of what was never made", s.d.Destroy(s.ctx(), sp.Ref()))
	untouched(s.T)
	if err := s.d.Create(s.ctx(), sp); err == nil { // in another place
		s.wantPower(sp.Ref(), backend.PowerStopped)
	} else {
		s.wantCode("Create in the way of a foreign object", err, agentlab.CodeExists)
	}
	untouched(s.T)
	s.ok("Destroy", s.d.Destroy(s.ctx(), sp.Ref()))
	untouched(s.T)
	if in := s.listed(sp.Ref()); in != nil {
		s.Errorf("List has the foreign object as ours: %+v", *in)
	}
	other := s.create(2)
	s.numberKnown(other.VMID)
	s.ok("Destroy beside it", s.d.Destroy(s.ctx(), other.Ref()))
	untouched(s.T)
}

// numberKnown waits until Taken returns a number in use. That may take some
// time, because a driver may cache the numbers of its backend.
func (s *suite) numberKnown(n int) {
	s.Helper()
	if !s.can().SharedNumbers {
		return
	}
	c := s.groups().Host
	ctx := s.ctx()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		got, err := c.Taken(ctx, n-1, n+1)
		s.ok("Taken", err)
		if slices.ContainsFunc(got, func(x int) bool { return x < n-1 || x > n+1 }) {
			s.Fatalf("Taken of %d to %d: %v", n-1, n+1, got)
		}
		if slices.Contains(got, n) {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			s.Fatalf("Taken does not return %d: %v", n, got)
		}
	}
	got, err := c.Taken(ctx, n+1, n+1)
	s.ok("Taken", err)
	if slices.Contains(got, n) {
		s.Errorf("Taken of %d returns %d", n+1, n)
	}
}

func (s *suite) parallel() {
	n := s.cfg.Parallel
	specs := make([]backend.Spec, n)
	errs := make([]error, n)
	for i := range n {
		specs[i] = s.spec(i)
	}
	ctx := s.ctx()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = s.d.Create(ctx, specs[i]) })
	}
	wg.Wait()
	s.ok("Create", errors.Join(errs...))
	all, err := s.d.List(s.ctx())
	s.ok("List", err)
	if len(all) != n {
		s.Fatalf("%d creates gave %d sandboxes", n, len(all))
	}
	for _, in := range all {
		i := slices.IndexFunc(specs, func(sp backend.Spec) bool { return sp.UID == in.Ref.UID })
		if sp := in.Spec; sp != nil && (i < 0 || sp.UID != in.Ref.UID || sp.Name != specs[i].Name || sp.Image != specs[i].Image || sp.Resources != specs[i].Resources) {
			s.Errorf("List answers %+v with Spec %+v", in, *sp)
		}
	}
	for i := range n {
		wg.Go(func() { errs[i] = s.d.Destroy(ctx, specs[i].Ref()) })
	}
	wg.Wait()
	s.ok("Destroy", errors.Join(errs...))
	for _, sp := range specs {
		s.wantAbsent(sp.Ref())
	}
}

func (s *suite) reopenStopped() {
	sp := s.create(1)
	s.reopen()
	s.wantPower(sp.Ref(), backend.PowerStopped)
	if s.listed(sp.Ref()) == nil {
		s.Error("List does not find it again")
	}
	s.ok("Create again", s.d.Create(s.ctx(), sp))
	s.ok("Destroy", s.d.Destroy(s.ctx(), sp.Ref()))
	s.wantAbsent(sp.Ref())
}

// cancelled calls every method with a context that has ended.
func (s *suite) cancelled() {
	sp := s.create(1)
	ref := sp.Ref()
	ended, cancel := context.WithCancel(s.Context())
	cancel()
	fresh := s.spec(2)
	for what, call := range map[string]func() error{
		"Create":      func() error { return s.d.Create(ended, fresh) },
		"Start":       func() error { return s.d.Start(ended, ref) },
		"Stop":        func() error { return s.d.Stop(ended, ref, time.Hour) },
		"Inspect":     func() error { _, err := s.d.Inspect(ended, ref); return err },
		"List":        func() error { _, err := s.d.List(ended); return err },
		"DialControl": func() error { _, err := s.d.DialControl(ended, ref); return err },
		"DialGuest":   func() error { _, err := s.d.DialGuest(ended, ref, 22); return err },
	} {
		began := time.Now()
		err := call()
		if d := time.Since(began); d > s.cfg.Patience {
			s.Errorf("%s returned %s after its context ended", what, d)
		}
		s.wantAllowed(what, err)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound {
			s.Errorf("%s: cancelled is read as absent: %v", what, err)
		}
	}
	s.ok("Stop after all", s.d.Stop(s.ctx(), ref, 0))
	s.wantPower(ref, backend.PowerStopped)
}

// cancelledAnywhere ends the contexts of Create and Destroy after increasing
// times, so that they are interrupted at many points.
func (s *suite) cancelledAnywhere() {
	sp := s.spec(1)
	for _, after := range []time.Duration{0, 100 * time.Microsecond, time.Millisecond, 3 * time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond} {
		s.cutShort("Create", after, func(ctx context.Context) error { return s.d.Create(ctx, sp) })
		s.wantKnown(sp.Ref())
		s.ok("Create to the end", s.d.Create(s.ctx(), sp))
		s.wantPower(sp.Ref(), backend.PowerStopped)
		s.cutShort("Destroy", after, func(ctx context.Context) error { return s.d.Destroy(ctx, sp.Ref()) })
		s.wantKnown(sp.Ref())
		s.ok("Destroy to the end", s.d.Destroy(s.ctx(), sp.Ref()))
		s.wantAbsent(sp.Ref())
	}
	s.cutShort("Create", 5*time.Millisecond, func(ctx context.Context) error { return s.d.Create(ctx, sp) })
	s.ok("Destroy of what may be half made", s.d.Destroy(s.ctx(), sp.Ref()))
	s.wantAbsent(sp.Ref())
}

func (s *suite) cutShort(what string, after time.Duration, call func(context.Context) error) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), after)
	defer cancel()
	began := time.Now()
	err := call(ctx)
	if d := time.Since(began); d > after+s.cfg.Patience {
		s.Errorf("%s returned %s after its context ended", what, d-after)
	}
	s.wantAllowed(what, err)
}

// wantKnown checks that Inspect and List agree about a sandbox that may exist.
func (s *suite) wantKnown(ref backend.Ref) {
	s.Helper()
	in, err := s.d.Inspect(s.ctx(), ref)
	l := s.listed(ref)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		if l != nil {
			s.Fatalf("Inspect finds nothing, List has %+v", *l)
		}
	case err != nil:
		s.Fatalf("Inspect: %v", err)
	case l == nil:
		s.Fatalf("Inspect has %+v, List nothing", in)
	case in.Power == backend.PowerPartial && in.Reason == "":
		s.Fatal("a half-made sandbox without a reason")
	}
}

func (s *suite) crashPoints() {
	if len(s.h.CrashPoints) == 0 {
		s.Skip("skipped: this harness has no crash points")
	}
	for i, p := range s.h.CrashPoints {
		switch p.Method {
		case MethodCreate, MethodStart, MethodStop, MethodDestroy:
		default:
			continue // crashSnapshot, crashVolume
		}
		for _, then := range []string{"finish", "destroy"} {
			s.sub(fmt.Sprintf("%s/%s/%s", p.Method, p.Name, then), func(s *suite) { s.crash(10+i, p, then == "destroy") })
		}
	}
}

// crash simulates a crash in a method, opens the driver again, and finishes or
// destroys the sandbox.
func (s *suite) crash(n int, p CrashPoint, destroy bool) {
	sp := s.spec(n)
	ref := sp.Ref()
	calls := map[Method]func() error{
		MethodCreate:  func() error { return s.d.Create(s.ctx(), sp) },
		MethodStart:   func() error { return s.d.Start(s.ctx(), ref) },
		MethodStop:    func() error { return s.d.Stop(s.ctx(), ref, time.Second) },
		MethodDestroy: func() error { return s.d.Destroy(s.ctx(), ref) },
	}
	if p.Method != MethodCreate {
		s.ok("Create", s.d.Create(s.ctx(), sp))
	}
	if p.Method == MethodStop || p.Method == MethodDestroy {
		s.ok("Start", s.d.Start(s.ctx(), ref))
	}
	p.Arm(s.T)
	if err := calls[p.Method](); err == nil {
		s.Fatal("the crash point was not reached")
	}
	s.reopen()
	s.wantKnown(ref)
	if destroy {
		s.ok("Destroy", s.d.Destroy(s.ctx(), ref))
		s.wantAbsent(ref)
		return
	}
	s.ok(string(p.Method)+" again", calls[p.Method]())
	switch p.Method {
	case MethodCreate, MethodStop:
		s.wantPower(ref, backend.PowerStopped)
	case MethodStart:
		s.wantPower(ref, backend.PowerRunning)
	case MethodDestroy:
		s.wantAbsent(ref)
	}
}
