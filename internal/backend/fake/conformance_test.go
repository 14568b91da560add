package fake_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func spec(n int) backend.Spec {
	return backend.Spec{
		VMID: 1000 + n, UID: fmt.Sprintf("uid-%d", n), Name: fmt.Sprintf("sb-%d", n), Image: "base@sha256:0",
		Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT},
	}
}

func harness(t *testing.T, open func() *fake.Driver) *backendtest.Harness {
	d := open()
	host := d.Host
	h := &backendtest.Harness{
		Driver: d,

		Optional: []string{"Power", "Net", "Console", "Snapshots", "Templates", "Volumes", "Host", "SuspendToDisk", "Deadlines", "EgressRecords", "SharedNumbers"},

		Spec: spec,
		Unsupported: map[string]func(*backend.Spec){
			"resources.cores": func(s *backend.Spec) { s.Resources.Cores = 65 },
			"network.mode":    func(s *backend.Spec) { s.Network.Mode = "bridge" },
		},
		Foreign: func(_ *testing.T, s backend.Spec) func(*testing.T) {
			host().PutForeign(s.VMID)
			return func(t *testing.T) {
				if !host().Foreign(s.VMID) {
					t.Error("the foreign object is gone")
				}
			}
		},
		EgressCommand: []string{"egress", "deny", backendtest.EgressTarget, "always.documentation"},
		KillVM: func(t *testing.T, ref backend.Ref) {
			if err := host().CrashVM(ref, "killed"); err != nil {
				t.Fatal(err)
			}
		},
	}
	h.VolumeCommand = func(args ...string) []string { return append([]string{"volume"}, args...) }
	h.FillVolumes = func(*testing.T) func() {
		host().FillVolumes(true)
		return func() { host().FillVolumes(false) }
	}
	h.ForeignVolume = func(_ *testing.T, v backend.VolumeSpec) func(*testing.T) {
		host().PutForeignVolume(v.UID)
		return func(t *testing.T) {
			if !host().ForeignVolume(v.UID) {
				t.Error("the foreign volume is gone")
			}
		}
	}
	h.Reopen = func(t *testing.T) backend.Driver {
		d = open()
		host = d.Host
		return d
	}
	for _, p := range []struct {
		m     backendtest.Method
		op    fake.Op
		point fake.Point
	}{
		{backendtest.MethodCreate, fake.OpCreate, fake.Before},
		{backendtest.MethodCreate, fake.OpCreate, fake.Half},
		{backendtest.MethodCreate, fake.OpCreate, fake.After},
		{backendtest.MethodStart, fake.OpStart, fake.Before},
		{backendtest.MethodStart, fake.OpStart, fake.After},
		{backendtest.MethodStop, fake.OpStop, fake.Half},
		{backendtest.MethodStop, fake.OpStop, fake.After},
		{backendtest.MethodDestroy, fake.OpDestroy, fake.Before},
		{backendtest.MethodDestroy, fake.OpDestroy, fake.Half},
		{backendtest.MethodDestroy, fake.OpDestroy, fake.After},
		{backendtest.MethodSaveSnapshot, fake.OpSaveSnapshot, fake.Before},
		{backendtest.MethodSaveSnapshot, fake.OpSaveSnapshot, fake.Half},
		{backendtest.MethodSaveSnapshot, fake.OpSaveSnapshot, fake.After},
		{backendtest.MethodRestoreSnapshot, fake.OpRestoreSnapshot, fake.Half},
		{backendtest.MethodRestoreSnapshot, fake.OpRestoreSnapshot, fake.After},
		{backendtest.MethodDeleteSnapshot, fake.OpDeleteSnapshot, fake.Half},
		{backendtest.MethodDeleteSnapshot, fake.OpDeleteSnapshot, fake.After},
		{backendtest.MethodCreateVolume, fake.OpCreateVolume, fake.Half},
		{backendtest.MethodCreateVolume, fake.OpCreateVolume, fake.After},
		{backendtest.MethodDeleteVolume, fake.OpDeleteVolume, fake.Half},
		{backendtest.MethodDeleteVolume, fake.OpDeleteVolume, fake.After},
		{backendtest.MethodGrowVolume, fake.OpGrowVolume, fake.Before},
		{backendtest.MethodGrowVolume, fake.OpGrowVolume, fake.After},
		{backendtest.MethodAttachVolume, fake.OpAttachVolume, fake.Before},
		{backendtest.MethodAttachVolume, fake.OpAttachVolume, fake.After},
		{backendtest.MethodDetachVolume, fake.OpDetachVolume, fake.Before},
		{backendtest.MethodDetachVolume, fake.OpDetachVolume, fake.After},
		{backendtest.MethodSnapshotVolume, fake.OpSnapshotVolume, fake.Half},
		{backendtest.MethodSnapshotVolume, fake.OpSnapshotVolume, fake.After},
		{backendtest.MethodRestoreVolume, fake.OpRestoreVolume, fake.Half},
		{backendtest.MethodRestoreVolume, fake.OpRestoreVolume, fake.After},
		{backendtest.MethodCloneVolume, fake.OpCloneVolume, fake.Half},
		{backendtest.MethodCloneVolume, fake.OpCloneVolume, fake.After},
		{backendtest.MethodCloneVolumeSnapshot, fake.OpCloneVolume, fake.Half},
		{backendtest.MethodDeleteVolumeSnapshot, fake.OpDeleteVolumeSnapshot, fake.Half},
		{backendtest.MethodDeleteVolumeSnapshot, fake.OpDeleteVolumeSnapshot, fake.After},
	} {
		h.CrashPoints = append(h.CrashPoints, backendtest.CrashPoint{
			Method: p.m, Name: string(p.point),
			Arm: func(*testing.T) { host().Inject(fake.Fault{Op: p.op, At: p.point, Times: 1, Crash: true}) },
		})
	}
	return h
}

