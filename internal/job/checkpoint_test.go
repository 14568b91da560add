package job_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/job"
)

// The checkpoint of a job is kept until its result is stored: a job that has none
// keeps it, whatever its runner claims.
func TestCheckpointIsKeptUntilTheResultIsStored(t *testing.T) {
	const cp, base, head = "artifact checkpoint.bundle x\n", "1111111111111111111111111111111111111111", "2222222222222222222222222222222222222222"
	report := func(status, head string, rest string) string {
		return `report {"status":"` + status + `","phase":"done","result":{"base_commit":"` + base + `","head_commit":"` + head + `"` + rest + `}}`
	}
	for name, c := range map[string]struct {
		task string
		kept bool
	}{
		"the VM crashed":               {"crash-vm", true},
		"no result":                    {`report {"status":"COMPLETED","phase":"done"}`, true},
		"commits without a bundle":     {report("FAILED", head, `,"commits":2`), true},
		"uncommitted without a bundle": {report("COMPLETED", base, `,"uncommitted":1,"dirty":true`), true},
		"stored":                       {"artifact result.bundle x\n" + report("FAILED", head, `,"commits":2`), false},
		"nothing was done":             {report("COMPLETED", base, ""), false},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				j := w.run(agentlab.JobRequest{Task: cp + c.task})
				w.final(j.ID)
				w.gone(j.ID)
				if kept := slices.ContainsFunc(w.paths(j.ID), func(p string) bool { return strings.HasPrefix(p, agentlab.ArtifactCheckpoint) }); kept != c.kept {
					w.Errorf("kept: %v, artifacts %q", kept, w.paths(j.ID))
				}
				// The others have no repository, and their runners reported the end.
				got := w.events(agentlab.EventJobUnshipped, j.ID)
				if lost := name == "the VM crashed"; lost != (len(got) == 1) || lost && !strings.HasPrefix(got[0], "job J has no result, but a checkpoint of 2000-01-01T") {
					w.Errorf("events %q", got)
				}
			})
		})
	}
}

// The end of a job names work that may be only on the disk of its sandbox.
func TestUnshippedWorkIsNamed(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ended := agentlab.Job{ID: "job-1", Status: agentlab.JobFailed, RepoURL: "https://git.example/r", StartedAt: at}
	result := agentlab.JobResult{BaseCommit: "1", HeadCommit: "2", Commits: 1}
	for name, c := range map[string]struct {
		change func(j *agentlab.Job)
		files  []string
		want   string
	}{
		"nothing is stored":         {want: "no result and no checkpoint; other work is deleted with the disk of its sandbox"},
		"kept":                      {func(j *agentlab.Job) { j.Keepalive = true }, nil, "remains on the disk of its sandbox until the sandbox is destroyed"},
		"a checkpoint":              {nil, []string{agentlab.ArtifactCheckpoint, agentlab.ArtifactIncrement}, "no result, but a checkpoint of 2026-01-02T03:04:06Z;"},
		"commits without a bundle":  {func(j *agentlab.Job) { j.Result = result }, nil, "no result and no checkpoint"},
		"stored":                    {func(j *agentlab.Job) { j.Result = result }, []string{agentlab.ArtifactResult}, ""},
		"nothing was done":          {func(j *agentlab.Job) { j.Result = agentlab.JobResult{BaseCommit: "1", HeadCommit: "1"} }, nil, ""},
		"it did not start":          {func(j *agentlab.Job) { j.StartedAt = time.Time{} }, nil, ""},
		"no repository, lost":       {func(j *agentlab.Job) { j.RepoURL = "" }, nil, "no result and no checkpoint"},
		"no repository, reported":   {func(j *agentlab.Job) { j.RepoURL, j.Phase = "", "done" }, nil, ""},
		"it prepared for attempts":  {func(j *agentlab.Job) { j.ParentID = "job-2" }, nil, ""},
		"a local repository, lost":  {func(j *agentlab.Job) { j.RepoURL, j.Bundled = "", true }, nil, "no result and no checkpoint"},
		"an attempt without result": {func(j *agentlab.Job) { j.ParentID, j.Attempt = "job-2", 1 }, nil, "no result and no checkpoint"},
	} {
		j, files := ended, []agentlab.Artifact{}
		if c.change != nil {
			c.change(&j)
		}
		for i, p := range c.files {
			files = append(files, agentlab.Artifact{Path: p, CreatedAt: at.Add(time.Duration(i) * time.Second)})
		}
		evs := job.Unshipped(j, files)
		switch {
		case c.want == "" && len(evs) != 0, c.want != "" && (len(evs) != 1 || evs[0].JobID != j.ID || !strings.Contains(evs[0].Message, c.want)):
			t.Errorf("%s: %+v, want %q", name, evs, c.want)
		}
	}
}
