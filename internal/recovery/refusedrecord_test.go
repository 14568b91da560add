package recovery

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// A job that waits in the backup and has a record that the store refuses does not
// run a second time, and the record is not overwritten.
func TestRefusedRecordOfAKnownJob(t *testing.T) {
	h, job := lived(t)
	ended, _ := readRecord(h.paths.Records(), job)
	waits := ended
	waits.Status, waits.SandboxVMID, waits.ExitCode, waits.StartedAt, waits.FinishedAt = agentlab.JobQueued, 0, nil, time.Time{}, time.Time{}
	r := h.repair(filepath.Join(t.TempDir(), "backup.db"))
	change(t, h, func(st *store.Store) {
		for _, do := range []func() error{
			func() error { return st.DeleteArtifacts(t.Context(), job) },
			func() error { return st.DeleteJob(t.Context(), job) },
			func() error { return st.CreateJob(t.Context(), waits, nil) },
			func() error { return st.Backup(t.Context(), r.backup) },
		} {
			if err := do(); err != nil {
				t.Fatal(err)
			}
		}
	})
	ended.StopRequested = "COMPLETED" // which the API rejects
	path := recordFile(h.paths.Records(), job)
	if err := durable.ReplaceJSON(path, ended, durable.Content); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.do(t.Context(), "restore", false, io.Discard); agentlab.CodeOf(err) != agentlab.CodeInvalid || !strings.Contains(agentlab.HintOf(err), refusedSuffix) {
		t.Errorf("%v (%s)", err, agentlab.HintOf(err))
	}
	if len(r.out.Refused) != 1 || r.out.Refused[0].Job != job {
		t.Errorf("refused %+v", r.out.Refused)
	}
	h.use(t)
	if got, err := os.ReadFile(path + refusedSuffix); err != nil || string(got) != string(want) {
		t.Errorf("the record that was refused: %s, %v", got, err)
	}
	change(t, h, func(st *store.Store) {
		j, err := st.Job(t.Context(), job)
		if err != nil || j.Status != agentlab.JobFailed || j.Reason != reasonRecovered || !j.StartedAt.IsZero() || j.FinishedAt.IsZero() || j.Task != waits.Task {
			t.Errorf("%+v, %v", j, err)
		}
	})
}

// A repair that is killed after it put a record aside, and before it made or
// ended the row of the job, is completed by the next one.
func TestRepairKilledAfterARefusedRecord(t *testing.T) {
	h := newHome(t)
	h.use(t)
	const unknown, waiting = "job-aaaaaaaaaaaaa", "job-bbbbbbbbbbbbb"
	at := time.Now().UTC().Add(-time.Hour)
	change(t, h, func(st *store.Store) {
		err := st.CreateJob(t.Context(), agentlab.Job{ID: waiting, Agent: "shell", Mode: "dangerous", Status: agentlab.JobQueued, CreatedAt: at}, nil)
		if err != nil {
			t.Fatal(err)
		}
	})
	for i, id := range []string{unknown, waiting} {
		record(t, h, agentlab.Job{ID: id, Agent: "shell", Mode: "dangerous", Status: agentlab.JobFailed, StopRequested: "?", SandboxVMID: 1500 + i})
		killed := report{}
		if err := killed.putAside(h.paths.Records(), id, agentlab.Errorf(agentlab.CodeInvalid, "why")); err != nil {
			t.Fatal(err)
		}
	}
	r := h.repair()
	if err := r.do(t.Context(), "rebuild", false, io.Discard); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("it reports nothing as refused: %v", err)
	}
	if r.out.Jobs != 1 || len(r.out.Refused) != 2 || slices.Max(append(r.out.vmids, 0)) != 1501 {
		t.Errorf("%+v", r.out)
	}
	change(t, h, func(st *store.Store) {
		for _, id := range []string{unknown, waiting} {
			if j, err := st.Job(t.Context(), id); err != nil || j.Status != agentlab.JobFailed || j.Reason != reasonRecovered || j.FinishedAt.IsZero() {
				t.Errorf("%s: %+v, %v", id, j, err)
			}
			if _, err := os.Stat(recordFile(h.paths.Records(), id) + refusedSuffix); err != nil {
				t.Error(err)
			}
		}
	})
	r = h.repair()
	if err := r.do(t.Context(), "rebuild", false, io.Discard); err != nil {
		t.Errorf("again: %v", err)
	}
}
