package job_test

import (
	"context"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestGetByBeginning(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		for _, id := range []string{"job-aaaaaaaaaaaaa", "job-aaaaaaaaaaaab", "job-aab2222222222", "job-zzzzzzzzzzzzz"} {
			j := agentlab.Job{ID: id, Task: "x", Agent: "shell", Profile: "plain", Mode: "dangerous", Status: agentlab.JobCancelled, TTL: 1}
			if err := w.store.CreateJob(ctx, j, nil); err != nil {
				t.Fatal(err)
			}
		}
		for id, want := range map[string]string{
			"job-aaaaaaaaaaaab": "job-aaaaaaaaaaaab", "job-aab": "job-aab2222222222", "job-z": "job-zzzzzzzzzzzzz", "job-zzzzzzzzzzzz": "job-zzzzzzzzzzzzz",
		} {
			if j, err := w.jobs.Get(ctx, id); err != nil || j.ID != want {
				t.Errorf("%s: %s, %v", id, j.ID, err)
			}
		}
		for _, id := range []string{"", "j", "job", "job-b", "job-aaaaaaaaaaaac", "job-aaaaaaaaaaaaaa", "job-%", "job-a%", "job-a*", "job-A", "aab", "job-z' OR ''='"} {
			_, err := w.jobs.Get(ctx, id)
			wantCode(t, err, agentlab.CodeNotFound)
		}
		_, err := w.jobs.Get(ctx, "job-")
		wantCode(t, err, agentlab.CodeInvalid)
		_, err = w.jobs.Get(ctx, "job-a")
		wantCode(t, err, agentlab.CodeInvalid)
		for _, want := range []string{"job-aaaaaaaaaaaaa", "job-aaaaaaaaaaaab", "job-aab2222222222"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%v lacks %s", err, want)
			}
		}
	})
}
