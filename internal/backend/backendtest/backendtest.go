// Package backendtest is the conformance suite of the driver contract: a test
// for each sentence of package backend. A driver's test calls Run with a
// Config that opens the driver and injects faults; tests of features that a
// driver does not have are skipped with the reason.
//
// The suite uses few VMs: tests without a VM come first, and all tests with a
// running VM share it.
package backendtest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// Config describes a driver under test. New is required.
type Config struct {
	// New opens the driver with an empty state, once for each group of
	// tests. It registers its cleanup with t.Cleanup; the suite destroys its
	// sandboxes.
	New func(t *testing.T) *Harness

	// Groups returns which of the groups of tests that boot guests run, for a
	// sample of them. nil: all.
	Groups func(t *testing.T, names []string) []string

	// GuestCrashes returns at which of the crash points these groups crash the
	// driver, for a sample of them. nil: at all.
	GuestCrashes func(t *testing.T, points []CrashPoint) []CrashPoint

	// NoVM is the reason why the sandboxes of this driver have no guest. If it
	// is set, the tests that need one are skipped.
	NoVM string

	// Parallel is how many sandboxes are created in parallel; default 8.
	Parallel int

	// Patience is how long the suite waits for a guest, or for a method whose
	// context has ended; default guard.Patience. Only tests of the suite itself,
	// in which a driver hangs, set it.
	Patience time.Duration
}

// Harness is one opened driver with hooks that inject faults. Only Driver and
// Spec are required; a nil hook skips the tests that need it.
type Harness struct {
	Driver backend.Driver

	// Optional are the names of the optional interfaces of package backend that
	// the driver implements.
	Optional []string

	// Spec returns a Spec that this driver supports; Specs of different n
	// differ in VMID, UID and name.
	Spec func(n int) backend.Spec

	// Unsupported maps the name of a field, which the error must contain,
	// to a change that makes a valid Spec unsupported.
	Unsupported map[string]func(*backend.Spec)

	// Options maps the Path of each of Info.Options to a value that this driver
	// supports. If there is none, the Path is only in Unsupported.
	Options map[string]any

	// Reopen simulates a crash of the driver's process, without a Close,
	// and opens it again.
	Reopen func(t *testing.T) backend.Driver

	// CrashPoints are points at which a crash of the driver's process can
	// be simulated.
	CrashPoints []CrashPoint

	// Foreign creates an object of another owner with the number of the
	// sandbox, and returns a check that it is unchanged.
	Foreign func(t *testing.T, spec backend.Spec) (untouched func(t *testing.T))

	// ForeignHidden means that this driver cannot read the object of Foreign
	// and detects it only by the error of a Create.
	ForeignHidden bool

	// EgressCommand is a command in the guest that tries to open a TCP
	// connection to EgressTarget, which every policy denies.
	EgressCommand []string

	// NoFrom is the code of the error of a Create from a snapshot, if the backend
	// of this harness cannot copy snapshots.
	NoFrom agentlab.Code
	// NewestOnly means that only the newest snapshot of a sandbox can be restored.
	NewestOnly bool
	// PresentSize means that a copy of a snapshot of a volume has the present size of
	// the volume.
	PresentSize bool
	// NoCPU means that the guests have the processor of the tests, not the one that the
	// driver gives them.
	NoCPU bool
	// KillVM kills a running VM without the driver.
	KillVM func(t *testing.T, ref backend.Ref)

	VolumeHarness
}

// Method is a method of the driver that has crash points.
type Method string

