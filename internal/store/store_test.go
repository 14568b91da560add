package store

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// fakeClock is set by hand.
type fakeClock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *fakeClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *fakeClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

var epoch = time.Date(2026, 3, 4, 5, 6, 7, 80, time.UTC)

type testStore struct {
	*Store
	clock *fakeClock
	path  string

	mu   sync.Mutex
	seen []agentlab.Event  // what a subscriber got
	done []agentlab.Commit // the same, with the rest
}

func newStore(t testing.TB) *testStore {
	t.Helper()
	ts := &testStore{clock: &fakeClock{t: epoch}, path: filepath.Join(t.TempDir(), "agentlab.db")}
	s, err := Open(context.Background(), ts.path, Options{Clock: ts.clock.now})
	if err != nil {
		t.Fatal(err)
	}
	s.Subscribe(func(c agentlab.Commit) {
		ts.mu.Lock()
		defer ts.mu.Unlock()
		ts.seen = append(ts.seen, c.Events...)
		ts.done = append(ts.done, c)
	})
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	ts.Store = s
	return ts
}

func newSandbox(name string) agentlab.Sandbox {
	return agentlab.Sandbox{
		UID: agentlab.NewUID(), Name: name, Backend: "fake", Profile: "p", Image: "base@sha256:1",
		State: agentlab.SandboxRequested, Desired: agentlab.DesiredRunning,
		Resources: agentlab.Resources{Cores: 2, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT}, NetworkPending: true,
		LeaseExpiresAt: epoch.Add(time.Hour),
	}
}

func newJob() agentlab.Job {
	return agentlab.Job{ID: agentlab.NewJobID(), Task: "true", Agent: "shell", Profile: "p", Mode: "dangerous", TTL: time.Hour, Status: agentlab.JobQueued}
}

// must returns v and ends the test on an error.
func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func wantCode(t testing.TB, err error, code agentlab.Code) {
	t.Helper()
	if agentlab.CodeOf(err) != code {
		t.Errorf("got %v (code %q), want code %q", err, agentlab.CodeOf(err), code)
	}
}

func TestOpenMakesAPrivateFileWithTheSettings(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	for _, suffix := range []string{"", "-wal", "-shm"} {
		st, err := os.Stat(s.path + suffix)
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%q: %v, %v", suffix, st.Mode(), err)
		}
	}
	for name, want := range map[string]string{"journal_mode": "wal", "foreign_keys": "1", "synchronous": "2", "busy_timeout": "10000", "application_id": fmt.Sprint(applicationID), "trusted_schema": "0"} {
		for i, db := range []querier{s.w, s.r} {
			var got string
			if err := db.QueryRowContext(ctx, "PRAGMA "+name).Scan(&got); err != nil || got != want {
				t.Errorf("connection %d: %s = %s, %v; want %s", i, name, got, err, want)
			}
		}
	}
	if _, err := s.r.ExecContext(ctx, "DELETE FROM events"); err == nil {
		t.Error("a reading connection wrote")
	}
}

func TestOddPaths(t *testing.T) {
	for _, name := range []string{"a b", "q?x=1", "h#sh", "p%20c", "ünï", "amp&a=b", "quote'\""} {
		dir := filepath.Join(t.TempDir(), name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		s, err := Open(t.Context(), filepath.Join(dir, "agentlab.db"), Options{})
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		left, _ := os.ReadDir(dir)
		if len(left) != 1 || left[0].Name() != "agentlab.db" {
			t.Errorf("%q: the directory holds %v", name, left)
		}
	}
}

func TestSandboxRoundTrip(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	in := newSandbox("alpha")
	in.Reason, in.Keepalive, in.JobID, in.IP = "why", true, "job-x", "10.77.0.2"
	in.Resources.RootSizeGB = 20
	in.LeaseExpiresAt = time.Now().Add(time.Hour) // local zone and monotonic clock, to be normalised
	made := must(s.AllocateSandbox(ctx, in, agentlab.Allocation{First: 1000, Last: 2000}, agentlab.Event{Kind: agentlab.EventSandboxCreated, Message: "made"}))(t)
	if made.VMID != 1000 || made.CreatedAt != epoch || made.UpdatedAt != epoch {
		t.Errorf("made %+v", made)
	}
	got := must(s.Sandbox(ctx, 1000))(t)
	if !got.Equal(made) {
		t.Errorf("read  %+v\nmade %+v", got, made)
	}
	s.clock.advance(time.Second)
	updated := must(s.UpdateSandbox(ctx, 1000, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		sb.State, sb.BootedAt = agentlab.SandboxProvisioning, s.clock.now()
		return []agentlab.Event{{Kind: agentlab.EventSandboxState, Message: "PROVISIONING"}}, nil
	}))(t)
	if updated.UpdatedAt != epoch.Add(time.Second) || !updated.Equal(must(s.Sandbox(ctx, 1000))(t)) {
		t.Errorf("updated %+v", updated)
	}
	evs := must(s.Events(ctx, agentlab.EventFilter{SandboxVMID: 1000}))(t)
	if len(evs) != 2 || evs[0].Message != "made" || evs[1].Time != epoch.Add(time.Second) || !reflect.DeepEqual(evs, s.seen) {
		t.Errorf("events %+v\nseen %+v", evs, s.seen)
	}
}

