package store

import (
	"context"
	"reflect"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// resultJSON is the stored form of agentlab.JobResult.
type resultJSON struct {
	BaseCommit string `json:"base_commit,omitempty"`
	HeadCommit string `json:"head_commit,omitempty"`
	Branch     string `json:"branch,omitempty"`
	Commits    int    `json:"commits,omitempty"`
	Pushed     bool   `json:"pushed,omitempty"`
	Dirty      bool   `json:"dirty,omitempty"`

	Uncommitted int `json:"uncommitted,omitempty"`

	JudgeExit *int     `json:"judge_exit,omitempty"`
	Score     *float64 `json:"score,omitempty"`
}

var jobs = newTable("jobs", []string{"job_id"}, func(j *agentlab.Job) []field {
	return []field{
		{"job_id", &j.ID},
		{"repo_url", &j.RepoURL},
		{"bundled", &j.Bundled},
		{"ref", &j.Ref},
		{"depth", &j.Depth},
		{"task", &j.Task},
		{"agent", &j.Agent},
		{"profile", &j.Profile},
		{"backend", &j.Backend},
		{"image", &j.Image},
		{"mode", &j.Mode},
		{"ttl_ns", &j.TTL},
		{"keepalive", &j.Keepalive},
		{"no_setup", &j.NoSetup},
		{"devcontainer", &j.Devcontainer},
		{"branch", &j.Branch},
		{"attempts", &j.Attempts},
		{"winner", &j.Winner},
		{"parent_id", &j.ParentID},
		{"attempt", &j.Attempt},
		{"pick", &j.Pick},
		{"fork", &j.Fork},
		{"salvages", &j.Salvages},
		{"setup_json", jsonCol{&j.Setup}},
		{"status", &j.Status},
		{"phase", &j.Phase},
		{"reason", &j.Reason},
		{"waiting", &j.Waiting},
		{"exit_code", &j.ExitCode},
		{"sandbox_vmid", &j.SandboxVMID},
		{"stop_requested", &j.StopRequested},
		{"memory_kills", &j.MemoryKills},
		{"model_hosts_json", jsonCol{&j.ModelHosts}},
		{"result_json", jsonCol{(*resultJSON)(&j.Result)}},
		{"created_at", timeCol{&j.CreatedAt}},
		{"updated_at", timeCol{&j.UpdatedAt}},
		{"started_at", timeCol{&j.StartedAt}},
		{"finished_at", timeCol{&j.FinishedAt}},
		{"deadline_at", timeCol{&j.DeadlineAt}},
	}
}, checkJob)

func checkJob(j *agentlab.Job) error {
	switch {
	case !j.Status.Valid():
		return invalid("status", "unknown status %q", j.Status)
	case j.CreatedAt.IsZero() || j.UpdatedAt.IsZero():
		return invalid("created_at", "creation or update time is missing")
	case j.StopRequested != "" && !stoppable(agentlab.JobStatus(j.StopRequested)):
		return invalid("stop_requested", "%q cannot be requested", j.StopRequested)
	}
	return agentlab.ValidateJobID(j.ID)
}

// stoppable reports whether a running job can be requested to end with that
// status.
func stoppable(s agentlab.JobStatus) bool { return s.Final() && s != agentlab.JobCompleted }

// CreateJob inserts a job and, in the same transaction, its attempts. CreatedAt
// and UpdatedAt are set if zero; an event with JobID "" gets the job's ID.
// Codes: exists, invalid.
func (s *Store) CreateJob(ctx context.Context, j agentlab.Job, attempts []agentlab.Job, evs ...agentlab.Event) error {
	return s.write(ctx, func(w *tx) error {
		for _, j := range append([]agentlab.Job{j}, attempts...) {
			if j.CreatedAt.IsZero() {
				j.CreatedAt = w.now
			}
			if j.UpdatedAt.IsZero() {
				j.UpdatedAt = j.CreatedAt
			}
			if err := jobs.insert(w, &j); err != nil {
				return err
			}
		}
		return w.emit(fillTarget(evs, 0, j.ID))
	})
}

// UpdateJob changes a job like UpdateSandbox changes a sandbox: fn must not
// change ID or CreatedAt, and an event with JobID "" gets id. The upload
// grants of a job that becomes final are deleted.
func (s *Store) UpdateJob(ctx context.Context, id string, fn func(*agentlab.Job) ([]agentlab.Event, error)) (agentlab.Job, error) {
	var out agentlab.Job
	err := s.write(ctx, func(w *tx) (err error) {
		out, err = updateJob(w, id, fn)
		return err
	})
	if err != nil {
		return agentlab.Job{}, err
	}
	return out, nil
}

// updateJob is UpdateJob in a transaction.
func updateJob(w *tx, id string, fn func(*agentlab.Job) ([]agentlab.Event, error)) (agentlab.Job, error) {
	old, err := jobByID(w.ctx, w, id)
	if err != nil {
		return old, err
	}
	out := cloneJob(old)
	evs, err := fn(&out)
	if err != nil {
		return out, err
	}
	return out, saveJob(w, old, &out, evs)
}

func cloneJob(j agentlab.Job) agentlab.Job {
	if j.ExitCode != nil {
		code := *j.ExitCode
		j.ExitCode = &code
	}
	if j.Result.JudgeExit != nil {
		code := *j.Result.JudgeExit
		j.Result.JudgeExit = &code
	}
	if j.Result.Score != nil {
		score := *j.Result.Score
		j.Result.Score = &score
	}
	j.ModelHosts = slices.Clone(j.ModelHosts)
	return j
}

func saveJob(w *tx, old agentlab.Job, j *agentlab.Job, evs []agentlab.Event) error {
	if j.ID != old.ID || !j.CreatedAt.Equal(old.CreatedAt) {
		return agentlab.Errorf(agentlab.CodeInternal, "id and creation time of %s may not change", old.ID)
	}
	if j.Status != old.Status && !old.Status.CanBecome(j.Status) {
		return agentlab.Errorf(agentlab.CodeConflict, "%s is %s and cannot become %s", old.ID, old.Status, j.Status)
	}
	if !reflect.DeepEqual(*j, old) {
		j.UpdatedAt = w.now
		if err := jobs.update(w, j); err != nil {
			return err
		}
	}
	if j.Status.Final() && !old.Status.Final() {
		// Grants of the runner stay: it may not have received the answer to
		// its last report, and sends it again.
		if err := w.exec("DELETE FROM grants WHERE job_id = ? AND kind = ?", j.ID, agentlab.GrantUpload); err != nil {
			return err
		}
		// The runner of a job that was RUNNING had its answer. A token that
		// replaces a lost one is no longer needed.
		if old.Status == agentlab.JobRunning {
			if err := w.exec("DELETE FROM bootstrap_tokens WHERE vmid = ? AND consumed_at = ''", j.SandboxVMID); err != nil {
				return err
			}
		}
	}
	return w.emit(fillTarget(evs, 0, j.ID))
}

// Job returns the job with that id, or not_found.
func (s *Store) Job(ctx context.Context, id string) (agentlab.Job, error) {
	return jobByID(ctx, s.r, id)
}

func jobByID(ctx context.Context, q querier, id string) (agentlab.Job, error) {
	j, ok, err := jobs.one(ctx, q, "WHERE job_id = ?", id)
	if err == nil && !ok {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no job %s", id).WithHint("see 'agentlab job list'")
	}
	return j, err
}

// Jobs lists jobs, the newest first.
func (s *Store) Jobs(ctx context.Context, f agentlab.JobFilter) ([]agentlab.Job, error) {
	tail, args := jobList(f)
	return jobs.query(ctx, s.r, tail, args...)
}

func jobList(f agentlab.JobFilter) (tail string, args []any) {
	var where filter
	addIn(&where, "status", f.Statuses)
	if f.SandboxVMID != 0 {
		where.add("sandbox_vmid = ? AND sandbox_vmid <> 0", f.SandboxVMID)
	}
	if f.ParentID != "" {
		where.add("parent_id = ? AND parent_id <> ''", f.ParentID)
	}
	if f.Salvages != "" {
		where.add("salvages = ? AND salvages <> ''", f.Salvages)
	}
	if f.Before != (agentlab.JobKey{}) {
		where.add("(created_at, job_id) < (?, ?)", timeCol{&f.Before.CreatedAt}, f.Before.ID)
	}
	return where.tail("created_at DESC, job_id DESC", f.Limit), where.args
}

// JobsByPrefix lists at most limit jobs whose IDs begin with prefix, by ID.
func (s *Store) JobsByPrefix(ctx context.Context, prefix string, limit int) ([]agentlab.Job, error) {
	const above = "~" // sorts after all characters of IDs
	if !strings.HasPrefix(prefix, "job-") {
		return nil, nil
	}
	return jobs.query(ctx, s.r, "WHERE job_id >= ? AND job_id < ? ORDER BY job_id LIMIT ?", prefix, prefix+above, limit)
}

// DeleteJob deletes the row of a job that has ended. Its artifacts must be
// deleted first. Codes: not_found, conflict.
func (s *Store) DeleteJob(ctx context.Context, id string) error {
	return s.write(ctx, func(w *tx) error {
		j, err := jobByID(w.ctx, w, id)
		if err != nil {
			return err
		}
		if !j.Status.Final() {
			return agentlab.Errorf(agentlab.CodeConflict, "%s is %s; only ended jobs can be deleted", id, j.Status)
		}
		err = w.exec("DELETE FROM jobs WHERE job_id = ?", id)
		if agentlab.CodeOf(err) == agentlab.CodeConflict {
			err = agentlab.Errorf(agentlab.CodeConflict, "%s still has artifacts", id)
		}
		return err
	})
}

// CountJobs counts jobs by status.
func (s *Store) CountJobs(ctx context.Context) (map[agentlab.JobStatus]int, error) {
	return countBy[agentlab.JobStatus](ctx, s.r, "jobs", "status")
}
