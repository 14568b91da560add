package qemu

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// A run that is not full has one group of those that boot guests, here and in
// TestConformanceWarm.
func TestConformance(t *testing.T) {
	backendtest.Run(t, backendtest.Config{
		Groups: func(t *testing.T, names []string) []string { return sample.Of(t, 1, names) },
		New: func(t *testing.T) *backendtest.Harness {
			h := newHarness(t, vmFixture(t))
			h.CrashPoints = sample.Of(t, 6, h.CrashPoints)
			return h
		},
	})
}

// Sandboxes that start from a template keep the same contract.
func TestConformanceWarm(t *testing.T) {
	backendtest.Run(t, backendtest.Config{
		Groups: func(t *testing.T, names []string) []string { // another one than above
			return sample.Of(t, 1, slices.Concat(names[1:], names[:1]))
		},
		New: func(t *testing.T) *backendtest.Harness { return newHarness(t, warmFixture(t)) },
		GuestCrashes: func(t *testing.T, points []backendtest.CrashPoint) []backendtest.CrashPoint {
			return sample.Cover(t, points, func(p backendtest.CrashPoint) []string { return []string{string(p.Method)} })
		},
	})
}

// mortal is a driver whose next call of a method may be made by a process
// that dies in it.
type mortal struct {
	*Driver
	fixed fixed
	mu    sync.Mutex
	armed *doomed
	specs map[backend.Ref]backend.Spec
}

// doom returns what the armed process did, and true when there was one.
func (m *mortal) doom(method backendtest.Method, ref backend.Ref) (error, bool) { //nolint:revive // two results of one call
	return m.doomOf(method, backend.SnapshotRef{Of: ref})
}

// doomOf is doom for a snapshot.
func (m *mortal) doomOf(method backendtest.Method, ref backend.SnapshotRef) (error, bool) { //nolint:revive // two results of one call
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.armed
	if c == nil || c.Method != method {
		return nil, false
	}
	m.armed = nil
	c.Fixed, c.Spec, c.Snapshot = m.fixed, m.specs[ref.Of], ref
	return c.dieIn(), true
}

func (m *mortal) Create(ctx context.Context, spec backend.Spec) error {
	m.mu.Lock()
	m.specs[spec.Ref()] = spec
	m.mu.Unlock()
	if err, dead := m.doom(backendtest.MethodCreate, spec.Ref()); dead {
		return err
	}
	return m.Driver.Create(ctx, spec)
}

func (m *mortal) Start(ctx context.Context, ref backend.Ref) error {
	if err, dead := m.doom(backendtest.MethodStart, ref); dead {
		return err
	}
	return m.Driver.Start(ctx, ref)
}

func (m *mortal) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	if err, dead := m.doom(backendtest.MethodStop, ref); dead {
		return err
	}
	return m.Driver.Stop(ctx, ref, grace)
}

func (m *mortal) Destroy(ctx context.Context, ref backend.Ref) error {
	if err, dead := m.doom(backendtest.MethodDestroy, ref); dead {
		return err
	}
	return m.Driver.Destroy(ctx, ref)
}

func (m *mortal) SaveSnapshot(ctx context.Context, ref backend.Ref, uid string) (backend.Snapshot, error) {
	if err, dead := m.doomOf(backendtest.MethodSaveSnapshot, backend.SnapshotRef{UID: uid, Of: ref}); dead {
		return backend.Snapshot{}, err
	}
	return m.Driver.SaveSnapshot(ctx, ref, uid)
}

func (m *mortal) RestoreSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	if err, dead := m.doomOf(backendtest.MethodRestoreSnapshot, ref); dead {
		return err
	}
	return m.Driver.RestoreSnapshot(ctx, ref)
}

func (m *mortal) DeleteSnapshot(ctx context.Context, ref backend.SnapshotRef) error {
	if err, dead := m.doomOf(backendtest.MethodDeleteSnapshot, ref); dead {
		return err
	}
	return m.Driver.DeleteSnapshot(ctx, ref)
}

