package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

const day = 24 * time.Hour

// TestClockJumpDeletesNothing starts a daemon 31 days ahead: jobs keep their
// artifacts, and sandboxes what is left of their leases.
func TestClockJumpDeletesNothing(t *testing.T) {
	h, job := lived(t)
	stop := h.start(t)
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "leased", TTLMinutes: 60}); err != nil {
		t.Fatal(err)
	}
	h.await(t, "leased", agentlab.SandboxReady)
	stop()

	var ahead atomic.Int64
	ahead.Store(int64(31 * day))
	d, err := New(t.Context(), Config{Paths: h.paths, Getenv: testEnv(h.paths.Home), Backends: known, Clock: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	if _, err := d.services.gc.Pass(t.Context()); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("a pass of the garbage collection: %v", err)
	}
	kept := filepath.Join(h.paths.Artifacts(), job, "out.txt")
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
	sb, err := d.services.store.SandboxByName(t.Context(), "leased")
	if left := sb.LeaseExpiresAt.Sub(d.services.cfg.Clock()); err != nil || left < 50*time.Minute || left > time.Hour {
		t.Errorf("left of the lease: %s, %v", left, err)
	}
	s, err := d.Status(t.Context())
	if err != nil || len(s.Findings) != 1 || s.Findings[0].Name != "clock" || !strings.Contains(s.Findings[0].Remedy, "agentlab daemon confirm-clock") {
		t.Errorf("findings %+v, %v", s.Findings, err)
	}
	if _, err := d.services.clock.Confirm(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := d.services.gc.Pass(t.Context()); err != nil || got.Artifacts != 1 {
		t.Errorf("a pass after the clock was confirmed: %+v, %v", got, err)
	}
	if _, err := os.Stat(kept); err == nil {
		t.Error("the artifacts are older than their retention and still there")
	}
}
