package supervisor

import (
	"context"
	"errors"
	"math"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// inBubble runs a VM without the supervisor's socket in a synctest bubble, and
// calls script when the VM runs. It returns the calls that ended the VM, with
// their times since the start, and the state in the end.
func inBubble(t *testing.T, vm *fakeVM, script func(s *supervisor, end context.CancelFunc)) (calls string, st runState) {
	t.Helper()
	d := testDir(t)
	synctest.Test(t, func(t *testing.T) {
		vm.done = make(chan struct{})
		began := time.Now()
		writeStart(t, d, Start{Version: startVersion, RunID: "run"})
		s := newSupervisor(d.Path, vm.kinds)
		s.uptime = func() time.Duration { return time.Since(began) }
		ctx, end := context.WithCancel(t.Context())
		defer end()
		if err := errors.Join(s.lock(), s.load(), s.startVM(ctx)); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		go func() { ended <- s.supervise(ctx) }()
		synctest.Wait()
		script(s, end)
		if err := <-ended; err != nil {
			t.Log(err)
		}
		if err := s.undo.run(); err != nil {
			t.Error(err)
		}
		calls, st = vm.ending(began), s.state
		synctest.Wait()
	})
	return calls, st
}

// A stop asks the guest, then ends the VM in order, then kills it.
func TestStopEscalates(t *testing.T) {
	for name, test := range map[string]struct {
		deaf   []string
		fail   string
		script func(*supervisor)
		want   string
	}{
		"the guest obeys":  {nil, "", func(s *supervisor) { s.stop(30*time.Second, "") }, "button 0s"},
		"a deaf guest":     {[]string{"button"}, "", func(s *supervisor) { s.stop(30*time.Second, "") }, "button 0s, quit 30s"},
		"no button":        {nil, "button", func(s *supervisor) { s.stop(30*time.Second, "") }, "button 0s, quit 30s"},
		"a VM that hangs":  {[]string{"button", "quit"}, "", func(s *supervisor) { s.stop(30*time.Second, "") }, "button 0s, quit 30s, kill 32s"},
		"a broken VM":      {nil, "quit", func(s *supervisor) { s.stop(0, "") }, "quit 0s, kill 0s"},
		"at once":          {nil, "", func(s *supervisor) { s.stop(0, "") }, "quit 0s"},
		"sooner after all": {[]string{"button"}, "", func(s *supervisor) { s.stop(time.Minute, ""); time.Sleep(5 * time.Second); s.stop(time.Second, "") }, "button 0s, quit 6s"},
		"not later":        {[]string{"button"}, "", func(s *supervisor) { s.stop(5*time.Second, ""); s.stop(time.Minute, "") }, "button 0s, quit 5s"},
	} {
		t.Run(name, func(t *testing.T) {
			vm := newFakeVM()
			vm.deaf, vm.fail = test.deaf, map[string]error{test.fail: os.ErrInvalid}
			calls, st := inBubble(t, vm, func(s *supervisor, _ context.CancelFunc) { test.script(s) })
			if calls != test.want || st.Phase != phaseStopped || st.Reason != "" || st.Expired {
				t.Errorf("%s; %+v; want %s", calls, st, test.want)
			}
		})
	}
}

// A supervisor that gets SIGTERM gives the guest a few seconds.
func TestSupervisorIsTerminated(t *testing.T) {
	vm := newFakeVM()
	vm.deaf = []string{"button"}
	calls, st := inBubble(t, vm, func(_ *supervisor, end context.CancelFunc) { end() })
	if want := "button 0s, quit 8s"; calls != want || st.Phase != phaseCrashed || st.Reason != "the supervisor process was terminated" {
		t.Errorf("%s; %+v; want %s", calls, st, want)
	}
}

func TestDeadline(t *testing.T) {
	lease := time.Now()
	set := func(t *testing.T, s *supervisor, lease time.Time, left time.Duration) {
		t.Helper()
		if err := s.setDeadline(backend.Deadline{Lease: lease, Left: left}); err != nil {
			t.Error(err)
		}
	}
	for name, test := range map[string]struct {
		script func(*testing.T, *supervisor)
		want   string
	}{
		"it passes": {func(t *testing.T, s *supervisor) { set(t, s, lease, time.Minute) }, "quit 1m0s"},
		"the guest is asked": {func(t *testing.T, s *supervisor) {
			s.mu.Lock()
			s.answered = true
			s.mu.Unlock()
			set(t, s, lease, time.Minute)
		}, "button 1m0s, quit 1m30s"},
		"a later one replaces it": {func(t *testing.T, s *supervisor) {
			set(t, s, lease, time.Minute)
			time.Sleep(30 * time.Second)
			set(t, s, lease.Add(time.Hour), 2*time.Minute)
		}, "quit 2m30s"},
		"an earlier one replaces it": {func(t *testing.T, s *supervisor) {
			set(t, s, lease, time.Hour)
			time.Sleep(time.Second)
			set(t, s, lease.Add(-time.Hour), time.Second)
		}, "quit 2s"},
		"the same lease does not move it": {func(t *testing.T, s *supervisor) {
			set(t, s, lease, time.Minute)
			time.Sleep(30 * time.Second)
			set(t, s, lease, time.Hour)
		}, "quit 1m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			vm := newFakeVM()
			vm.deaf = []string{"button"}
			calls, st := inBubble(t, vm, func(s *supervisor, _ context.CancelFunc) { test.script(t, s) })
			if calls != test.want || st.Phase != phaseStopped || st.Reason != "" || !st.Expired {
				t.Errorf("%s; %+v; want %s", calls, st, test.want)
			}
		})
	}
}

