package recovery

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// ownDriver is a driver whose backend has no other users.
type ownDriver struct{ backend.Driver }

func (d ownDriver) Info() backend.Info {
	info := d.Driver.Info()
	info.Capabilities.SharedNumbers = false
	return info
}

// newDriver returns a driver of a host without sandboxes.
func newDriver(t *testing.T) *fake.Driver {
	t.Helper()
	d, err := fake.Open(fake.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func newSpec(vmid int, name string) backend.Spec {
	return backend.Spec{
		VMID: vmid, UID: agentlab.NewUID(), Name: name, Image: "base@sha256:0",
		Resources: agentlab.Resources{Cores: 1, MemoryMB: 512, RootSizeGB: 10}, Network: agentlab.Network{Mode: agentlab.NetworkNAT},
	}
}

func TestSandboxesAreRecovered(t *testing.T) {
	const ofJob = "job-aaaaaaaaaaaaa"
	d, known := newDriver(t), newSpec(1000, "one")
	if err := errors.Join(d.Create(t.Context(), known), d.Create(t.Context(), newSpec(1001, ofJob))); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(t.Context(), t.TempDir()+"/new.db", store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	now := time.Now().UTC()
	for _, j := range []agentlab.Job{{ID: ofJob}, {ID: "job-bbbbbbbbbbbbb", SandboxVMID: known.VMID}} {
		j.Agent, j.Mode, j.Status = "shell", "dangerous", agentlab.JobFailed
		if err := st.CreateJob(t.Context(), j, nil); err != nil {
			t.Fatal(err)
		}
	}

	var shared report
	if err := recoverSandboxes(t.Context(), st, fleet.Of("fake", d, nil), now, &shared); err != nil || shared.Sandboxes != 0 || len(shared.Orphans) != 2 {
		t.Errorf("on a shared backend: %+v, %v", shared, err)
	}
	var own report
	for range 2 { // the second time there is nothing left to do
		if err := recoverSandboxes(t.Context(), st, fleet.Of("fake", ownDriver{d}, nil), now, &own); err != nil || own.Sandboxes != 2 || len(own.Orphans) != 0 {
			t.Errorf("on a backend of our own: %+v, %v", own, err)
		}
	}
	if !slices.Contains(shared.vmids, known.VMID) {
		t.Errorf("the backend's numbers are %v", shared.vmids)
	}
	got, err := st.Sandbox(t.Context(), known.VMID)
	if err != nil {
		t.Fatal(err)
	}
	if got.UID != known.UID || got.Name != "one" || got.Image != known.Image || got.State != agentlab.SandboxFailed || !got.LeaseExpiresAt.After(now) {
		t.Errorf("%+v", got)
	}
	if got.Profile != agentlab.ProfileLost || agentlab.ValidateName(got.Profile) == nil {
		t.Errorf("profile %q", got.Profile)
	}
	if got.JobID != "job-bbbbbbbbbbbbb" {
		t.Errorf("the sandbox whose number a job has is linked to %q", got.JobID)
	}
	named, err := st.SandboxByName(t.Context(), ofJob)
	if err != nil || named.JobID != ofJob {
		t.Errorf("the sandbox of a job: %+v, %v", named, err)
	}
	if j, err := st.Job(t.Context(), ofJob); err != nil || j.SandboxVMID != named.VMID {
		t.Errorf("the job of a sandbox: %+v, %v", j, err)
	}
}

func TestJobsAreRecovered(t *testing.T) {
	h, job := lived(t)
	before, err := os.ReadFile(recordFile(h.paths.Records(), job))
	if err != nil || !strings.Contains(string(before), "COMPLETED") {
		t.Fatalf("record %s, %v", before, err)
	}
	for _, c := range []struct {
		name   string
		record bool
		status agentlab.JobStatus
		task   string
	}{{"with its record", true, agentlab.JobCompleted, "artifact out.txt"}, {"without", false, agentlab.JobFailed, "unknown"}} {
		st, err := store.Open(t.Context(), t.TempDir()+"/new.db", store.Options{})
		if err != nil {
			t.Fatal(err)
		}
		files, err := artifact.New(artifact.Config{Dir: h.paths.State, Store: st})
		if err != nil {
			t.Fatal(err)
		}
		if !c.record {
			remove(t, h.paths.Records())
		}
		var out report
		err = recoverJobs(t.Context(), st, files, h.paths.Records(), &out)
		j, jerr := st.Job(t.Context(), job)
		if err != nil || jerr != nil || out.Jobs != 1 || out.Artifacts == 0 || j.Status != c.status || !strings.Contains(j.Task, c.task) || j.FinishedAt.IsZero() {
			t.Errorf("%s: %+v, %+v, %v, %v", c.name, out, j, err, jerr)
		}
		_ = files.Close()
		_ = st.Close()
	}
}

// A job that ended after the backup was made has its end.
func TestJobIsCompletedFromItsRecord(t *testing.T) {
	h, job := lived(t)
	st, err := store.Open(t.Context(), t.TempDir()+"/backup.db", store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	row, ok := readRecord(h.paths.Records(), job)
	if !ok {
		t.Fatal("no record")
	}
	row.Status, row.FinishedAt, row.ExitCode = agentlab.JobQueued, time.Time{}, nil
	if err := st.CreateJob(t.Context(), row, nil); err != nil {
		t.Fatal(err)
	}
	var out report
	if err := completeJob(t.Context(), st, row, artifact.RecoveredJob{JobID: job}, h.paths.Records(), &out); err != nil || len(out.Refused) != 0 {
		t.Fatalf("%+v, %v", out, err)
	}
	if j, err := st.Job(t.Context(), job); err != nil || j.Status != agentlab.JobCompleted || j.FinishedAt.IsZero() || j.ExitCode == nil {
		t.Errorf("%+v, %v", j, err)
	}
}

func TestBackupsAreBounded(t *testing.T) {
	h := newHome(t)
	st, err := h.open(t)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	at := time.Date(2026, 5, 1, 10, 0, 0, 0, time.UTC)
	cfg := BackupsConfig{Dir: h.paths.Backups(), Store: st, Keep: config.Backups{Newest: 3, Daily: 2}, Space: room{}, Clock: func() time.Time { return at }}
	b := NewBackups(cfg)
	for range 30 {
		if _, err := b.Make(t.Context()); err != nil {
			t.Fatal(err)
		}
		at = at.Add(6 * time.Hour)
	}
	at = at.Add(-20 * 24 * time.Hour) // the newest is still the one made last
	if _, err := b.Make(t.Context()); err != nil {
		t.Fatal(err)
	}
	list, err := listBackups(h.paths.Backups())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, x := range list {
		got = append(got, fmt.Sprintf("%d %s", x.number, x.at.Format("01-02 15h")))
	}
	if want := "31 04-18 22h,30 05-08 16h,29 05-08 10h,27 05-07 22h,23 05-06 22h"; strings.Join(got, ",") != want {
		t.Errorf("kept %s, want %s", strings.Join(got, ","), want)
	}
	full := agentlab.Errorf(agentlab.CodeNoSpace, "full")
	cfg.Space = room{full}
	b = NewBackups(cfg)
	if _, err := b.Make(t.Context()); agentlab.CodeOf(err) != agentlab.CodeNoSpace {
		t.Errorf("on a full disk: %v", err)
	}
	if f := b.Findings(); len(f) != 1 || f[0].Level != backend.LevelWarn || f[0].Remedy == "" {
		t.Errorf("findings %+v", f)
	}
	if after, _ := listBackups(h.paths.Backups()); len(after) != len(list) {
		t.Errorf("a failed backup removed others: %v", after)
	}
}