// The methods with crash points.
const (
	MethodCreate  Method = "Create"
	MethodStart   Method = "Start"
	MethodStop    Method = "Stop"
	MethodDestroy Method = "Destroy"

	MethodSaveSnapshot    Method = "SaveSnapshot"
	MethodRestoreSnapshot Method = "RestoreSnapshot"
	MethodDeleteSnapshot  Method = "DeleteSnapshot"

	MethodCreateVolume         Method = "CreateVolume"
	MethodDeleteVolume         Method = "DeleteVolume"
	MethodGrowVolume           Method = "GrowVolume"
	MethodAttachVolume         Method = "AttachVolume"
	MethodDetachVolume         Method = "DetachVolume"
	MethodSnapshotVolume       Method = "SnapshotVolume"
	MethodRestoreVolume        Method = "RestoreVolume"
	MethodCloneVolume          Method = "CloneVolume"
	MethodCloneVolumeSnapshot  Method = "CloneVolumeSnapshot"
	MethodDeleteVolumeSnapshot Method = "DeleteVolumeSnapshot"
)

// CrashPoint is a point in a method.
type CrashPoint struct {
	Method Method
	Name   string // e.g. "mark written, no disk yet"
	// Arm makes the next call of Method crash there: it returns an error,
	// and the driver cannot be used before Reopen.
	Arm func(t *testing.T)
}

// Run runs the suite.
func Run(t *testing.T, cfg Config) {
	if cfg.Patience <= 0 {
		cfg.Patience = guard.Patience
	}
	if cfg.Parallel <= 0 {
		cfg.Parallel = 8
	}
	booting := []string{"VM", "VMSnapshots", "VMVolumes"}
	selected := booting
	if cfg.Groups != nil {
		selected = cfg.Groups(t, booting)
	}
	for _, test := range []struct {
		name string
		run  func(*suite)
	}{
		{"Info", (*suite).info},
		{"Check", (*suite).check},
		{"Unsupported", (*suite).unsupported},
		{"Nested", (*suite).nested},
		{"CreateTwice", (*suite).createTwice},
		{"NumberTaken", (*suite).numberTaken},
		{"Absent", (*suite).absent},
		{"WrongMark", (*suite).wrongMark},
		{"Handle", (*suite).handle},
		{"DestroyStopped", (*suite).destroyStopped},
		{"Foreign", (*suite).foreign},
		{"ParallelCreates", (*suite).parallel},
		{"NetworkStopped", (*suite).networkStopped},
		{"ReopenStopped", (*suite).reopenStopped},
		{"Cancelled", (*suite).cancelled},
		{"CancelledAnywhere", (*suite).cancelledAnywhere},
		{"CrashPoints", (*suite).crashPoints},
		{"Snapshots", (*suite).snapshotsStopped},
		{"Templates", (*suite).templates},
		{"Volumes", (*suite).volumesStill},
		{"VM", (*suite).vm},
		{"VMSnapshots", (*suite).snapshotsRunning},
		{"VMVolumes", (*suite).volumesRunning},
	} {
		t.Run(test.name, func(t *testing.T) {
			boots := slices.Contains(booting, test.name)
			if boots && !slices.Contains(selected, test.name) {
				t.Skip("skipped: not in the sample of this run")
			}
			h := cfg.New(t)
			if boots && cfg.GuestCrashes != nil {
				h.CrashPoints = cfg.GuestCrashes(t, h.CrashPoints)
			}
			if err := checkOptional(h.Driver, h.Optional); err != nil {
				t.Fatal(err)
			}
			test.run(&suite{T: t, cfg: cfg, h: h, d: h.Driver})
		})
	}
}

// suite is one group of tests with its own driver.
type suite struct {
	*testing.T
	cfg Config
	h   *Harness
	d   backend.Driver
}

// sub runs a part of a group on the same driver.
func (s *suite) sub(name string, fn func(*suite)) {
	s.T.Helper()
	s.T.Run(name, func(t *testing.T) {
		c := *s
		c.T = t
		fn(&c)
		s.d = c.d // Reopen may have replaced it
	})
}

// ctx returns a context that bounds one call.
func (s *suite) ctx() context.Context {
	ctx, cancel := context.WithTimeout(s.Context(), s.cfg.Patience)
	s.Cleanup(cancel)
	return ctx
}

