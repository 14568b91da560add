package jobcmd

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

func TestShowReportsWhyAJobWaits(t *testing.T) {
	var out bytes.Buffer
	a := &cli.App{Stdout: &out}
	if err := showJob(a, api.Job{ID: "job-x", Status: "QUEUED", Phase: "waiting", Waiting: "waits: the storage is damaged (repair it)"}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "Waiting:") || !strings.Contains(out.String(), "the storage is damaged (repair it)") {
		t.Errorf("%s", out.String())
	}
}

// A wait with a limit ends soon after it, whatever happens to the sandbox of the job.
func TestWaitForTheEndOfTheSandbox(t *testing.T) {
	for _, c := range []struct{ limit, took, want time.Duration }{
		{0, time.Hour, goneLimit},
		{45 * time.Second, 44 * time.Second, leastGone},
		{45 * time.Second, 40 * time.Second, 5 * time.Second},
		{time.Hour, time.Second, goneLimit},
	} {
		if got := goneWithin(c.limit, c.took); got != c.want {
			t.Errorf("limit %s, took %s: %s, want %s", c.limit, c.took, got, c.want)
		}
	}
}
