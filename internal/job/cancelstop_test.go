package job_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// A cancel ends the upload window of a job that was stopped because its model
// is denied, and keeps status and reason of that stop.
func TestCancelAfterDeniedModel(t *testing.T) {
	inWorld(t, func(w *world) {
		defer w.recorded()()
		j := w.claude("stubborn\necho deaf\nhang")
		w.eventually("it is deaf", func() bool { time.Sleep(time.Second); return strings.Contains(w.log(j.ID), "deaf") })
		w.wanted(j, agentlab.EgressRecord{Proto: "dns", Name: "api.anthropic.com", Rule: "mode.allowlist", Count: 10})
		w.eventually("stopped", func() bool { time.Sleep(time.Second); return w.job(j.ID).StopRequested == string(agentlab.JobFailed) })
		j, err := w.jobs.Cancel(context.Background(), j.ID)
		if err != nil || j.Status != agentlab.JobFailed || !strings.Contains(j.Reason, "api.anthropic.com:443") || !strings.HasSuffix(j.Reason, "; its upload was cancelled by request") {
			t.Errorf("%s: %q, %v", j.Status, j.Reason, err)
		}
		w.gone(j.ID)
	})
}
