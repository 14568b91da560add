package supervisor

import (
	"errors"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// A guest that is suspended while the host's disk is full continues when both
// have ended, in either order.
func TestSuspendWhilePaused(t *testing.T) {
	d, vm := testDir(t), newFakeVM()
	writeStart(t, d, Start{Version: startVersion, RunID: "run"})
	s := newSupervisor(d.Path, vm.kinds)
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ok(s.load())
	defer func() { ok(s.undo.run()) }()
	ok(s.setPhase(phaseRunning, ""))
	suspend := func(want bool) { t.Helper(); ok(s.suspend(t.Context(), want)) }
	s.control("full")
	suspend(true)
	suspend(true)
	s.control("") // space again
	if st := s.status(); !st.State.Suspended || st.Paused != "" {
		t.Errorf("%+v", st)
	}
	suspend(false)
	suspend(false)
	suspend(true)
	s.control("full")
	suspend(false)
	if st := s.status(); st.State.Suspended || st.Paused != "full" {
		t.Errorf("%+v", st)
	}
	if got := vm.made(); got != "pause pause pause continue continue pause pause" {
		t.Errorf("calls %q", got)
	}
}

// The CPUs of a guest continue only while it is to run: not while its VM starts,
// and not after it was saved and is about to end.
func TestSpaceWhileNotRunning(t *testing.T) {
	d, vm := testDir(t), newFakeVM()
	writeStart(t, d, Start{Version: startVersion, RunID: "run"})
	s := newSupervisor(d.Path, vm.kinds)
	if err := s.load(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.undo.run() }()
	for _, p := range []string{phaseStarting, phaseStopping, phaseStopped} {
		if err := s.setPhase(p, ""); err != nil {
			t.Fatal(err)
		}
		s.control("")
		if got := vm.made(); got != "" {
			t.Errorf("%s: calls %q", p, got)
		}
	}
}

// A guest whose CPUs cannot be stopped is not suspended.
func TestSuspendFails(t *testing.T) {
	d, vm := testDir(t), newFakeVM()
	vm.fail = map[string]error{"pause": errors.New("no")}
	supervised(t, d, vm)
	if err := d.Suspend(t.Context()); agentlab.CodeOf(err) != agentlab.CodeInternal {
		t.Fatal(err)
	}
	wantPower(t, d, backend.PowerRunning, "")
}

// A suspended guest is not asked to power off: it could not answer.
func TestStopSuspended(t *testing.T) {
	d, vm := testDir(t), newFakeVM()
	supervised(t, d, vm)
	if err := d.Suspend(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context(), nil, nil); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("Start: %v", err)
	}
	if _, err := d.DialControl(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("DialControl: %v", err)
	}
	if err := client(d.Path).stop(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	if got := vm.made(); got != "launch ready pause quit" {
		t.Errorf("calls %q", got)
	}
	if err := d.Resume(t.Context()); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("Resume: %v", err)
	}
}
