package supervisor

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// supervised runs the VM in d and returns when it runs. ended gets what Run
// would have returned.
func supervised(t *testing.T, d Dir, vm *fakeVM) (s *supervisor, ended <-chan error) {
	t.Helper()
	return supervisedWith(t, d, vm, Start{})
}

// supervisedWith is supervised with settings.
func supervisedWith(t *testing.T, d Dir, vm *fakeVM, start Start) (s *supervisor, ended <-chan error) {
	t.Helper()
	start.Version, start.RunID = startVersion, "run"
	writeStart(t, d, start)
	s = newSupervisor(d.Path, vm.kinds)
	if err := s.lock(); err != nil {
		t.Fatal(err)
	}
	result, finished := make(chan error, 1), make(chan struct{})
	go func() {
		err := s.run(context.Background())
		result <- errors.Join(err, s.undo.run())
		close(finished)
	}()
	t.Cleanup(func() {
		vm.die()
		<-finished
	})
	if err := s.await(t.Context(), func(st runState) bool { return st.Phase == phaseRunning }); err != nil {
		t.Fatal(err)
	}
	return s, result
}

// A guest that powers its VM off stops it. One that reboots ends it, and can be started
// again.
func TestGuestEndsItsVM(t *testing.T) {
	for _, test := range []struct {
		end  End
		want backend.Instance
	}{
		{End{Reason: "x", PoweredOff: true}, backend.Instance{Power: backend.PowerStopped}},
		{End{Reason: "x", Rebooted: true}, backend.Instance{Power: backend.PowerCrashed, Reason: "x", GuestRebooted: true}},
		{End{Reason: "x"}, backend.Instance{Power: backend.PowerCrashed, Reason: "x"}},
	} {
		d, vm := testDir(t), newFakeVM()
		vm.last = test.end
		_, ended := supervised(t, d, vm)
		vm.die()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		var in backend.Instance
		if err := d.Power(&in); err != nil || in != test.want {
			t.Errorf("%+v: %+v, %v", test.end, in, err)
		}
	}
}

// A VM that ends by itself leaves its reason and its console; its supervisor
// is of the default backend where start.json names none.
func TestVMEndsByItself(t *testing.T) {
	d, vm := testDir(t), newFakeVM()
	console, guest := net.Pipe()
	vm.wires.Console = console
	vm.last = End{Reason: "QEMU was killed"}
	_, ended := supervised(t, d, vm)
	if _, err := io.WriteString(guest, "last words"); err != nil {
		t.Fatal(err)
	}
	vm.die()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	st, err := readState(d.Path)
	if err != nil || st.Phase != phaseCrashed || st.Reason != vm.last.Reason || st.RunID != "run" {
		t.Errorf("%+v, %v", st, err)
	}
	if b, err := io.ReadAll(d.Console(t.Context(), false)); err != nil || string(b) != "last words" || vm.console != "last words" {
		t.Errorf("the console holds %q, the VM saw %q, %v", b, vm.console, err)
	}
	if got, want := vm.made(), "launch ready"; got != want {
		t.Errorf("calls %q, want %q", got, want)
	}
}

// The audit records of a VM have the number of its sandbox.
func TestRecordsHaveTheVMID(t *testing.T) {
	d, vm := testDir(t), newFakeVM()
	s, _ := supervised(t, d, vm)
	s.egressLog.Write(agentlab.EgressRecord{Proto: "tcp", Count: 1})
	recs, err := d.Egress(t.Context(), 0, 10)
	if err != nil || len(recs) != 1 || recs[0].VMID != vm.VMID() {
		t.Errorf("%+v, %v", recs, err)
	}
}

func TestTwoSupervisors(t *testing.T) {
	d, vm := testDir(t), newFakeVM()
	supervised(t, d, vm)
	if err := Run(t.Context(), d.Path, vm.kinds, Options{}); agentlab.CodeOf(err) != agentlab.CodeBusy {
		t.Errorf("a second supervisor: %v, want code busy", err)
	}
	var in backend.Instance
	if err := d.Power(&in); err != nil || in.Power != backend.PowerRunning {
		t.Errorf("%+v, %v", in, err)
	}
}

// A start that fails leaves its error as the reason, and no VM.
func TestStartFails(t *testing.T) {
	for name, test := range map[string]struct {
		start Start
		fail  string
		want  string
		calls string
	}{
		"launch":          {Start{Version: startVersion}, "launch", "no launch", "launch"},
		"ready":           {Start{Version: startVersion}, "ready", "no ready", "launch ready kill"},
		"unknown backend": {Start{Version: startVersion, Backend: "moon"}, "", "moon", ""},
		"newer format":    {Start{Version: startVersion + 1}, "", "format 2", ""},
	} {
		t.Run(name, func(t *testing.T) {
			d, vm := testDir(t), newFakeVM()
			writeStart(t, d, test.start)
			vm.fail = map[string]error{test.fail: os.ErrInvalid}
			if test.fail != "" {
				vm.fail[test.fail] = agentlab.Errorf(agentlab.CodeInternal, "no %s", test.fail)
			}
			s := newSupervisor(d.Path, vm.kinds)
			if err := s.lock(); err != nil {
				t.Fatal(err)
			}
			if err := s.run(context.Background()); err == nil {
				t.Error("it starts")
			}
			if err := s.undo.run(); err != nil {
				t.Error(err)
			}
			var in backend.Instance
			if err := d.Power(&in); err != nil || in.Power != backend.PowerCrashed || !strings.Contains(in.Reason, test.want) {
				t.Errorf("%+v, %v", in, err)
			}
			if got := vm.made(); got != test.calls {
				t.Errorf("calls %q, want %q", got, test.calls)
			}
		})
	}
}
