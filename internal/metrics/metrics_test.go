package metrics

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
	"github.com/agentlab-vm/agentlab/internal/store"
)

type families map[string]*dto.MetricFamily

// value returns the value of a series: of a histogram, the number of observations.
// It is -1 if the series does not exist.
func (f families) value(name, label string) float64 {
	for _, m := range f[name].GetMetric() {
		if label != "" && (len(m.GetLabel()) != 1 || m.GetLabel()[0].GetValue() != label) {
			continue
		}
		if h := m.GetHistogram(); h != nil {
			return float64(h.GetSampleCount())
		}
		return m.GetCounter().GetValue() + m.GetGauge().GetValue()
	}
	return -1
}

// counts are the rows of a store.
type counts struct{ err error }

func (c *counts) CountSandboxes(context.Context) (map[agentlab.SandboxState]int, error) {
	return map[agentlab.SandboxState]int{agentlab.SandboxReady: 3, "NEWER": 9}, c.err
}

func (c *counts) SandboxMemoryMB(context.Context) (map[agentlab.SandboxState]int, error) {
	return map[agentlab.SandboxState]int{agentlab.SandboxReady: 2}, c.err
}

func (c *counts) CountJobs(context.Context) (map[agentlab.JobStatus]int, error) {
	return map[agentlab.JobStatus]int{agentlab.JobQueued: 4}, c.err
}

func (c *counts) CountSnapshots(context.Context) (map[agentlab.SnapshotState]int, error) {
	return map[agentlab.SnapshotState]int{agentlab.SnapshotReady: 5}, c.err
}

func (c *counts) SnapshotBytes(context.Context) (map[agentlab.SnapshotState]int, error) {
	return map[agentlab.SnapshotState]int{agentlab.SnapshotReady: 1 << 40}, c.err
}

func (c *counts) CountWorkspaces(context.Context) (map[agentlab.WorkspaceState]int, error) {
	return map[agentlab.WorkspaceState]int{agentlab.WorkspaceReady: 6}, c.err
}

func (c *counts) WorkspaceGB(context.Context) (map[agentlab.WorkspaceState]int, error) {
	return map[agentlab.WorkspaceState]int{agentlab.WorkspaceReady: 2}, c.err
}

func (c *counts) CountWorkspaceLeases(context.Context) (map[agentlab.LeaseStep]int, error) {
	return map[agentlab.LeaseStep]int{agentlab.LeaseStepQueued: 8}, c.err
}

type queue reconcile.Stats

func (q queue) Queue() reconcile.Stats { return reconcile.Stats(q) }

type messages struct{}

func (messages) Read() int64  { return 12 }
func (messages) Waiting() int { return 3 }

// host is what the other services know.
type host struct{}

func (host) BootQueue() (int, time.Duration)                  { return 4, 30 * time.Second }
func (host) VMMemory(context.Context) (u, s int64, err error) { return 7 << 20, 9 << 20, nil }
func (host) UsedBytes() int64                                 { return 11 }
func (host) Queue() reconcile.Stats                           { return reconcile.Stats{Delayed: 5} }
func (host) Answering() map[string]bool                       { return map[string]bool{"lab": false, "local": true} }
func (host) images(context.Context) (map[bool]int, map[bool]int64, error) {
	return map[bool]int{true: 2, false: 1}, map[bool]int64{true: 20, false: 10}, nil
}

func newSet(t *testing.T, st Store) *Set {
	t.Helper()
	s := New()
	s.Backends([]string{"lab", "local"})
	s.Start(Config{Version: "v1", Backend: "fake", Sources: Sources{
		Store: st, Sandboxes: queue{Ready: 7, Lag: 90 * time.Second}, Jobs: queue{Failing: 2}, Messages: messages{}, PoolWanted: 6,
		Boots: host{}, VMs: host{}, Workspaces: host{}, ImageUse: host{}.images, Fleet: host{},
		State: t.TempDir(), Images: t.TempDir(), Database: filepath.Join(t.TempDir(), "none.db"),
	}})
	return s
}

