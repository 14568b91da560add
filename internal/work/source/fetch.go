// Package source gets the work of agents into the repository of the user: it fetches the
// commits of jobs, and shows and applies uncommitted changes of jobs and sessions.
package source

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// hasResult reports whether the result of a job is known: a job without a
// repository has none to wait for.
func hasResult(j api.Job) bool { return j.Result.HeadCommit != "" || j.RepoURL == "" && !j.Bundled }

// HasNothing reports whether a job has ended with a known result that has
// nothing to fetch.
func HasNothing(j api.Job, withChanges bool) bool {
	r := j.Result
	commits := r.Commits > 0 || r.HeadCommit != r.BaseCommit // 0 also means that they could not be counted
	changes := withChanges && (r.Uncommitted > 0 || r.Dirty)
	return hasResult(j) && agentlab.JobStatus(j.Status).Final() && !commits && !changes
}

// Fetched are the refs that were set from a job's bundle; none if it has no commits.
type Fetched struct {
	Ref        string `json:"ref,omitempty"`
	Commit     string `json:"commit,omitempty"`
	Commits    int    `json:"commits"`
	ChangesRef string `json:"changes_ref,omitempty"`
	Changes    string `json:"changes_commit,omitempty"`

	Checkpoint *checkpoint       `json:"checkpoint,omitempty"` // nil: they are the result of the job
	Findings   []gitsafe.Finding `json:"findings,omitempty"`   // of the return check, about a merge into HEAD

	Found []returncheck.Finding `json:"-"` // of which Findings are
	Left  bool                  `json:"-"` // the checkpoint has uncommitted changes, which were not asked for
}

// checkpoint describes a checkpoint in the output of a command.
type checkpoint struct {
	StoredAt  time.Time `json:"stored_at"`
	JobStatus string    `json:"job_status"`
}

// checkpointOf returns the description of the checkpoint; nil for a result.
func checkpointOf(b *gitsafe.Bundle, j api.Job) *checkpoint {
	if b.Taken.IsZero() {
		return nil
	}
	return &checkpoint{b.Taken, j.Status}
}

// FetchJob fetches the branch of the job's bundle into refs/agentlab/JOB, and
// with withChanges its uncommitted changes. It takes no other ref and checks
// nothing out.
func FetchJob(ctx context.Context, ui work.UI, c *client.Client, j api.Job, repo string, withChanges bool) (Fetched, error) {
	var got Fetched
	err := WithResult(ctx, ui, c, j, repo, func(b *gitsafe.Bundle, _ string) (err error) {
		refs := map[string]string{}
		got.Checkpoint = checkpointOf(b, j)
		commit, commits := b.Header.Refs[resultBranch(j)], j.Result.Commits
		if commit != "" && got.Checkpoint != nil { // a checkpoint has the branch also without commits
			if commits, err = b.CountCommits(ctx, commit); err != nil {
				return bundleFault(ctx, j, err)
			}
			if commits == 0 {
				commit = ""
			}
		}
		if commit != "" {
			got.Ref, got.Commit, got.Commits = "refs/agentlab/"+j.ID, commit, commits
			refs[got.Ref] = resultBranch(j)
		}
		if commit := b.Header.Refs[guestapi.RefChanges]; commit != "" && withChanges {
			got.ChangesRef, got.Changes = "refs/agentlab/"+j.ID+"-changes", commit
			refs[got.ChangesRef] = guestapi.RefChanges
		}
		if len(refs) == 0 && got.Checkpoint != nil {
			got.Left = b.Header.Refs[guestapi.RefChanges] != ""
			return ErrNoCommits
		}
		if len(refs) == 0 {
			return noCommits(j)
		}
		if err := fetchJobLFS(ctx, ui, c, j, b); err != nil {
			return err
		}
		return bundleFault(ctx, j, b.Keep(ctx, refs))
	})
	return got, err
}

// resultBranch is the branch of the work in the bundles of a job. An attempt works on
// that of its job.
func resultBranch(j api.Job) string {
	if j.ParentID != "" {
		return "refs/heads/" + agentlab.WorkBranch("", j.ParentID)
	}
	return "refs/heads/" + agentlab.WorkBranch(j.Branch, j.ID)
}

// ErrNoCommits means that a job has nothing to fetch.
var ErrNoCommits = errors.New("has no commits")

