package daemon

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// record writes the record of a job that has no file but that.
func record(t *testing.T, h *home, j agentlab.Job) {
	t.Helper()
	j.CreatedAt = time.Now().UTC().Add(-time.Hour)
	j.UpdatedAt = j.CreatedAt
	if err := os.MkdirAll(h.paths.Records(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := durable.ReplaceJSON(recordFile(h.paths.Records(), j.ID), j, durable.Content); err != nil {
		t.Fatal(err)
	}
}

// Jobs without a log or an artifact are recovered from their records, after a
// restore as after a rebuild.
func TestJobsWithRecordsAloneAreRecovered(t *testing.T) {
	for _, verb := range []string{"restore", "rebuild"} {
		t.Run(verb, func(t *testing.T) {
			h := newHome(t)
			h.start(t)()
			r := repair{runOptions: runOptions{home: h.paths.Home}, backup: t.TempDir() + "/backup.db"}
			change(t, h, func(st *store.Store) {
				if err := st.Backup(t.Context(), r.backup); err != nil {
					t.Fatal(err)
				}
			})
			remove(t, h.paths.Database(), h.paths.Database()+"-wal", h.paths.Database()+"-shm")
			record(t, h, agentlab.Job{ID: "job-aaaaaaaaaaaaa", Task: "was at work", Agent: "shell", Mode: "dangerous", Status: agentlab.JobRunning})
			record(t, h, agentlab.Job{ID: "job-bbbbbbbbbbbbb", Task: "waited", Agent: "shell", Mode: "dangerous", Status: agentlab.JobQueued})
			record(t, h, agentlab.Job{ID: "job-ccccccccccccc", Task: "was cancelled", Agent: "shell", Mode: "dangerous", Status: agentlab.JobCancelled, Reason: "cancelled"})
			write(t, recordFile(h.paths.Records(), "job-ddddddddddddd"), "{")
			if err := r.do(t.Context(), verb, false, io.Discard); err != nil {
				t.Fatal(err)
			}
			if r.out.Jobs != 4 {
				t.Errorf("%d jobs were added", r.out.Jobs)
			}
			change(t, h, func(st *store.Store) {
				for id, want := range map[string]agentlab.Job{
					"job-aaaaaaaaaaaaa": {Status: agentlab.JobFailed, Reason: lostRecord, Task: "was at work"},
					"job-bbbbbbbbbbbbb": {Status: agentlab.JobFailed, Reason: lostRecord, Task: "waited"},
					"job-ccccccccccccc": {Status: agentlab.JobCancelled, Reason: "cancelled", Task: "was cancelled"},
					"job-ddddddddddddd": {Status: agentlab.JobFailed, Reason: lostRecord, Task: "unknown"},
				} {
					j, err := st.Job(t.Context(), id)
					if err != nil || j.Status != want.Status || j.Reason != want.Reason || !strings.HasPrefix(j.Task, want.Task) {
						t.Errorf("%s: %+v, %v", id, j, err)
					}
					if want.Reason == lostRecord && j.FinishedAt.IsZero() {
						t.Errorf("%s has no end", id)
					}
				}
			})
		})
	}
}