func TestGauges(t *testing.T) {
	f := scrape(t, newSet(t, &counts{}))
	for _, c := range []struct {
		name, label string
		want        float64
	}{
		{"agentlab_sandboxes", "READY", 3},
		{"agentlab_sandboxes", "RUNNING", 0},
		{"agentlab_sandboxes", "NEWER", -1},
		{"agentlab_messages_read", "", 12},
		{"agentlab_message_tails", "", 3},
		{"agentlab_sandbox_memory_bytes", "READY", 2 << 20},
		{"agentlab_jobs", "QUEUED", 4},
		{"agentlab_snapshot_bytes", "SAVED", 1 << 40},
		{"agentlab_workspaces", "READY", 6},
		{"agentlab_workspace_size_bytes", "READY", 2 << 30},
		{"agentlab_workspace_leases", "queued", 8},
		{"agentlab_workspace_leases", "acquired", 0},
		{"agentlab_pool_wanted", "", 6},
		{"agentlab_backend_up", "local", 1},
		{"agentlab_backend_up", "lab", 0},
		{"agentlab_reconcile_ready", "sandboxes", 7},
		{"agentlab_reconcile_lag_seconds", "sandboxes", 90},
		{"agentlab_reconcile_failing", "jobs", 2},
		{"agentlab_reconcile_delayed", "workspaces", 5},
		{"agentlab_store_bytes", "database", 0},
		{"agentlab_boot_queue", "", 4},
		{"agentlab_boot_queue_wait_seconds", "", 30},
		{"agentlab_vm_memory_bytes", "unique", 7 << 20},
		{"agentlab_vm_memory_bytes", "shared", 9 << 20},
		{"agentlab_workspace_used_bytes", "", 11},
		{"agentlab_images", "current", 2},
		{"agentlab_images", "old", 1},
		{"agentlab_image_bytes", "old", 10},
	} {
		if have := f.value(c.name, c.label); have != c.want {
			t.Errorf("%s %s: %v, want %v", c.name, c.label, have, c.want)
		}
	}
	for _, name := range []string{"agentlab_disk_free_bytes", "agentlab_disk_size_bytes"} {
		if f.value(name, "state") <= 0 || f.value(name, "images") <= 0 {
			t.Errorf("%s: %v", name, f[name])
		}
	}
	if f.value("agentlab_host_memory_bytes", "available") <= 0 || f.value("agentlab_host_memory_bytes", "total") < f.value("agentlab_host_memory_bytes", "available") {
		t.Errorf("%v", f["agentlab_host_memory_bytes"])
	}
}

// A source that fails takes only its own metrics with it, and the failure counts.
func TestUnreadableSource(t *testing.T) {
	broken := &counts{err: errors.New("the database failed")}
	s := newSet(t, broken)
	f := scrape(t, s)
	if f["agentlab_sandboxes"] != nil || f.value("agentlab_pool_wanted", "") != 6 {
		t.Errorf("%v", f)
	}
	if n := f.value("agentlab_metrics_read_failures_total", ""); n != 8 {
		t.Errorf("%v failures", n)
	}
	broken.err = nil
	if f := scrape(t, s); f.value("agentlab_sandboxes", "READY") != 3 {
		t.Errorf("%v", f["agentlab_sandboxes"])
	}
}

func TestBackendCalls(t *testing.T) {
	s := newSet(t, &counts{})
	s.BackendCalled("lab", time.Second, nil)
	s.BackendCalled("lab", time.Second, agentlab.Errorf(agentlab.CodeNotFound, "an answer"))
	s.BackendCalled("lab", time.Second, agentlab.Errorf(agentlab.CodeUnavailable, "no answer"))
	s.BackendCalled("other", time.Second, nil)
	f := scrape(t, s)
	if n := f.value("agentlab_backend_call_failures_total", "lab"); n != 1 {
		t.Errorf("%v failures", n)
	}
	if n := f.value("agentlab_backend_call_seconds", "lab"); n != 3 {
		t.Errorf("%v calls", n)
	}
	if n := f.value("agentlab_backend_call_seconds", "other"); n != -1 {
		t.Errorf("a backend that is not configured has a series: %v", n)
	}
}