// The host is a machine in this process; the driver's death is a new opening.
func TestConformanceInMemory(t *testing.T) {
	backendtest.Run(t, backendtest.Config{New: func(t *testing.T) *backendtest.Harness {
		host, err := fake.NewHost(fake.Config{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = host.Close() })
		return harness(t, host.Open)
	}})
}

// The storage of the volumes has no snapshots, and volumes stay where they are while
// a sandbox runs.
func TestConformancePlainStorage(t *testing.T) {
	backendtest.Run(t, backendtest.Config{New: func(t *testing.T) *backendtest.Harness {
		host, err := fake.NewHost(fake.Config{NoVolumeHotplug: true, NoAttachedVolumeSnapshots: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = host.Close() })
		h := harness(t, host.Open)
		h.VolumeStorage, h.NoVolumeSnapshots = fake.StoragePlain, true
		return h
	}})
}

// The host is a directory; the driver's death is the end of the machine's
// process, and the next one goes on from the files.
func TestConformanceOnDisk(t *testing.T) {
	backendtest.Run(t, backendtest.Config{New: func(t *testing.T) *backendtest.Harness {
		dir := t.TempDir()
		var last *fake.Driver
		closeLast := func() {
			if last != nil {
				if err := last.Close(); err != nil {
					t.Error(err)
				}
			}
		}
		t.Cleanup(closeLast)
		return harness(t, func() *fake.Driver {
			closeLast()
			d, err := fake.Open(fake.Config{Dir: dir})
			if err != nil {
				t.Fatal(err)
			}
			last = d
			return d
		})
	}})
}

// Tasks of the backend outlive the driver: a snapshot that a killed driver was saving is
// complete after it was listed once.
func TestConformanceOfLateTasks(t *testing.T) {
	backendtest.Run(t, backendtest.Config{New: func(t *testing.T) *backendtest.Harness {
		host, err := fake.NewHost(fake.Config{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = host.Close() })
		h := harness(t, host.Open)
		h.CrashPoints = slices.DeleteFunc(h.CrashPoints, func(p backendtest.CrashPoint) bool {
			return p.Name != string(fake.Half) || p.Method != backendtest.MethodSaveSnapshot && p.Method != backendtest.MethodSnapshotVolume
		})
		reopen := h.Reopen
		h.Reopen = func(t *testing.T) backend.Driver { return late{reopen(t).(*fake.Driver)} }
		return h
	}})
}

// late is the fake whose interrupted saves go on.
type late struct{ *fake.Driver }

func (d late) Snapshots(ctx context.Context) ([]backend.Snapshot, error) {
	all, err := d.Driver.Snapshots(ctx)
	for _, n := range all {
		if n.Partial {
			_, serr := d.SaveSnapshot(ctx, n.Ref.Of, n.Ref.UID)
			err = errors.Join(err, serr)
		}
	}
	return all, err
}

func (d late) VolumeSnapshots(ctx context.Context) ([]backend.VolumeSnapshot, error) {
	all, err := d.Driver.VolumeSnapshots(ctx)
	for _, n := range all {
		if n.Partial {
			_, serr := d.SnapshotVolume(ctx, n.Ref.Of, n.Ref.UID)
			err = errors.Join(err, serr)
		}
	}
	return all, err
}
