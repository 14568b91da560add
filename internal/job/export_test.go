package job

import (
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
)

var Unshipped = unshipped

// CheckVerdict checks what must hold for every report that is not refused.
func CheckVerdict(t *testing.T, r guestapi.Report) {
	if guestcheck.Report(&r) != nil {
		return
	}
	if len(r.Message) > agentlab.MaxReasonBytes+4 || strings.ContainsFunc(r.Message, unicode.IsControl) {
		t.Fatalf("message %q", r.Message)
	}
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s := New(Config{Store: noStore{}, Clock: func() time.Time { return now }})
	for _, j := range []agentlab.Job{
		{Status: agentlab.JobRunning, DeadlineAt: now.Add(time.Hour)},
		{Status: agentlab.JobRunning, DeadlineAt: now.Add(-time.Hour)},
		{Status: agentlab.JobRunning, DeadlineAt: now.Add(time.Hour), StopRequested: "CANCELLED"},
		{Status: agentlab.JobRunning, DeadlineAt: now.Add(-time.Hour), StopRequested: "TIMEOUT"},
		{Status: agentlab.JobRunning, DeadlineAt: now.Add(50 * time.Second), TTL: time.Minute},
		{Status: agentlab.JobRunning, DeadlineAt: now.Add(-time.Second), TTL: time.Minute},
		{Status: agentlab.JobRunning, DeadlineAt: now.Add(time.Hour), StopRequested: "FAILED", Reason: "its model is denied"},
	} {
		if r.Status == "RUNNING" {
			continue
		}
		status, reason := s.finalStatus(j, r)
		switch {
		case !status.Final():
			t.Fatalf("a final report makes it %s", status)
		case status == agentlab.JobCompleted && r.ExitCode != nil && *r.ExitCode != 0:
			t.Fatal("success of a failure")
		case status == agentlab.JobCancelled && j.StopRequested != "CANCELLED":
			t.Fatal("cancelled unasked")
		case status == agentlab.JobTimeout && j.StopRequested != "TIMEOUT" && j.DeadlineAt.After(now.Add(deadlineSlack(j))):
			t.Fatal("timeout before the time")
		case r.Status == "FAILED" && status != agentlab.JobFailed:
			t.Fatalf("a failure became %s", status)
		case status != agentlab.JobCompleted && reason == "":
			t.Fatalf("%s without a reason", status)
		}
	}
}

// CheckDaemonPause checks that the silence of runners restarts after a long pause
// of the process, and only then.
func CheckDaemonPause(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s := New(Config{Store: noStore{}, Clock: func() time.Time { return now }})
	lastHeard := func() time.Time { return s.track("job").lastHeard }
	begin := lastHeard()
	now = now.Add(time.Hour)
	if s.noteActive(); lastHeard() != begin {
		t.Error("before Run nothing is known of the past")
	}
	s.lastActive = now
	for range 10 {
		now = now.Add(10 * time.Second)
		s.noteActive()
	}
	if lastHeard() != begin {
		t.Error("a process at work forgave a silence")
	}
	now = now.Add(2 * time.Minute)
	if s.noteActive(); lastHeard() != now {
		t.Errorf("heard %s ago", now.Sub(lastHeard()))
	}
}

// noStore is the store of a service that does not run.
type noStore struct{ Store }

func (noStore) Subscribe(func(agentlab.Commit)) {}