// A VM whose directory was removed is killed.
func TestDirectoryIsRemoved(t *testing.T) {
	vm := newFakeVM()
	calls, _ := inBubble(t, vm, func(s *supervisor, _ context.CancelFunc) {
		if err := os.RemoveAll(s.dir); err != nil {
			t.Error(err)
		}
	})
	if want := "kill 5s"; calls != want {
		t.Errorf("%s, want %s", calls, want)
	}
}

// The guest is paused below the limit and continues above it. A pause that
// fails is not recorded.
func TestPauseForDiskSpace(t *testing.T) {
	vm := newFakeVM()
	calls, _ := inBubble(t, vm, func(s *supervisor, _ context.CancelFunc) {
		defer vm.die()
		look := func(limit uint64, want bool) {
			t.Helper()
			s.cfg.PauseBelow = limit
			s.checkSpace(&diskUsage{limit: limit})
			st, err := readState(s.dir)
			if err != nil || (st.Paused != "") != want || s.status().Paused != st.Paused || st.Phase != phaseRunning {
				t.Errorf("limit %d: %+v, %v, want paused %v", limit, st, err, want)
			}
		}
		const more = math.MaxUint64 / 4 // than any disk has
		look(0, false)
		vm.fail = map[string]error{"pause": os.ErrInvalid}
		look(more, false)
		vm.fail = nil
		look(more, true)
		look(more, true)
		look(0, false)
	})
	if want := "pause 0s, pause 0s, continue 0s"; calls != want {
		t.Errorf("%s, want %s", calls, want)
	}
}

// A policy that cannot be stored is not enforced, and the old one stays.
func TestPolicyThatCannotBeStored(t *testing.T) {
	vm := newFakeVM()
	calls, _ := inBubble(t, vm, func(s *supervisor, _ context.CancelFunc) {
		defer vm.die()
		for _, n := range []agentlab.Network{{Mode: "moon"}, {Mode: agentlab.NetworkOff}} {
			vm.fail = map[string]error{"store": os.ErrInvalid}
			if err := s.setNetwork(t.Context(), n); err == nil || vm.Network().Mode != agentlab.NetworkNAT {
				t.Errorf("%s: %v, %+v", n.Mode, err, vm.Network())
			}
		}
	})
	if want := "store 0s"; calls != want { // only of the policy that is valid
		t.Errorf("%s, want %s", calls, want)
	}
}
