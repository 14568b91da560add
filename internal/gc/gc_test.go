package gc_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/gc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const day = 24 * time.Hour

// state is a store and its files, in memory: what is deleted, and in which
// order, is what these tests are about. The real ones are in package job's.
type state struct {
	mu     sync.Mutex     // of jobs, for the test with a loop
	jobs   []agentlab.Job // the newest first
	open   []agentlab.Job // that have not ended
	files  map[string]bool
	done   []string // what was deleted, in order
	events []agentlab.Event
	fail   map[string]error // by what is deleted

	sandboxes []agentlab.Sandbox
}

func (s *state) Jobs(_ context.Context, f agentlab.JobFilter) ([]agentlab.Job, error) {
	if slices.Equal(f.Statuses, []agentlab.JobStatus{agentlab.JobQueued, agentlab.JobRunning}) {
		return s.open, nil
	}
	if slices.Contains(f.Statuses, agentlab.JobQueued) || slices.Contains(f.Statuses, agentlab.JobRunning) || len(f.Statuses) != len(agentlab.JobStatuses)-2 {
		return nil, fmt.Errorf("asked for jobs that are %v", f.Statuses)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	from := 0
	if f.Before != (agentlab.JobKey{}) {
		from = slices.IndexFunc(s.jobs, func(j agentlab.Job) bool { return j.ID == f.Before.ID }) + 1
		if from == 0 {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "the cursor names no job")
		}
	}
	return slices.Clone(s.jobs[from:min(from+f.Limit, len(s.jobs))]), nil
}

func (s *state) Sandboxes(context.Context, agentlab.SandboxFilter) ([]agentlab.Sandbox, error) {
	return s.sandboxes, s.fail["sandboxes"]
}

func (s *state) Known(context.Context, string) (bool, error) { return true, nil }

func (s *state) Artifacts(_ context.Context, id string) ([]agentlab.Artifact, error) {
	if s.files[id] {
		second := "b"
		if id == "job-31" { // it has no result
			second = agentlab.ArtifactIncrement
		}
		return []agentlab.Artifact{{JobID: id, Path: "a", Size: 5}, {JobID: id, Path: second, Size: 7}}, nil
	}
	return nil, nil
}

func (s *state) delete(what string) error {
	if err := s.fail[what]; err != nil {
		return err
	}
	s.done = append(s.done, what)
	return nil
}

func (s *state) DeleteJob(_ context.Context, id string) error {
	if err := s.delete("job " + id); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.jobs = slices.DeleteFunc(s.jobs, func(j agentlab.Job) bool { return j.ID == id })
	return nil
}

func (s *state) Delete(_ context.Context, id string) error {
	if err := s.delete("files " + id); err != nil {
		return err
	}
	delete(s.files, id)
	return nil
}

func (s *state) DeleteOutputs(ctx context.Context, id string) ([]agentlab.Artifact, error) {
	rows, _ := s.Artifacts(ctx, id)
	return rows[min(1, len(rows)):], s.delete("outputs " + id)
}

func (s *state) DeleteSandbox(context.Context, int) error { return nil }
func (s *state) DeleteExpiredTokens(context.Context, time.Time) (int, error) {
	return 0, s.fail["tokens"]
}
func (s *state) DeleteEventsBefore(context.Context, time.Time) (int, error)   { return 0, nil }
func (s *state) DeleteMessagesBefore(context.Context, time.Time) (int, error) { return 0, nil }
func (s *state) DeleteEgressBefore(context.Context, time.Time) (int, error)   { return 0, nil }
func (s *state) AppendEvents(_ context.Context, evs ...agentlab.Event) error {
	s.events = append(s.events, evs...)
	return nil
}

func (s *state) Sweep(context.Context, func(context.Context, string) (bool, error)) (int, error) {
	s.done = append(s.done, "sweep")
	return 1, s.fail["sweep"]
}

// installation is a state directory that does not match, when err is set.
type installation struct{ err error }

func (i installation) Check(context.Context) error { return i.err }

// All sweepers run, also after one that fails. None runs in a state directory
// of another database.
func TestSweepers(t *testing.T) {
	failed, foreign := errors.New("failed"), errors.New("foreign")
	bad, good := &state{fail: map[string]error{"sweep": failed}}, &state{}
	sweep := func(err error) (gc.Deleted, error) {
		return gc.New(gc.Config{Store: good, Files: good, Jobs: good, Sweepers: []gc.Sweeper{bad, good}, Installation: installation{err}}).Pass(t.Context())
	}
	if d, err := sweep(foreign); !errors.Is(err, foreign) || d.Files != 0 || len(bad.done)+len(good.done) != 0 {
		t.Errorf("foreign: %+v, %v, %q, %q", d, err, bad.done, good.done)
	}
	if d, err := sweep(nil); !errors.Is(err, failed) || d.Files != 2 || len(bad.done) != 1 || len(good.done) != 1 {
		t.Errorf("%+v, %v, %q, %q", d, err, bad.done, good.done)
	}
}

