package job

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
)

// eventStore keeps the messages of events.
type eventStore struct {
	noStore
	messages []string
}

func (s *eventStore) AppendEvents(_ context.Context, evs ...agentlab.Event) error {
	for _, e := range evs {
		s.messages = append(s.messages, e.Message)
	}
	return nil
}

// The progress of a clone makes events, not too many and only forwards,
// whatever the guest says.
func TestCloneProgress(t *testing.T) {
	now := time.Unix(1000, 0)
	st := &eventStore{}
	s := New(Config{Store: st, Clock: func() time.Time { return now }})
	j := agentlab.Job{ID: "job-x", Status: agentlab.JobRunning, Phase: "clone"}
	tell := func(step string, percent int) {
		t.Helper()
		r := guestapi.Report{Status: "RUNNING", Phase: "clone", Progress: &guestapi.Progress{Step: step, Percent: percent}}
		if err := guestcheck.Report(&r); err != nil {
			t.Fatal(err)
		}
		if _, err := s.record(t.Context(), j, r); err != nil {
			t.Fatal(err)
		}
	}
	tell(guestapi.StepDownload, 10)
	tell(guestapi.StepDownload, 11) // too soon
	now = now.Add(5 * time.Second)
	tell(guestapi.StepDownload, 60)
	now = now.Add(time.Hour)
	tell(guestapi.StepDownload, 60) // the same
	tell(guestapi.StepDownload, 5)  // backwards
	tell(guestapi.StepReceive, 0)
	want := "job job-x: clone: fetching the repository, 10%\njob job-x: clone: fetching the repository, 60%\njob job-x: clone: receiving objects, 0%"
	if got := strings.Join(st.messages, "\n"); got != want {
		t.Errorf("events are\n%s\nwant\n%s", got, want)
	}
	for range 3 { // a hostile guest that goes on and on
		for _, step := range guestcheck.Steps {
			for percent := range 101 {
				now = now.Add(time.Minute)
				tell(step, percent)
			}
		}
	}
	if len(st.messages) > 404 {
		t.Errorf("%d events", len(st.messages))
	}
	before := len(st.messages)
	j.Phase, now = "agent", now.Add(time.Hour)
	tell(guestapi.StepCheckout, 100)
	if len(st.messages) != before {
		t.Error("there is progress of a clone after it")
	}
	for _, bad := range []guestapi.Progress{{Step: "x; rm -rf", Percent: 1}, {Step: guestapi.StepReceive, Percent: -1}, {Step: guestapi.StepReceive, Percent: 101}, {}} {
		r := guestapi.Report{Status: "RUNNING", Phase: "clone", Progress: &bad}
		if guestcheck.Report(&r) == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
}