func TestCommits(t *testing.T) {
	s := newSet(t, &counts{})
	event := agentlab.NewEvent
	s.Committed(agentlab.Commit{
		Egress:   agentlab.EgressCount{Allowed: 10, Denied: 3, Dropped: 2},
		Messages: []agentlab.MessageScopeKind{agentlab.MessageScopeJob, agentlab.MessageScopeSession, agentlab.MessageScopeJob, "x"},
		Events: []agentlab.Event{
			event(agentlab.EventSandboxCreated, nil, "created"),
			event(agentlab.EventSandboxState, map[string]any{"from": "REQUESTED", "to": "BOOTING"}, "booting"),
			event(agentlab.EventSandboxState, map[string]any{"from": "BOOTING", "to": "READY", "start": "template", "start_seconds": 0.3}, "ready"),
			event(agentlab.EventSandboxState, map[string]any{"from": "BOOTING", "to": "READY", "start": "boot", "start_seconds": 9}, "ready"),
			event(agentlab.EventSandboxState, map[string]any{"from": "BOOTING", "to": "READY", "start": "pool", "start_seconds": -5}, "the clock jumped"),
			event(agentlab.EventSandboxState, map[string]any{"desired": "stopped"}, "will be stopped"),
			event(agentlab.EventSandboxState, map[string]any{"to": "hostile\"} 1\nagentlab_x 1", "start": "../../etc"}, "hostile"),
			event(agentlab.EventJobStatus, map[string]any{"status": "RUNNING"}, "running"),
			event(agentlab.EventJobStatus, map[string]any{"status": "FAILED", "run_seconds": 12}, "failed"),
			event(agentlab.EventSandboxSnapshot, map[string]any{"state": "SAVED", "bytes": 4096, "seconds": 1.5}, "saved"),
			event(agentlab.EventSandboxSnapshot, map[string]any{"state": "DELETED", "code": "no_space"}, "not saved"),
			event(agentlab.EventArtifactStored, map[string]any{"size": 100}, "stored"),
			event(agentlab.EventWorkspaceState, map[string]any{"state": "DELETED"}, "deleted"),
			event(agentlab.EventWorkspaceState, map[string]any{"state": "FAILED", "code": "no_space"}, "not created"),
			event(agentlab.EventWorkspaceSnapshot, map[string]any{"state": "SAVED"}, "saved"),
			event(agentlab.EventWorkspaceSnapshot, map[string]any{"state": "DELETED", "code": "unsupported"}, "not saved"),
			event(agentlab.EventWorkspaceLease, map[string]any{"step": "queued"}, "waits"),
			event(agentlab.EventWorkspaceLease, map[string]any{"step": "acquired", "wait_seconds": 40}, "acquired"),
			event(agentlab.EventWorkspaceLease, map[string]any{"code": "timeout"}, "not attached"),
			event(agentlab.EventWorkspaceState, map[string]any{"state": "READY", "operation": "resize", "seconds": 2}, "resized"),
			event(agentlab.EventWorkspaceState, map[string]any{"state": "READY", "failed_operation": "restore", "code": "no_space"}, "not restored"),
			event(agentlab.EventWorkspaceSnapshot, map[string]any{"state": "SAVED", "seconds": 3}, "saved"),
			event(agentlab.EventSession, map[string]any{"action": agentlab.SessionSuspended}, "suspended"),
			event("somebody.else", map[string]any{"to": "READY"}, "unknown"),
			{Kind: agentlab.EventSandboxState, Data: "not JSON"},
		},
	})
	s.Written(time.Millisecond, time.Second, nil)
	s.Written(0, time.Second, agentlab.Errorf(agentlab.CodeNoSpace, "full"))
	s.Read(time.Millisecond)
	s.BundleMade(1000, time.Second, nil)
	s.BundleMade(0, time.Second, agentlab.Errorf(agentlab.CodeNotFound, "none"))
	s.Checked(time.Second, agentlab.Errorf(agentlab.CodeUnavailable, "no answer"))
	f := scrape(t, s)
	for _, c := range []struct {
		name, label string
		want        float64
	}{
		{"agentlab_messages_posted_total", "job", 2},
		{"agentlab_messages_posted_total", "session", 1},
		{"agentlab_sandboxes_created_total", "", 1},
		{"agentlab_sandbox_transitions_total", "READY", 3},
		{"agentlab_sandbox_transitions_total", "BOOTING", 1},
		{"agentlab_sandbox_start_seconds", "cold", 1},
		{"agentlab_sandbox_start_seconds", "clone", 1},
		{"agentlab_sandbox_start_seconds", "pool", 0},
		{"agentlab_jobs_ended_total", "FAILED", 1},
		{"agentlab_jobs_ended_total", "RUNNING", -1},
		{"agentlab_job_run_seconds", "FAILED", 1},
		{"agentlab_snapshot_operations_total", "SAVED", 1},
		{"agentlab_snapshot_save_seconds", "", 1},
		{"agentlab_snapshot_saved_bytes_total", "", 4096},
		{"agentlab_snapshot_failures_total", "no_space", 1},
		{"agentlab_workspace_operations_total", "DELETED", 1},
		{"agentlab_workspace_failures_total", "no_space", 2},
		{"agentlab_workspace_operation_seconds", "resize", 1},
		{"agentlab_workspace_operation_seconds", "restore", 0},
		{"agentlab_workspace_operation_failures_total", "restore", 1},
		{"agentlab_workspace_operation_failures_total", "resize", 0},
		{"agentlab_workspace_snapshot_save_seconds", "", 1},
		{"agentlab_workspace_check_seconds", "", 1},
		{"agentlab_workspace_check_failures_total", "unavailable", 1},
		{"agentlab_session_operations_total", "suspended", 1},
		{"agentlab_session_operations_total", "stopped", 0},
		{"agentlab_doctor_bundle_seconds", "", 2},
		{"agentlab_doctor_bundle_bytes_total", "", 1000},
		{"agentlab_doctor_bundle_failures_total", "not_found", 1},
		{"agentlab_store_read_seconds", "", 1},
		{"agentlab_workspace_snapshot_operations_total", "SAVED", 2},
		{"agentlab_workspace_snapshot_failures_total", "unsupported", 1},
		{"agentlab_workspace_lease_steps_total", "queued", 1},
		{"agentlab_workspace_lease_steps_total", "ended", 0},
		{"agentlab_workspace_lease_wait_seconds", "", 1},
		{"agentlab_workspace_lease_failures_total", "timeout", 1},
		{"agentlab_artifact_stored_bytes_total", "", 100},
		{"agentlab_egress_decisions_total", "allow", 10},
		{"agentlab_egress_decisions_total", "deny", 3},
		{"agentlab_egress_decisions_total", "unrecorded", 2},
		{"agentlab_store_write_seconds", "", 2},
		{"agentlab_store_write_wait_seconds", "", 2},
		{"agentlab_store_write_failures_total", "no_space", 1},
	} {
		if have := f.value(c.name, c.label); have != c.want {
			t.Errorf("%s %s: %v, want %v", c.name, c.label, have, c.want)
		}
	}
}