var now = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func (s *state) collector() *gc.Collector {
	return gc.New(gc.Config{Store: s, Files: s, Jobs: s, Clock: func() time.Time { return now }})
}

// withJobs makes n jobs, each a day older than the one before it.
func withJobs(n int) *state {
	s := &state{files: map[string]bool{}, fail: map[string]error{}}
	for i := range n {
		id := fmt.Sprintf("job-%d", i)
		s.jobs = append(s.jobs, agentlab.Job{ID: id, Status: agentlab.JobCompleted, FinishedAt: now.Add(-time.Duration(i) * day)})
		s.files[id] = true
	}
	return s
}

func TestAges(t *testing.T) {
	s := withJobs(1000) // more than a page
	d, err := s.collector().Pass(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d.Artifacts != 970 || d.Jobs != 910 || len(s.jobs) != 90 || len(s.files) != 30 {
		t.Errorf("deleted %+v; left %d jobs, %d with files", d, len(s.jobs), len(s.files))
	}
	if i, j := slices.Index(s.done, "files job-500"), slices.Index(s.done, "job job-500"); i < 0 || j < i {
		t.Errorf("files at %d, row at %d: the files go first", i, j)
	}
	if n := len(s.events); n != 971 || !strings.Contains(s.events[0].Message, "deleted 2 artifacts of job job-30, 12 bytes") {
		t.Errorf("%d events, the first %q", n, s.events[0].Message)
	}
	for i, want := range []bool{false, true} {
		if m := s.events[i].Message; strings.HasSuffix(m, "the job has no result, and its checkpoint was among them") != want {
			t.Errorf("event %d: %q", i, m)
		}
	}
}

// A job bundle can be kept longer than the other artifacts of its job.
func TestKeepsJobBundles(t *testing.T) {
	s := withJobs(100)
	c := gc.New(gc.Config{Store: s, Files: s, Jobs: s, Bundles: 60 * day, Clock: func() time.Time { return now }})
	d, err := c.Pass(t.Context())
	if err != nil || d.Artifacts != 70 || d.Jobs != 10 || len(s.files) != 60 {
		t.Errorf("%+v, %v; %d jobs with files", d, err, len(s.files))
	}
	if i := slices.Index(s.done, "outputs job-30"); i < 0 || slices.Contains(s.done, "files job-30") || slices.Contains(s.done, "outputs job-29") || !slices.Contains(s.done, "files job-60") {
		t.Errorf("did %q", s.done)
	}
	if m := s.events[0].Message; m != "deleted 1 artifacts of job job-30, 7 bytes, by retention; its bundle is kept" {
		t.Errorf("event %q", m)
	}
	n := len(s.done)
	if d, err = c.Pass(t.Context()); err != nil || d != (gc.Deleted{}) || len(s.done) != n {
		t.Errorf("a pass with nothing to do: %+v, %v", d, err)
	}
}

// The row of a job stays as long as its sandbox; its files do not. If the
// sandboxes are not known, no row is deleted.
func TestKeepsTheJobOfASandbox(t *testing.T) {
	s := withJobs(100)
	s.sandboxes = []agentlab.Sandbox{{JobID: "job-95"}, {}}
	s.fail["sandboxes"] = errors.New("no")
	if d, err := s.collector().Pass(t.Context()); err == nil || d.Jobs != 0 || len(s.jobs) != 100 {
		t.Errorf("%+v, %v", d, err)
	}
	clear(s.fail)
	d, err := s.collector().Pass(t.Context())
	if err != nil || d.Jobs != 9 || d.Artifacts != 70 || len(s.jobs) != 91 || s.jobs[90].ID != "job-95" {
		t.Errorf("%+v, %v; left %d jobs", d, err, len(s.jobs))
	}
	s.sandboxes = nil
	if d, err := s.collector().Pass(t.Context()); err != nil || d.Jobs != 1 || len(s.jobs) != 90 {
		t.Errorf("%+v, %v; left %d jobs", d, err, len(s.jobs))
	}
}

// The files and the row of an attempt stay until its job has ended.
func TestKeepsTheAttemptsOfAJob(t *testing.T) {
	s := withJobs(100)
	s.jobs[95].ParentID = "job-open"
	s.open = []agentlab.Job{{ID: "job-open"}}
	if d, err := s.collector().Pass(t.Context()); err != nil || d.Jobs != 9 || d.Artifacts != 69 || !s.files["job-95"] {
		t.Errorf("%+v, %v", d, err)
	}
	s.open = nil
	if d, err := s.collector().Pass(t.Context()); err != nil || d.Jobs != 1 || d.Artifacts != 1 {
		t.Errorf("%+v, %v", d, err)
	}
}

// What fails is left for the next pass, whole, and keeps nothing else.
func TestFailures(t *testing.T) {
	s := withJobs(100)
	c := s.collector()
	broken := errors.New("broken disk")
	s.fail["files job-95"], s.fail["job job-96"], s.fail["tokens"] = broken, broken, broken
	d, err := c.Pass(t.Context())
	if !errors.Is(err, broken) || d.Jobs != 8 {
		t.Errorf("%+v, %v", d, err)
	}
	left := func(id string) bool {
		return slices.ContainsFunc(s.jobs, func(j agentlab.Job) bool { return j.ID == id })
	}
	if !left("job-95") || !s.files["job-95"] || !left("job-96") || left("job-97") {
		t.Error("the wrong ones are left")
	}
	clear(s.fail)
	if d, err = c.Pass(t.Context()); err != nil || d.Jobs != 2 || left("job-95") || left("job-96") {
		t.Errorf("the next pass: %+v, %v", d, err)
	}
	before := len(s.events) + len(s.done)
	if d, err = c.Pass(t.Context()); err != nil || d != (gc.Deleted{}) || len(s.events)+len(s.done) != before {
		t.Errorf("a pass with nothing to do: %+v, %v", d, err)
	}
}

func TestRunPassesEveryHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := withJobs(0)
		s.fail["tokens"] = errors.New("no") // a pass that fails does not end the loop
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.collector().Run(ctx) }()
		time.Sleep(90 * time.Minute)
		synctest.Wait()
		s.mu.Lock()
		s.jobs = withJobs(200).jobs
		s.mu.Unlock()
		time.Sleep(time.Hour)
		synctest.Wait()
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.jobs) != 90 {
			t.Errorf("%d jobs are left", len(s.jobs))
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// hold is a clock that is wrong now.
type hold struct {
	t   *testing.T
	err error
}

func (h *hold) Hold(at time.Time) error {
	if !at.Equal(now) {
		h.t.Errorf("asked about %s", at)
	}
	return h.err
}

// While the clock may not be relied upon, nothing is deleted for its age.
func TestHold(t *testing.T) {
	s := withJobs(100)
	held := errors.New("the clock jumped")
	clock := &hold{t, held}
	c := gc.New(gc.Config{Store: s, Files: s, Jobs: s, Clock: func() time.Time { return now }, Time: clock})
	if d, err := c.Pass(t.Context()); !errors.Is(err, held) || d != (gc.Deleted{}) || len(s.jobs) != 100 || len(s.files) != 100 {
		t.Errorf("%+v, %v; left %d jobs, %d with files", d, err, len(s.jobs), len(s.files))
	}
	clock.err = nil
	if d, err := c.Pass(t.Context()); err != nil || d.Artifacts != 70 {
		t.Errorf("%+v, %v", d, err)
	}
}

// expiry records until when snapshots expire.
type expiry struct{ before time.Time }

func (e *expiry) ExpireSnapshots(_ context.Context, before time.Time) (int, error) {
	e.before = before
	return 2, nil
}

func (e *expiry) ExpireTrash(ctx context.Context, before time.Time) (int, error) {
	return e.ExpireSnapshots(ctx, before)
}

func TestTrashExpires(t *testing.T) {
	const day = 24 * time.Hour
	for _, tc := range []struct{ age, want time.Duration }{{0, 14 * day}, {3 * day, 3 * day}} {
		s, e := withJobs(0), &expiry{}
		d, err := gc.New(gc.Config{Store: s, Files: s, Jobs: s, Workspaces: e, Trash: tc.age, Clock: func() time.Time { return now }}).Pass(t.Context())
		if err != nil || d.Workspaces != 2 || !e.before.Equal(now.Add(-tc.want)) {
			t.Errorf("%+v, %v: deleted before %s", d, err, e.before)
		}
	}
}

func TestSnapshotsExpire(t *testing.T) {
	const day = 24 * time.Hour
	for _, tc := range []struct{ age, want time.Duration }{{0, 30 * day}, {7 * day, 7 * day}} {
		s, e := withJobs(0), &expiry{}
		d, err := gc.New(gc.Config{Store: s, Files: s, Jobs: s, Snapshots: e, SnapshotAge: tc.age, Clock: func() time.Time { return now }}).Pass(t.Context())
		if err != nil || d.Snapshots != 2 || !e.before.Equal(now.Add(-tc.want)) {
			t.Errorf("%+v, %v: snapshots before %s", d, err, e.before)
		}
	}
}