func newHarness(t *testing.T, f fixed) *backendtest.Harness {
	t.Helper()
	open := func(t *testing.T) *Driver {
		d, err := f.open()
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	m := &mortal{Driver: open(t), fixed: f, specs: map[backend.Ref]backend.Spec{}}
	h := &backendtest.Harness{
		Driver: m,

		Optional: []string{"Power", "Net", "Console", "Snapshots", "Templates", "Volumes", "Host", "SuspendToDisk", "Deadlines", "EgressRecords"},

		Spec:   f.spec,
		Reopen: func(t *testing.T) backend.Driver { m.Driver = open(t); return m },
		Unsupported: map[string]func(*backend.Spec){
			"network.mode":        func(s *backend.Spec) { s.Network.Mode = "bridge" },
			"resources.memory_mb": func(s *backend.Spec) { s.Resources.MemoryMB = 128 },
			"network.model":       func(s *backend.Spec) { s.Options = `{"nic_model":"e1000"}` },
		},
		Options: map[string]any{"network.model": "virtio"},
		Foreign: func(t *testing.T, s backend.Spec) func(*testing.T) {
			return foreignFile(t, filepath.Join(m.sandboxes(), vmdir.Name(s.VMID, s.UID)), vmdir.FileConfig, `{"version":1,"spec":{"VMID":7,"UID":"another"}}`)
		},
		EgressCommand: []string{"sh", "-c", "curl -s -m 10 http://" + backendtest.EgressTarget + "/ || true"},
		KillVM: func(t *testing.T, ref backend.Ref) {
			pid, err := noted(m.dir(ref), qemuPID)
			if err == nil {
				err = syscall.Kill(pid, syscall.SIGKILL)
			}
			if err != nil {
				t.Fatal(err)
			}
		},
	}
	h.ForeignVolume = func(t *testing.T, v backend.VolumeSpec) func(*testing.T) {
		if err := os.MkdirAll(m.volumes(), 0o700); err != nil {
			t.Fatal(err)
		}
		return foreignFile(t, filepath.Join(m.volumes(), v.UID), vmdir.FileVolume, `{"version":1,"uid":"another"}`)
	}
	h.FillVolumes = func(*testing.T) func() {
		before := m.cfg.PauseBelow
		m.cfg.PauseBelow = 1 << 60
		return func() { m.cfg.PauseBelow = before }
	}
	for method, points := range map[backendtest.Method][]string{
		backendtest.MethodCreate:  {"directory made", "mark written", "disk not named", "disk made"},
		backendtest.MethodStart:   {"lock taken", "start written", "supervisor started"},
		backendtest.MethodStop:    {"halted"},
		backendtest.MethodDestroy: {"halted", "in the trash"},

		backendtest.MethodSaveSnapshot:    {"snapshot begun", "snapshot marked", "snapshot saved", "snapshot complete"},
		backendtest.MethodRestoreSnapshot: {"restore copied", "restore staged", "restore halted", "restored root.qcow2", "restored memory", "restored memory.json", "restore done"},
		backendtest.MethodDeleteSnapshot:  {"snapshot unmarked"},

		backendtest.MethodCreateVolume:         {"volume directory made", "volume marked", "volume made"},
		backendtest.MethodDeleteVolume:         {"volume in the trash"},
		backendtest.MethodGrowVolume:           {"volume not grown", "volume grown"},
		backendtest.MethodAttachVolume:         {"volume named", "volume plugged"},
		backendtest.MethodDetachVolume:         {"volume unplugged", "volume not named"},
		backendtest.MethodSnapshotVolume:       {"volume snapshot begun", "volume frozen", "volume saved", "volume snapshot complete"},
		backendtest.MethodRestoreVolume:        {"volume restore staged", "volume restored"},
		backendtest.MethodCloneVolume:          {"volume marked", "volume frozen", "volume made"},
		backendtest.MethodCloneVolumeSnapshot:  {"volume marked", "volume made"},
		backendtest.MethodDeleteVolumeSnapshot: {"volume snapshot unmarked"},
	} {
		for _, point := range points {
			h.CrashPoints = append(h.CrashPoints, backendtest.CrashPoint{Method: method, Name: point, Arm: func(*testing.T) {
				m.mu.Lock()
				defer m.mu.Unlock()
				m.armed = &doomed{Method: method, Point: point}
			}})
		}
	}
	return h
}

// foreignFile creates a foreign directory at the place of a sandbox or a volume, with
// one file.
func foreignFile(t *testing.T, dir, name, text string) func(*testing.T) {
	t.Helper()
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return func(t *testing.T) {
		t.Helper()
		b, err := os.ReadFile(path)
		entries, _ := os.ReadDir(dir)
		if err != nil || string(b) != text || len(entries) != 1 {
			t.Errorf("the foreign directory was touched: %q, %d entries, %v", b, len(entries), err)
		}
	}
}
