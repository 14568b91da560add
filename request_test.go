package agentlab

import (
	"testing"
	"time"
)

func TestEventFilterMatch(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	e := Event{ID: 7, Time: at, Kind: EventJobStatus, SandboxVMID: 1000, JobID: "job-a"}
	for name, test := range map[string]struct {
		f    EventFilter
		want bool
	}{
		"everything":       {EventFilter{}, true},
		"limit and tail":   {EventFilter{Limit: 1, Tail: true}, true},
		"earlier id":       {EventFilter{AfterID: 6}, true},
		"same id":          {EventFilter{AfterID: 7}, false},
		"kind":             {EventFilter{Kinds: []string{EventJobPhase, EventJobStatus}}, true},
		"other kind":       {EventFilter{Kinds: []string{EventJobPhase}}, false},
		"sandbox":          {EventFilter{SandboxVMID: 1000}, true},
		"other sandbox":    {EventFilter{SandboxVMID: 1001}, false},
		"job":              {EventFilter{JobIDs: []string{"job-a"}}, true},
		"other job":        {EventFilter{JobIDs: []string{"job-b"}}, false},
		"from it":          {EventFilter{From: 7}, true},
		"from a later one": {EventFilter{From: 8}, false},
		"all together":     {EventFilter{AfterID: 1, Kinds: []string{EventJobStatus}, SandboxVMID: 1000, JobIDs: []string{"job-a"}, From: 7}, true},
		"all but the job":  {EventFilter{AfterID: 1, Kinds: []string{EventJobStatus}, SandboxVMID: 1000, JobIDs: []string{"job-b"}, From: 7}, false},
	} {
		if got := test.f.Match(e); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestNewEvent(t *testing.T) {
	e := NewEvent(EventDaemon, map[string]any{"n": 1}, "%d of %s", 1, "two").About(5, "job-a")
	if want := (Event{Kind: EventDaemon, Message: "1 of two", Data: `{"n":1}`, SandboxVMID: 5, JobID: "job-a"}); e != want {
		t.Errorf("%+v", e)
	}
	if e := NewEvent(EventDaemon, nil, "100%%"); e.Data != "" || e.Message != "100%" {
		t.Errorf("%+v", e)
	}
}
