package supervisor

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// TestPower writes what a supervisor that is gone would have written.
func TestPower(t *testing.T) {
	d := testDir(t)
	for _, test := range []struct {
		st     runState
		power  backend.PowerState
		reason string
	}{
		{runState{Phase: phaseStopped}, backend.PowerStopped, ""},
		{runState{Phase: phaseCrashed, Reason: "x"}, backend.PowerCrashed, "x"},
		{runState{Phase: phaseRunning, Boot: BootID()}, backend.PowerCrashed, "its supervisor process was killed, and the VM with it"},
		{runState{Phase: phaseStarting, Boot: BootID()}, backend.PowerCrashed, "its supervisor process was killed, and the VM with it"},
		{runState{Phase: phaseRunning, Boot: "before"}, backend.PowerCrashed, "the host was restarted"},
		{runState{Phase: phaseStopping, Boot: BootID()}, backend.PowerStopped, ""},
		{runState{Phase: phaseStopping, Boot: BootID(), Reason: "told"}, backend.PowerCrashed, "its supervisor process was killed, and the VM with it"},
	} {
		if err := durable.ReplaceJSON(d.file(fileState), test.st, durable.None); err != nil {
			t.Fatal(err)
		}
		var in backend.Instance
		if err := d.Power(&in); err != nil || in.Power != test.power || in.Reason != test.reason {
			t.Errorf("%+v: %+v, %v", test.st, in, err)
		}
	}
	if err := os.WriteFile(d.file(fileState), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var in backend.Instance
	if err := d.Power(&in); err != nil || in.Power != backend.PowerCrashed || in.Reason != hostRestarted || !in.HostRestarted {
		t.Errorf("a state that was lost in a power cut: %+v, %v", in, err)
	}
	if err := os.WriteFile(d.file(fileState), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Power(&in); agentlab.CodeOf(err) != agentlab.CodeInternal {
		t.Errorf("a damaged state: %v", err)
	}
}

// Without a supervisor the caller stores a policy; with one that does not
// answer nothing is stored.
func TestPolicyStorage(t *testing.T) {
	t.Parallel()
	d := testDir(t)
	stored := 0
	store := func() error { stored++; return nil }
	if err := d.SetNetwork(t.Context(), agentlab.Network{Mode: agentlab.NetworkOff}, store); err != nil || stored != 1 {
		t.Errorf("stopped: %v, stored %d times", err, stored)
	}
	lock, err := d.takeLock()
	if err != nil || lock == nil {
		t.Fatalf("%v, %v", lock, err)
	}
	defer func() { _ = lock.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := d.SetNetwork(ctx, agentlab.Network{Mode: agentlab.NetworkOff}, store); agentlab.CodeOf(err) != agentlab.CodeUnavailable || stored != 1 {
		t.Errorf("without an answer: %v, stored %d times", err, stored)
	}
}

// A change that is held up until its client has gone is not made: it would
// undo what was asked for since.
func TestLateNetworkChangeIsRejected(t *testing.T) {
	t.Parallel()
	vm := newFakeVM()
	s := newSupervisor(t.TempDir(), vm.kinds)
	s.vm = vm
	gone, leave := context.WithCancel(t.Context())
	leave()
	s.netMu.Lock() // an earlier change waits for the disk
	late := make(chan error)
	go func() { late <- s.setNetwork(gone, agentlab.Network{Mode: agentlab.NetworkNAT}) }()
	s.netMu.Unlock()
	if err := <-late; agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("the late change: %v", err)
	}
	if err := s.setNetwork(t.Context(), agentlab.Network{Mode: agentlab.NetworkOff}); err != nil || vm.Network().Mode != agentlab.NetworkOff {
		t.Errorf("%+v, %v", vm.Network(), err)
	}
}
