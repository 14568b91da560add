package daemon

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// lived makes a home that a daemon has used, with the files of one job, and
// returns the id of the job.
func lived(t *testing.T) (*home, string) {
	t.Helper()
	h := newHome(t)
	stop := h.start(t)
	j, err := h.client.CreateJob(t.Context(), shell("echo done", "artifact out.txt the result"))
	if err != nil {
		t.Fatal(err)
	}
	h.ended(t, j.ID)
	stop()
	return h, j.ID
}

// A daemon does not start without its database. The command makes the database
// again from the files that the daemon wrote, with the end of the job.
func TestLostDatabase(t *testing.T) {
	h, job := lived(t)
	for _, suffix := range []string{"", "-wal", "-shm"} {
		_ = os.Remove(h.paths.Database() + suffix)
	}
	d, err := h.open(t)
	if err == nil {
		_ = d.Close()
	}
	if agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(agentlab.HintOf(err), "agentlab db rebuild") {
		t.Fatalf("without a database: %v (%s)", err, agentlab.HintOf(err))
	}
	cmd, stderr := h.program(t, "db", "rebuild", "--home", h.paths.Home)
	if out, err := cmd.Output(); err != nil || !strings.Contains(string(out), "1 job, 1 artifact") {
		t.Fatalf("%s%s%v", out, stderr, err)
	}
	h.start(t)
	j, err := h.client.Job(t.Context(), job)
	if err != nil || j.Status != "COMPLETED" || !strings.Contains(j.Task, "echo done") {
		t.Errorf("%+v, %v", j, err)
	}
	if list, err := h.client.Artifacts(t.Context(), job); err != nil || len(list.Items) != 1 || list.Items[0].Path != "out.txt" {
		t.Errorf("%+v, %v", list, err)
	}
	cmd, stderr = h.program(t, "db", "rebuild", "--json")
	if _, err := cmd.Output(); err == nil || cmd.ProcessState.ExitCode() != 1 || !strings.HasPrefix(stderr.String(), `{"error":{"code":"exists"`) {
		t.Errorf("while a daemon runs: %v, %s", err, stderr)
	}
}

// A daemon that ends writes the record of a commit whose listeners have not run: a commit
// is visible before.
func TestRecordsAreCompleteAtTheEnd(t *testing.T) {
	h := newHome(t)
	d, err := h.open(t)
	if err != nil {
		t.Fatal(err)
	}
	d.services.bus.mu.Lock() // the listeners of the commit wait in it
	id := make(chan string, 1)
	created := make(chan error, 1)
	go func() {
		j, err := d.services.jobs.Create(context.Background(), agentlab.JobRequest{Agent: "shell", Task: "echo done"})
		id <- j.ID
		created <- err
	}()
	var jobs []agentlab.Job
	guard.Until(t, "the row of the job", func() bool {
		jobs, err = d.services.store.Jobs(t.Context(), agentlab.JobFilter{Limit: 1})
		return err != nil || len(jobs) > 0
	})
	if err != nil {
		t.Fatal(err)
	}
	_ = d.services.records.Close()
	if _, err := os.Stat(filepath.Join(h.paths.Records(), jobs[0].ID+".json")); err != nil {
		t.Error(err)
	}
	d.services.bus.mu.Unlock()
	if got, err := <-id, <-created; err != nil || got != jobs[0].ID {
		t.Errorf("%s, %v", got, err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// A daemon whose state directory was replaced while it runs sweeps nothing.
func TestNothingIsSweptWithoutAMatch(t *testing.T) {
	h, _ := lived(t)
	d, err := h.open(t)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	other := "job-aaaaaaaaaaaaa"
	write(t, filepath.Join(h.paths.Artifacts(), other, "result"), "of another installation")
	write(t, h.paths.Installation(), agentlab.NewUID()+"\n")
	if _, err := d.services.gc.Pass(t.Context()); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("a pass: %v", err)
	}
	if _, err := os.Stat(filepath.Join(h.paths.Artifacts(), other, "result")); err != nil {
		t.Error(err)
	}
}

// The first backup is made soon after the start.
func TestBackupAtStart(t *testing.T) {
	h := newHome(t)
	h.start(t)
	guard.Until(t, "a backup", func() bool {
		list, _ := os.ReadDir(h.paths.Backups())
		return len(list) == 1 && strings.HasSuffix(list[0].Name(), ".db")
	})
}
