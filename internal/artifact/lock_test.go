package artifact

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// slowStore is a store whose rows are read slowly.
type slowStore struct {
	*memStore
	reading chan struct{} // gets a value when rows are read
	answer  chan error
}

func (s slowStore) Artifacts(ctx context.Context, jobID string) ([]agentlab.Artifact, error) {
	s.reading <- struct{}{}
	if err := <-s.answer; err != nil {
		return nil, err
	}
	return s.memStore.Artifacts(ctx, jobID)
}

// wakeLog is called after a commit: it does not wait for an upload that reads
// rows. An upload whose rows could not be read does not stop the next one.
func TestCommitsDoNotWaitForRows(t *testing.T) {
	st := slowStore{&memStore{rows: map[string]agentlab.Artifact{}}, make(chan struct{}), make(chan error)}
	s, err := New(Config{Dir: t.TempDir(), Store: st})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	failure := errors.New("no rows")
	for _, want := range []error{failure, nil} {
		put := make(chan error)
		go func() {
			_, err := s.Put(t.Context(), job1, "a", strings.NewReader("x"))
			put <- err
		}()
		<-st.reading
		woken := make(chan struct{})
		go func() {
			s.wakeLog(job1)
			close(woken)
		}()
		select {
		case <-woken:
		case <-time.After(guard.Patience):
			t.Error("wakeLog waits for the rows")
		}
		st.answer <- want
		if err := <-put; !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
		<-woken
	}
	if len(s.jobs) != 0 {
		t.Errorf("%d jobs are left", len(s.jobs))
	}
}