const token = "0123456789abcdef0123456789abcdef"

// The port answers only with the right token, and fails closed without one.
func TestServer(t *testing.T) {
	s := newSet(t, &counts{})
	call := func(srv *http.Server, method, path, auth string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, path, nil)
		if auth != "" {
			r.Header.Set("Authorization", auth)
		}
		w := httptest.NewRecorder()
		srv.Handler.ServeHTTP(w, r)
		return w
	}
	srv := s.Server(token)
	for _, auth := range []string{"", "Bearer", "Bearer ", "Bearer " + token[1:], "Bearer " + token + "0", "Basic " + token, token} {
		if w := call(srv, http.MethodGet, "/metrics", auth); w.Code != http.StatusUnauthorized || strings.Contains(w.Body.String(), "agentlab_") {
			t.Errorf("%q: %d %s", auth, w.Code, w.Body)
		}
	}
	w := call(srv, http.MethodGet, "/metrics", "Bearer "+token)
	if w.Code != http.StatusOK || w.Header().Get("Content-Type") != ContentType || !strings.Contains(w.Body.String(), "agentlab_sandboxes{state=\"READY\"} 3\n") {
		t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
	}
	if w := call(srv, http.MethodPost, "/metrics", "Bearer "+token); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
	if w := call(srv, http.MethodGet, "/", "Bearer "+token); w.Code != http.StatusNotFound {
		t.Errorf("/: %d", w.Code)
	}
	if w := call(s.Server(""), http.MethodGet, "/metrics", "Bearer "); w.Code != http.StatusUnauthorized {
		t.Errorf("without a token: %d", w.Code)
	}
}

