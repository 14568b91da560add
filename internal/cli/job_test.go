package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
)

func TestShowReportsWhyAJobWaits(t *testing.T) {
	var out bytes.Buffer
	a := &App{Stdout: &out}
	if err := a.showJob(api.Job{ID: "job-x", Status: "QUEUED", Phase: "waiting", Waiting: "waits: the storage is damaged (repair it)"}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "Waiting:") || !strings.Contains(out.String(), "the storage is damaged (repair it)") {
		t.Errorf("%s", out.String())
	}
}
