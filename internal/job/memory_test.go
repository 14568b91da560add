package job

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
)

// killsStore has one job, and keeps the messages of events.
type killsStore struct {
	noStore
	job      agentlab.Job
	messages []string
}

func (s *killsStore) UpdateJob(_ context.Context, _ string, fn func(*agentlab.Job) ([]agentlab.Event, error)) (agentlab.Job, error) {
	evs, err := fn(&s.job)
	for _, e := range evs {
		s.messages = append(s.messages, e.Message)
	}
	return s.job, err
}

// Processes that were killed make events, not too many, and none is left out of the
// total. The number never falls, whatever the guest says.
func TestMemoryKills(t *testing.T) {
	now := time.Unix(1000, 0)
	st := &killsStore{job: agentlab.Job{ID: "job-x", Status: agentlab.JobRunning, Phase: "agent"}}
	s := New(Config{Store: st, Clock: func() time.Time { return now }})
	tell := func(nested, other int) {
		t.Helper()
		r := guestapi.Report{Status: "RUNNING", Phase: "agent", Kills: &guestapi.MemoryKills{Nested: nested, Other: other}}
		if err := guestcheck.Report(&r); err != nil {
			t.Fatal(err)
		}
		if _, err := s.record(t.Context(), st.job, r); err != nil {
			t.Fatal(err)
		}
	}
	tell(0, 0)
	tell(1, 0)
	tell(1, 2) // too soon
	now = now.Add(killsPause)
	tell(1, 2)
	tell(0, 1)
	now = now.Add(killsPause)
	tell(1, 1)
	tell(1, 2)
	const begin = "job job-x: the kernel of the sandbox has killed "
	want := []string{
		begin + "1 process of nested guests: the memory that these may have was used up",
		begin + "3 processes, 1 of them of nested guests: the memory was used up",
	}
	if !slices.Equal(st.messages, want) || st.job.MemoryKills != 3 {
		t.Errorf("%d kills, events\n%s", st.job.MemoryKills, strings.Join(st.messages, "\n"))
	}
	for n := range 1000 { // a hostile guest
		now = now.Add(10 * time.Millisecond)
		tell(0, n)
	}
	if len(st.messages) != len(want)+1 {
		t.Errorf("%d events", len(st.messages))
	}
}