// noCommits returns why a job has no bundle.
func noCommits(j api.Job) error {
	if !agentlab.JobStatus(j.Status).Final() {
		return agentlab.Errorf(agentlab.CodeNotFound, "job %s has not ended (it is %s) and has no checkpoint yet; its result is uploaded at its end", j.ID, j.Status).
			WithHint("wait for it: agentlab job logs --follow %s", j.ID)
	}
	err := agentlab.Errorf(agentlab.CodeNotFound, "job %s %w (it is %s)", j.ID, ErrNoCommits, j.Status)
	if r := j.Result; r.HeadCommit != "" && r.HeadCommit != r.BaseCommit {
		err = agentlab.Errorf(agentlab.CodeNotFound, "job %s %w that can be fetched (it is %s): its branch is at %.12s, and no bundle contains that commit",
			j.ID, ErrNoCommits, j.Status, r.HeadCommit)
	}
	if n := j.Result.Uncommitted; n > 0 {
		return err.WithHint("%s with uncommitted changes: agentlab job diff %s, agentlab job apply %s", agentlab.Plural(n, "file"), j.ID, j.ID)
	}
	return err.WithHint("list its artifacts: agentlab job artifacts %s", j.ID)
}

// WithResult downloads the job's bundle, checks every object against the
// repository, and calls fn with it and a temporary directory. An untrusted guest
// wrote the bundle. A job without a result can have a checkpoint.
func WithResult(ctx context.Context, ui work.UI, c *client.Client, j api.Job, repo string, fn func(b *gitsafe.Bundle, dir string) error) error {
	if _, err := gitsafe.Git(ctx, repo, "rev-parse", "--git-dir"); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a git repository: %v", repo, err).WithHint("set --repo to the path of one")
	}
	dir, remove, err := gitsafe.TempDir("agentlab-fetch-*")
	if err != nil {
		return err
	}
	defer remove()
	parts, err := downloadWork(ctx, c, j, dir)
	if err != nil {
		return err
	}
	refs := []string{resultBranch(j), guestapi.RefChanges}
	b, err := gitsafe.OpenBundle(ctx, dir, filepath.Join(dir, parts[0].Path), repo, refs...)
	if errors.Is(err, gitsafe.ErrNoRefs) && parts[0].Path == agentlab.ArtifactResult { // it has only other branches
		return noCommits(j)
	}
	if missing, ok := errors.AsType[gitsafe.MissingCommit](err); ok && ctx.Err() == nil {
		return lacksCommit(ctx, c, j, missing)
	}
	if err != nil {
		return bundleFault(ctx, j, err)
	}
	defer b.Close()
	if parts[0].Path == agentlab.ArtifactCheckpoint {
		b.Taken = parts[0].CreatedAt
		if len(parts) > 1 {
			err := b.Add(ctx, filepath.Join(dir, parts[1].Path), refs...)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err == nil {
				b.Taken = parts[1].CreatedAt
			} else {
				ui.Progressf("note: the newest part of the checkpoint is not used: %s", agentlab.WithoutControls(err.Error()))
			}
		}
		ui.Progressf("note: job %s is %s and has no result; this is the checkpoint of %s", j.ID, j.Status, work.LocalTime(b.Taken))
	}
	return fn(b, dir)
}

// workOf returns the artifacts with the commits and uncommitted changes of a job:
// its result, or the parts of its checkpoint in order.
func workOf(j api.Job) (parts []api.Artifact) {
	find := func(path string) *api.Artifact {
		i := slices.IndexFunc(j.Artifacts, func(f api.Artifact) bool { return f.Path == path })
		if i < 0 {
			return nil
		}
		return &j.Artifacts[i]
	}
	if result := find(agentlab.ArtifactResult); result != nil {
		return []api.Artifact{*result}
	}
	full, increment := find(agentlab.ArtifactCheckpoint), find(agentlab.ArtifactIncrement)
	if full == nil {
		return nil
	}
	parts = append(parts, *full)
	if increment != nil && !increment.CreatedAt.Before(full.CreatedAt) { // otherwise it continues an earlier one
		parts = append(parts, *increment)
	}
	return parts
}