func TestJobRoundTrip(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	code := 3
	j := newJob()
	j.RepoURL, j.Ref, j.Depth, j.Image, j.Keepalive, j.Phase, j.Reason = "https://x/y", "main", 1, "base", true, "clone", "r"
	j.ExitCode, j.SandboxVMID, j.StopRequested = &code, 7, "TIMEOUT"
	j.Result = agentlab.JobResult{BaseCommit: "a", HeadCommit: "b", Branch: "c", Commits: 2, Pushed: true, Dirty: true, Uncommitted: 3}
	j.StartedAt, j.DeadlineAt, j.FinishedAt = epoch.Add(1), epoch.Add(2), epoch.Add(3)
	if err := s.CreateJob(ctx, j, nil, agentlab.Event{Kind: agentlab.EventJobCreated}); err != nil {
		t.Fatal(err)
	}
	j.CreatedAt, j.UpdatedAt = epoch, epoch
	if got := must(s.Job(ctx, j.ID))(t); !reflect.DeepEqual(got, j) {
		t.Errorf("read %+v\nwant %+v", got, j)
	}
	wantCode(t, s.CreateJob(ctx, j, nil), agentlab.CodeExists)

	got := must(s.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		*j.ExitCode = 4 // through the pointer: must count as a change
		return nil, nil
	}))(t)
	if again := must(s.Job(ctx, j.ID))(t); *again.ExitCode != 4 || !reflect.DeepEqual(got, again) {
		t.Errorf("exit code %d", *again.ExitCode)
	}
	if evs := must(s.Events(ctx, agentlab.EventFilter{JobIDs: []string{j.ID}}))(t); len(evs) != 1 || evs[0].JobID != j.ID {
		t.Errorf("events %+v", evs)
	}
}

func TestUpdateRefuses(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb := must(s.AllocateSandbox(ctx, newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 9}))(t)
	j := newJob()
	if err := s.CreateJob(ctx, j, nil); err != nil {
		t.Fatal(err)
	}
	stop := agentlab.Errorf(agentlab.CodeBusy, "mine")
	for _, tc := range []struct {
		name string
		code agentlab.Code
		fn   func(*agentlab.Sandbox) ([]agentlab.Event, error)
	}{
		{"transition", agentlab.CodeConflict, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
			sb.State = agentlab.SandboxReady
			return []agentlab.Event{{Kind: "x"}}, nil
		}},
		{"unknown state", agentlab.CodeConflict, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) { sb.State = "ODD"; return nil, nil }},
		{"own error", agentlab.CodeBusy, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) { sb.Reason = "x"; return nil, stop }},
		{"vmid", agentlab.CodeInternal, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) { sb.VMID++; return nil, nil }},
		{"uid", agentlab.CodeInternal, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) { sb.UID = "x"; return nil, nil }},
		{"no lease", agentlab.CodeInvalid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
			sb.LeaseExpiresAt = time.Time{}
			return nil, nil
		}},
		{"bad event", agentlab.CodeInvalid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
			sb.Reason = "x"
			return []agentlab.Event{{Kind: "x", Data: "[1]"}}, nil
		}},
		{"year", agentlab.CodeInternal, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
			sb.LeaseExpiresAt = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)
			return nil, nil
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := s.UpdateSandbox(ctx, sb.VMID, tc.fn)
			wantCode(t, err, tc.code)
			if got := must(s.Sandbox(ctx, sb.VMID))(t); !got.Equal(sb) {
				t.Errorf("it changed: %+v", got)
			}
		})
	}
	_, err := s.UpdateJob(ctx, j.ID, func(j *agentlab.Job) ([]agentlab.Event, error) { j.Status = agentlab.JobCompleted; return nil, nil })
	wantCode(t, err, agentlab.CodeConflict)
	_, err = s.UpdateSandbox(ctx, 77, func(*agentlab.Sandbox) ([]agentlab.Event, error) { return nil, nil })
	wantCode(t, err, agentlab.CodeNotFound)
	_, err = s.UpdateJob(ctx, "job-aaaaaaaaaaaaa", func(*agentlab.Job) ([]agentlab.Event, error) { return nil, nil })
	wantCode(t, err, agentlab.CodeNotFound)
	if len(s.seen) != 0 || len(must(s.Events(ctx, agentlab.EventFilter{}))(t)) != 0 {
		t.Errorf("events of rolled back changes: %v", s.seen)
	}
	wantCode(t, s.DeleteSandbox(ctx, sb.VMID), agentlab.CodeConflict)
	wantCode(t, s.DeleteJob(ctx, j.ID), agentlab.CodeConflict)
}

func TestUpdateWithoutChangeWritesNothing(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb := must(s.AllocateSandbox(ctx, newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 9}))(t)
	s.clock.advance(time.Minute)
	got := must(s.UpdateSandbox(ctx, sb.VMID, func(*agentlab.Sandbox) ([]agentlab.Event, error) { return nil, nil }))(t)
	if !got.Equal(sb) {
		t.Errorf("got %+v, want %+v", got, sb)
	}
}

func TestPanicInUpdateReleasesTheTurn(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb := must(s.AllocateSandbox(ctx, newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 9}))(t)
	func() {
		defer func() { _ = recover() }()
		_, _ = s.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) { panic("bug") })
	}()
	if err := s.AppendEvents(ctx, agentlab.Event{Kind: "x"}); err != nil {
		t.Fatal(err)
	}
}

func TestCancelledContextWritesNothing(t *testing.T) {
	s := newStore(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.AllocateSandbox(ctx, newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 9})
	wantCode(t, err, agentlab.CodeUnavailable)
	if n := must(s.CountSandboxes(t.Context()))(t); len(n) != 0 {
		t.Errorf("%v", n)
	}
}
