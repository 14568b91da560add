package lima

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// The driver keeps the contract of every backend.
func TestConformance(t *testing.T) {
	backendtest.Run(t, backendtest.Config{
		New:      func(t *testing.T) *backendtest.Harness { return newHarness(t, vmFixture(t)) },
		Parallel: 4,
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
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.armed
	if c == nil || c.Method != method {
		return nil, false
	}
	m.armed = nil
	c.Fixed, c.Spec = m.fixed, m.specs[ref]
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
		Driver:   m,
		Optional: []string{"Power", "Net", "Console", "Volumes", "Host", "Deadlines", "EgressRecords"},
		Spec:     f.spec,
		Reopen:   func(t *testing.T) backend.Driver { m.Driver = open(t); return m },
		Unsupported: map[string]func(*backend.Spec){
			"network.mode":        func(s *backend.Spec) { s.Network.Mode = "bridge" },
			"resources.memory_mb": func(s *backend.Spec) { s.Resources.MemoryMB = 128 },
		},
		Foreign: func(t *testing.T, s backend.Spec) func(*testing.T) {
			return foreign(t, filepath.Join(m.set.Root, vmdir.Name(s.VMID, s.UID)))
		},
		EgressCommand: []string{"sh", "-c", "curl -s -m 10 http://" + backendtest.EgressTarget + "/ || true"},
		KillVM: func(t *testing.T, ref backend.Ref) {
			var p struct{ PID int }
			err := durable.ReadJSON(filepath.Join(m.dir(ref), processName+".pid"), &p)
			if err == nil {
				err = syscall.Kill(p.PID, syscall.SIGKILL)
			}
			if err != nil {
				t.Fatal(err)
			}
		},
	}
	h.ForeignVolume = func(t *testing.T, v backend.VolumeSpec) func(*testing.T) { return foreignDisk(t, m.Driver, v) }
	h.FillVolumes = func(*testing.T) func() {
		before := m.cfg.PauseBelow
		m.cfg.PauseBelow = 1 << 60
		return func() { m.cfg.PauseBelow = before }
	}
	for method, points := range map[backendtest.Method][]string{
		backendtest.MethodCreate:  {"directory made", "mark written", "instance not made", "instance not named", "instance made"},
		backendtest.MethodStart:   {"lock taken", "start written", "supervisor started"},
		backendtest.MethodStop:    {"halted"},
		backendtest.MethodDestroy: {"halted", "in the trash", "instance removed"},

		backendtest.MethodCreateVolume: {"volume directory made", "volume marked", "volume made"},
		backendtest.MethodDeleteVolume: {"volume in the trash"},
		backendtest.MethodGrowVolume:   {"volume not grown", "volume grown"},
		backendtest.MethodAttachVolume: {"volume named", "volume plugged"},
		backendtest.MethodDetachVolume: {"volume unplugged", "volume not named"},

		backendtest.MethodSnapshotVolume:      {"volume saved", "volume snapshot complete"},
		backendtest.MethodRestoreVolume:       {"volume restore staged", "volume restored"},
		backendtest.MethodCloneVolume:         {"volume marked", "volume made"},
		backendtest.MethodCloneVolumeSnapshot: {"volume marked", "volume made"},
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

// foreign creates a foreign directory at the place of a sandbox.
func foreign(t *testing.T, dir string) func(*testing.T) {
	t.Helper()
	const text = `{"version":1,"spec":{"VMID":7,"UID":"another"}}`
	path := filepath.Join(dir, vmdir.FileConfig)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
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
