package job_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// A cancel ends the upload window of a job that was stopped because its model
// is denied, and keeps status and reason of that stop. Its runner is given the
// reason, also when it asks after the end.
func TestCancelAfterDeniedModel(t *testing.T) {
	inWorld(t, func(w *world) {
		defer w.recorded()()
		j := w.claude("stubborn\necho deaf\nhang")
		w.eventually("it is deaf", func() bool { time.Sleep(time.Second); return strings.Contains(w.log(j.ID), "deaf") })
		w.wanted(j, agentlab.EgressRecord{Proto: "dns", Name: "api.anthropic.com", Rule: "mode.allowlist", Count: 10})
		w.eventually("stopped", func() bool { time.Sleep(time.Second); return w.job(j.ID).StopRequested == string(agentlab.JobFailed) })
		vmid := w.sandbox(j.ID).VMID
		j, err := w.jobs.Cancel(context.Background(), j.ID)
		if err != nil || j.Status != agentlab.JobFailed || !strings.Contains(j.Reason, "api.anthropic.com:443") || !strings.HasSuffix(j.Reason, "; its upload was cancelled by request") {
			t.Errorf("%s: %q, %v", j.Status, j.Reason, err)
		}
		d, err := w.jobs.Directive(context.Background(), vmid, 0)
		if want := (guestapi.Directive{Stop: "CANCELLED", Reason: j.Reason}); err != nil || d != want {
			t.Errorf("directive %+v, %v, want %+v", d, err, want)
		}
		w.gone(j.ID)
	})
}