func TestReadToken(t *testing.T) {
	for _, c := range []struct {
		text string
		mode os.FileMode
		code agentlab.Code
	}{
		{token, 0o600, ""},
		{token + "\n", 0o400, ""},
		{token, 0o640, agentlab.CodeDenied},
		{token, 0o604, agentlab.CodeDenied},
		{"", 0o600, agentlab.CodeInvalid},
		{token[1:] + "\n", 0o600, agentlab.CodeInvalid},
		{token + "\n" + token, 0o600, agentlab.CodeInvalid},
		{token + " x", 0o600, agentlab.CodeInvalid},
		{strings.Repeat("x", 257), 0o600, agentlab.CodeInvalid},
	} {
		path := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		have, err := ReadToken(path)
		if agentlab.CodeOf(err) != c.code || (err == nil) != (have == token) {
			t.Errorf("%q %o: %q, %v", c.text, c.mode, have, err)
		}
		if err != nil && (strings.Contains(err.Error(), token) || agentlab.HintOf(err) == "") {
			t.Errorf("%v", err)
		}
	}
	if _, err := ReadToken(t.TempDir()); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("a directory: %v", err)
	}
	if _, err := ReadToken("/nonexistent/token"); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("no file: %v", err)
	}
}

// The number of series does not depend on the sandboxes, whatever their names and
// the texts of their events are, and none of these texts is in the metrics.
func TestCardinality(t *testing.T) {
	const canary = "canary9d3f"
	s := New()
	st, err := store.Open(t.Context(), filepath.Join(t.TempDir(), "agentlab.db"), store.Options{OnWrite: s.Written, OnRead: s.Read})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	st.Subscribe(s.Committed)
	s.Start(Config{Sources: Sources{Store: st, Sandboxes: queue{}, Jobs: queue{}, Messages: messages{}, Boots: host{}, VMs: host{}, Workspaces: host{}, ImageUse: host{}.images, Fleet: host{}, State: t.TempDir(), Images: t.TempDir(), Database: "/nonexistent"}})
	seriesOf := func() (n int) {
		for name, f := range scrape(t, s) {
			if strings.HasPrefix(name, "agentlab_") {
				n += len(f.GetMetric())
			}
		}
		return n
	}
	before := seriesOf()
	for i := range 1000 {
		name := fmt.Sprintf("%s-%d", canary, i)
		hostile := fmt.Sprintf("%s\"} 1\nagentlab_%s_%d{x=\"", canary, canary, i)
		data := map[string]any{"to": hostile, "state": hostile, "status": hostile, "start": hostile, "start_seconds": 1, "code": hostile, "action": hostile, "operation": hostile, "failed_operation": hostile, "bytes": hostile, "seconds": hostile}
		var evs []agentlab.Event
		for _, kind := range []string{agentlab.EventSandboxCreated, agentlab.EventSandboxState, agentlab.EventSandboxSnapshot, agentlab.EventJobStatus, agentlab.EventSession, agentlab.EventWorkspaceState, hostile} {
			evs = append(evs, agentlab.NewEvent(kind, data, "%s", hostile))
		}
		sb := agentlab.Sandbox{
			UID: agentlab.NewUID(), Name: name, Backend: "fake", Profile: name, Image: name, State: agentlab.SandboxRequested, Desired: agentlab.DesiredRunning,
			Resources: agentlab.Resources{Cores: 1, MemoryMB: 128}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}, LeaseExpiresAt: time.Now().Add(time.Hour),
		}
		if _, err := st.AllocateSandbox(t.Context(), sb, agentlab.Allocation{First: 1000, Last: 9999}, evs...); err != nil {
			t.Fatal(err)
		}
	}
	if after := seriesOf(); after != before {
		t.Errorf("%d series before and %d after", before, after)
	}
	text, err := s.Text(t.Context())
	if err != nil || strings.Contains(string(text), canary) {
		t.Errorf("%v\n%s", err, text)
	}
	f := scrape(t, s)
	if f.value("agentlab_sandboxes", "REQUESTED") != 1000 || f.value("agentlab_sandboxes_created_total", "") != 1000 || f.value("agentlab_sandbox_memory_bytes", "REQUESTED") != 1000*128<<20 || f.value("agentlab_store_read_seconds", "") < 1 {
		t.Errorf("%s", text)
	}
}
