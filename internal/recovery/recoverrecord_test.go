package recovery

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
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
func TestJobsWithOnlyRecordsAreRecovered(t *testing.T) {
	for _, verb := range []string{"restore", "rebuild"} {
		t.Run(verb, func(t *testing.T) {
			h := newHome(t)
			h.use(t)
			r := h.repair(t.TempDir() + "/backup.db")
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
					"job-aaaaaaaaaaaaa": {Status: agentlab.JobFailed, Reason: reasonRecovered, Task: "was at work"},
					"job-bbbbbbbbbbbbb": {Status: agentlab.JobFailed, Reason: reasonRecovered, Task: "waited"},
					"job-ccccccccccccc": {Status: agentlab.JobCancelled, Reason: "cancelled", Task: "was cancelled"},
					"job-ddddddddddddd": {Status: agentlab.JobFailed, Reason: reasonRecovered, Task: "unknown"},
				} {
					j, err := st.Job(t.Context(), id)
					if err != nil || j.Status != want.Status || j.Reason != want.Reason || !strings.HasPrefix(j.Task, want.Task) {
						t.Errorf("%s: %+v, %v", id, j, err)
					}
					if want.Reason == reasonRecovered && j.FinishedAt.IsZero() {
						t.Errorf("%s has no end", id)
					}
				}
			})
		})
	}
}

// New sandboxes get numbers above those of all that was there before: of jobs
// and their records, and of rows of destroyed sandboxes. A number above the
// range does not make the range begin again.
func TestNumbersDoNotReturn(t *testing.T) {
	h := newHome(t)
	write(t, h.paths.ConfigFile(), "backend: fake\nvmid_range: {first: 1000, last: 1999}\n")
	record(t, h, agentlab.Job{ID: "job-aaaaaaaaaaaaa", Agent: "shell", Mode: "dangerous", Status: agentlab.JobRunning, SandboxVMID: 1007})
	record(t, h, agentlab.Job{ID: "job-bbbbbbbbbbbbb", Agent: "shell", Mode: "dangerous", Status: agentlab.JobFailed, SandboxVMID: 5000})
	rebuild := func() {
		r := h.repair()
		if err := r.do(t.Context(), "rebuild", false, io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	next := func(want int) {
		t.Helper()
		sb := recoverSandbox(backend.Spec{UID: agentlab.NewUID(), Name: agentlab.NewUID()[:8], Network: agentlab.Network{Mode: "nat"},
			Resources: agentlab.Resources{Cores: 1, MemoryMB: 1024, RootSizeGB: 10}}, "fake", time.Now().UTC())
		change(t, h, func(st *store.Store) {
			got, err := st.AllocateSandbox(t.Context(), sb, agentlab.Allocation{First: 1000, Last: 1999})
			if err != nil || got.VMID != want {
				t.Errorf("the next sandbox has the number %d, want %d; %v", got.VMID, want, err)
			}
		})
	}
	rebuild()
	next(1008)
	change(t, h, func(st *store.Store) { // as the oldest backup has it
		sb, err := st.Sandbox(t.Context(), 1008)
		if err != nil {
			t.Fatal(err)
		}
		sb.VMID, sb.UID, sb.Name, sb.State = 1020, agentlab.NewUID(), "gone", agentlab.SandboxDestroyed
		if err := st.RecoverSandbox(t.Context(), sb); err != nil {
			t.Fatal(err)
		}
	})
	rebuild()
	next(1021)
	out := report{vmids: []int{1030}} // of an orphan on the backend
	change(t, h, func(st *store.Store) {
		if err := skipNumbers(t.Context(), st, 1999, &out); err != nil {
			t.Fatal(err)
		}
	})
	next(1031)
}

// A record that the store refuses stops neither the others nor the files of its
// own job from being added. It is reported and kept.
func TestRefusedRecordIsReported(t *testing.T) {
	h, job := lived(t)
	remove(t, h.paths.Database(), h.paths.Database()+"-wal", h.paths.Database()+"-shm", h.paths.Backups())
	const first, last = "job-2222222222222", "job-zzzzzzzzzzzzz"
	bad, _ := readRecord(h.paths.Records(), job)
	bad.StopRequested = "COMPLETED" // which the API rejects
	if err := durable.ReplaceJSON(recordFile(h.paths.Records(), job), bad, durable.Content); err != nil {
		t.Fatal(err)
	}
	record(t, h, agentlab.Job{ID: first, Agent: "shell", Mode: "dangerous", Status: agentlab.JobFailed, StopRequested: "?"})
	record(t, h, agentlab.Job{ID: last, Agent: "shell", Mode: "dangerous", Status: agentlab.JobCancelled})
	r := h.repair()
	var out strings.Builder
	err := r.do(t.Context(), "rebuild", false, &out)
	if agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" || !strings.Contains(err.Error(), "invalid records (2, the first: job-") {
		t.Errorf("%v (%s)", err, agentlab.HintOf(err))
	}
	if r.out.Jobs != 3 || len(r.out.Refused) != 2 || r.out.Artifacts == 0 {
		t.Errorf("%+v", r.out)
	}
	for _, id := range []string{job, first} {
		if !strings.Contains(out.String(), "refused: "+id+": ") {
			t.Errorf("%s is not in the report:\n%s", id, out.String())
		}
		if _, err := os.Stat(recordFile(h.paths.Records(), id) + refusedSuffix); err != nil {
			t.Error(err)
		}
	}
	change(t, h, func(st *store.Store) {
		for id, want := range map[string]agentlab.JobStatus{job: agentlab.JobFailed, first: agentlab.JobFailed, last: agentlab.JobCancelled} {
			if j, err := st.Job(t.Context(), id); err != nil || j.Status != want {
				t.Errorf("%s: %+v, %v", id, j, err)
			}
		}
	})
	r = h.repair()
	if err := r.do(t.Context(), "rebuild", false, io.Discard); err != nil {
		t.Errorf("again: %v", err)
	}
	h.use(t)
}

// One sandbox that the store refuses does not keep the others out, and a fault
// that concerns all of them ends the repair.
func TestRejectContinuesOrStops(t *testing.T) {
	for code, stops := range map[agentlab.Code]bool{
		agentlab.CodeInvalid: false, agentlab.CodeExists: false, agentlab.CodeConflict: false, agentlab.CodeInternal: false,
		agentlab.CodeNoSpace: true, agentlab.CodeUnavailable: true, agentlab.CodeBusy: true, agentlab.CodeDenied: true,
	} {
		var out report
		err := out.refuse(refusal{Sandbox: 7}, agentlab.Errorf(code, "why"))
		if (err != nil) != stops || len(out.Refused) == 0 != stops {
			t.Errorf("%s: %v, %v", code, err, out.Refused)
		}
	}
}
