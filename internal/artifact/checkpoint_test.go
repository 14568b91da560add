package artifact

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// A checkpoint takes no room from the result: neither bytes, nor files, nor
// uploads.
func TestCheckpointIsNotInTheQuota(t *testing.T) {
	f := setup(t, Limits{FileBytes: 10, JobBytes: 10, JobFiles: 1})
	for i := range 2 * putsPerFile {
		f.put(t, job1, agentlab.ArtifactCheckpoint, strings.Repeat("c", 100+i))
		_, err := f.Put(t.Context(), job1, agentlab.ArtifactIncrement, strings.NewReader("too early"))
		wantCode(t, err, agentlab.CodeBusy)
		f.now = f.now.Add(checkpointPause)
	}
	f.put(t, job1, agentlab.ArtifactIncrement, strings.Repeat("i", 100))
	f.put(t, job1, agentlab.ArtifactResult, strings.Repeat("r", 10))
	_, err := f.Put(t.Context(), job1, "second", strings.NewReader(""))
	wantCode(t, err, agentlab.CodeLimit)
	if n := len(f.st.evs); n != 3 {
		t.Errorf("%d events for 3 files", n)
	}
	// The same after a restart, which reads the rows.
	s, err := New(Config{Dir: f.dir, Store: f.st, Limits: f.limits})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	if _, err := s.Put(t.Context(), job1, agentlab.ArtifactResult, strings.NewReader(strings.Repeat("R", 10))); err != nil {
		t.Error(err)
	}
	_, err = s.Put(t.Context(), job1, "second", strings.NewReader(""))
	wantCode(t, err, agentlab.CodeLimit)
}

// A checkpoint is bounded, and one that is too large or interrupted does not
// replace the one before.
func TestCheckpointIsReplacedWhole(t *testing.T) {
	f := setup(t, Limits{CheckpointBytes: 10})
	f.put(t, job1, agentlab.ArtifactCheckpoint, "the first")
	f.now = f.now.Add(time.Minute)
	_, err := f.Put(t.Context(), job1, agentlab.ArtifactCheckpoint, strings.NewReader("one too big"))
	wantCode(t, err, agentlab.CodeLimit)
	f.now = f.now.Add(time.Minute)
	lost := errors.New("the guest is gone")
	if _, err := f.Put(t.Context(), job1, agentlab.ArtifactCheckpoint, io.MultiReader(strings.NewReader("half"), failing{lost})); !errors.Is(err, lost) {
		t.Errorf("got %v", err)
	}
	if got := f.get(t, job1, agentlab.ArtifactCheckpoint); got != "the first" {
		t.Errorf("%q", got)
	}
	if got := f.names(t); len(got) != 1 {
		t.Errorf("files %q", got)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestDropCheckpoint(t *testing.T) {
	f := setup(t, Limits{})
	f.put(t, job1, agentlab.ArtifactCheckpoint, "full")
	f.now = f.now.Add(time.Minute)
	f.put(t, job1, agentlab.ArtifactIncrement, "increment")
	f.put(t, job1, agentlab.ArtifactResult, "result")
	for range 2 {
		if err := f.DropCheckpoint(t.Context(), job1); err != nil {
			t.Fatal(err)
		}
	}
	if got := f.names(t); !slices.Equal(got, []string{"artifacts/" + job1 + "/result.bundle"}) {
		t.Errorf("files %q", got)
	}
	if list, _ := f.List(t.Context(), job1); len(list) != 1 {
		t.Errorf("rows %+v", list)
	}
	f.put(t, job1, agentlab.ArtifactCheckpoint, "again") // of a job that continues
}

// The times of the parts of a checkpoint have the order in which they were stored,
// also if the clock is set back.
func TestCheckpointAfterTheClockWasSetBack(t *testing.T) {
	f := setup(t, Limits{})
	var last time.Time
	for i, p := range []string{agentlab.ArtifactCheckpoint, agentlab.ArtifactIncrement, agentlab.ArtifactIncrement, agentlab.ArtifactCheckpoint} {
		a := f.put(t, job1, p, strings.Repeat("c", i))
		if i != 2 && !a.CreatedAt.After(last) { // it replaces the one before
			t.Errorf("%d: %s is stored at %s, after %s", i, p, a.CreatedAt, last)
		}
		last = a.CreatedAt
		f.now = f.now.Add(-time.Hour)
	}
	if n, err := f.Sweep(t.Context(), func(context.Context, string) (bool, error) { return true, nil }); n != 0 || err != nil {
		t.Errorf("sweep: %d, %v", n, err)
	}
	if a, err := f.st.Artifact(t.Context(), job1, agentlab.ArtifactCheckpoint); err != nil || !a.CreatedAt.Equal(last) {
		t.Errorf("%+v, %v", a, err)
	}
}