// CheckpointTime returns when the checkpoint of a job was stored; "" if it has a
// result or nothing.
func CheckpointTime(j api.Job) string {
	w := workOf(j)
	if len(w) == 0 || w[0].Path != agentlab.ArtifactCheckpoint {
		return ""
	}
	return work.LocalTime(w[len(w)-1].CreatedAt)
}

// downloadWork downloads workOf(j) to dir. While the job runs, its checkpoint
// may be replaced: then it begins again.
func downloadWork(ctx context.Context, c *client.Client, j api.Job, dir string) ([]api.Artifact, error) {
	const tries = 5
	for range tries {
		parts := workOf(j)
		if len(parts) == 0 {
			return nil, noCommits(j)
		}
		complete := true
		for _, f := range parts {
			err := download(ctx, c, f, dir)
			if agentlab.CodeOf(err) == agentlab.CodeNotFound {
				complete = false
				break
			}
			if err != nil {
				return nil, err
			}
		}
		now, err := c.Job(ctx, j.ID)
		if err != nil {
			return nil, err
		}
		if complete && slices.Equal(workOf(now), parts) {
			return parts, nil
		}
		j = now
	}
	return nil, agentlab.Errorf(agentlab.CodeBusy, "the checkpoint of job %s was replaced during the download", j.ID).WithHint("run the command again")
}

func download(ctx context.Context, c *client.Client, f api.Artifact, dir string) error {
	body, err := c.Artifact(ctx, f.JobID, f.Path)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	_, err = work.SaveTo(filepath.Join(dir, f.Path), body, true, 0o644)
	return err
}

// bundleFault returns the error for a job's bundle that git rejects.
func bundleFault(ctx context.Context, j api.Job, err error) error {
	e, ours := errors.AsType[*agentlab.Error](err)
	if err == nil || ctx.Err() != nil || ours && e.Code != agentlab.CodeLimit {
		return err
	}
	code := agentlab.CodeConflict
	if ours {
		code = e.Code
	}
	return agentlab.Errorf(code, "git rejects the bundle of job %s: %s", j.ID, agentlab.WithoutControls(err.Error())).
		WithHint("nothing was fetched; list the artifacts instead: agentlab job artifacts %s", j.ID)
}

// lacksCommit returns the error for a bundle that requires a commit which the repository
// lacks. It can be of an earlier job on the same workspace.
func lacksCommit(ctx context.Context, c *client.Client, j api.Job, missing gitsafe.MissingCommit) error {
	fault := agentlab.Errorf(agentlab.CodeConflict, "git rejects the bundle of job %s: %s", j.ID, missing.Error())
	for earlier, err := range c.EachJob(ctx, client.JobQuery{}) {
		if err != nil {
			return err
		}
		if earlier.ID == j.ID || earlier.Result.HeadCommit != string(missing) {
			continue
		}
		if earlier, err = c.Job(ctx, earlier.ID); err != nil {
			return err
		}
		if len(workOf(earlier)) == 0 {
			return fault.WithHint("it continues commit %.12s of job %s, whose artifacts no longer exist; look for the commit in the workspace: git -C /work/repo log", string(missing), earlier.ID)
		}
		return fault.WithHint("it continues commit %.12s of job %s; fetch that first: agentlab job fetch %s", string(missing), earlier.ID, earlier.ID)
	}
	return fault.WithHint("it requires commit %.12s, which this repository lacks and no job has made; set --repo to the repository of the job", string(missing))
}

// fetchJobLFS is sessionRepo.fetchLFS for the commits of a job, which has its objects in
// an artifact.
func fetchJobLFS(ctx context.Context, ui work.UI, c *client.Client, j api.Job, b *gitsafe.Bundle) error {
	list, store, err := b.NewLFS(ctx)
	if err != nil || gitsafe.Lacks(store, list) == 0 {
		return bundleFault(ctx, j, err)
	}
	if slices.ContainsFunc(j.Artifacts, func(f api.Artifact) bool { return f.Path == agentlab.ArtifactLFS }) {
		body, err := c.Artifact(ctx, j.ID, agentlab.ArtifactLFS)
		if err != nil {
			return err
		}
		defer func() { _ = body.Close() }()
		want, _ := gitsafe.BoundedLFS(list)
		if _, err := store.Receive(body, want); err != nil {
			return bundleFault(ctx, j, err)
		}
	}
	gitsafe.NoteLFS(ui, gitsafe.Lacks(store, list))
	return nil
}