func (s *suite) ok(what string, err error) {
	s.Helper()
	if err != nil {
		s.Fatalf("%s: %v (code %s)", what, err, agentlab.CodeOf(err))
	}
}

func (s *suite) wantCode(what string, err error, want agentlab.Code) {
	s.Helper()
	if agentlab.CodeOf(err) != want {
		s.Fatalf("%s: got %v (code %q), want code %q", what, err, agentlab.CodeOf(err), want)
	}
}

// allowed are the codes of the contract.
var allowed = map[agentlab.Code]bool{
	agentlab.CodeNotFound: true, agentlab.CodeExists: true, agentlab.CodeBusy: true, agentlab.CodeUnsupported: true,
	agentlab.CodeDenied: true, agentlab.CodeNoSpace: true, agentlab.CodeUnavailable: true,
	agentlab.CodeUnknownOutcome: true, agentlab.CodeInvalid: true, agentlab.CodeInternal: true, agentlab.CodeConflict: true,
}

// wantAllowed fails for an error whose code is not in the contract.
func (s *suite) wantAllowed(what string, err error) {
	s.Helper()
	if err != nil && !allowed[agentlab.CodeOf(err)] {
		s.Fatalf("%s: %v has code %q, which the contract does not know", what, err, agentlab.CodeOf(err))
	}
}

// spec returns the nth Spec and destroys its sandbox at the end.
func (s *suite) spec(n int) backend.Spec {
	sp := s.h.Spec(n)
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.Context()), s.cfg.Patience)
		defer cancel()
		if err := s.d.Destroy(ctx, sp.Ref()); err != nil {
			s.Errorf("clean up sandbox %d: %v", sp.VMID, err)
		}
	})
	return sp
}

func (s *suite) create(n int) backend.Spec {
	s.Helper()
	sp := s.spec(n)
	s.ok("Create", s.d.Create(s.ctx(), sp))
	return sp
}

func (s *suite) wantPower(ref backend.Ref, want backend.PowerState) backend.Instance {
	s.Helper()
	in, err := s.d.Inspect(s.ctx(), ref)
	s.ok("Inspect", err)
	if in.Power != want {
		s.Fatalf("sandbox %s is %s (%s), want %s", ref.UID, in.Power, in.Reason, want)
	}
	if in.Ref.UID != ref.UID {
		s.Fatalf("Inspect answers for %+v, asked for %+v", in.Ref, ref)
	}
	return in
}

func (s *suite) wantAbsent(ref backend.Ref) {
	s.Helper()
	_, err := s.d.Inspect(s.ctx(), ref)
	s.wantCode("Inspect of what is gone", err, agentlab.CodeNotFound)
	if in := s.listed(ref); in != nil {
		s.Fatalf("List still has it: %+v", *in)
	}
}

// listed returns the instance of ref from List, nil if there is none.
func (s *suite) listed(ref backend.Ref) *backend.Instance {
	s.Helper()
	all, err := s.d.List(s.ctx())
	s.ok("List", err)
	var found *backend.Instance
	for _, in := range all {
		if in.Ref.UID == ref.UID {
			if found != nil {
				s.Fatalf("List has sandbox %s twice", ref.UID)
			}
			found = &in
		}
	}
	return found
}

func (s *suite) reopen() {
	s.Helper()
	if s.h.Reopen == nil {
		s.Skip("skipped: this harness cannot kill the driver's process")
	}
	s.d = s.h.Reopen(s.T)
	s.h.Driver = s.d
	if err := checkOptional(s.d, s.h.Optional); err != nil {
		s.Fatal(err)
	}
}

// eventually polls until cond returns nil.
func (s *suite) eventually(what string, cond func() error) {
	s.Helper()
	deadline := time.Now().Add(s.cfg.Patience)
	for {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("%s: not within %s: %v", what, s.cfg.Patience, err)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-s.Context().Done():
			s.Fatal(s.Context().Err())
		}
	}
}
