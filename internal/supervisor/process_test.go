package supervisor

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// The test binary is also the supervisor of a fakeVM.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "vmm" {
		if err := Run(context.Background(), os.Args[2], newFakeVM().kinds, Options{}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(guard.Run(m))
}

// started starts a supervisor in a process of its own.
func started(t *testing.T, d Dir) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var cfg struct{ Start }
	cfg.Backend = "fake"
	t.Cleanup(func() {
		if err := d.Halt(context.Background(), 0); err != nil {
			t.Error(err)
		}
	})
	for range 2 { // the second call finds it running
		if err := d.Start(t.Context(), []string{self, "vmm"}, func(context.Context) (Config, error) { return &cfg, nil }); err != nil {
			t.Fatal(err)
		}
	}
}

func wantPower(t *testing.T, d Dir, power backend.PowerState, reason string) {
	t.Helper()
	var in backend.Instance
	if err := d.Power(&in); err != nil || in.Power != power || in.Reason != reason {
		t.Errorf("%+v, %v; want %s, %q", in, err, power, reason)
	}
}

func TestLifeOfASupervisor(t *testing.T) {
	d := testDir(t)
	started(t, d)
	wantPower(t, d, backend.PowerRunning, "")
	if _, err := d.DialControl(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnsupported {
		t.Errorf("a VM without a control port: %v", err)
	}
	if _, err := d.DialGuest(t.Context(), 22); agentlab.CodeOf(err) != agentlab.CodeUnsupported {
		t.Errorf("a VM without a network: %v", err)
	}
	stopped := func() error { t.Error("the supervisor was passed over"); return nil }
	if err := d.SetNetwork(t.Context(), agentlab.Network{Mode: agentlab.NetworkOff}, stopped); err != nil {
		t.Error(err)
	}
	if err := d.SetDeadline(t.Context(), backend.Deadline{Lease: time.Now(), Left: time.Hour}); err != nil {
		t.Error(err)
	}
	if err := d.Halt(t.Context(), guard.Patience); err != nil {
		t.Error(err)
	}
	wantPower(t, d, backend.PowerStopped, "")
	started(t, d)
	if err := killNoted(d.file(filePID)); err != nil {
		t.Fatal(err)
	}
	if err := waitFree(t.Context(), d.file(fileLock)); err != nil {
		t.Fatal(err)
	}
	wantPower(t, d, backend.PowerCrashed, "its supervisor process was killed, and the VM with it")
	if err := d.Settle(time.Now()); err != nil {
		t.Error(err)
	}
	wantPower(t, d, backend.PowerStopped, "")
}

// A supervisor that hangs is killed by Halt.
func TestHaltKillsASupervisorThatHangs(t *testing.T) {
	d := testDir(t)
	started(t, d)
	var p processID
	if err := durable.ReadJSON(d.file(filePID), &p); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(p.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := d.Halt(t.Context(), 0); err != nil {
		t.Error(err)
	}
	if held, err := lockHeld(d.file(fileLock)); err != nil || held {
		t.Errorf("held %v, %v", held, err)
	}
}

// A program that is no supervisor ends at once, with its own words.
func TestProgramEndsAtOnce(t *testing.T) {
	d := testDir(t)
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho no such thing >&2\nexit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	err := d.Start(t.Context(), []string{path}, func(context.Context) (Config, error) { return &Start{}, nil })
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), "ended immediately: no such thing") || agentlab.HintOf(err) == "" {
		t.Errorf("%v", err)
	}
	wantPower(t, d, backend.PowerStopped, "") // it never ran
}

// A supervisor that is not ready in time is killed.
func TestStartPatience(t *testing.T) {
	d := Dir{Path: t.TempDir(), VMID: 1, Process: "fake", Log: slog.New(slog.DiscardHandler), StartPatience: 300 * time.Millisecond}
	err := d.Start(t.Context(), []string{"sh", "-c", "exec sleep 600"}, func(context.Context) (Config, error) { return &Start{}, nil })
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), "not ready in time") {
		t.Error(err)
	}
	wantPower(t, d, backend.PowerStopped, "")
}
