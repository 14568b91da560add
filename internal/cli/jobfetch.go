package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

func (a *App) jobFetchCmd() *cobra.Command {
	var repo string
	var withChanges bool
	cmd := &cobra.Command{
		Use:   "fetch JOB",
		Short: "Fetch a job's commits into refs/agentlab/JOB of a local repository",
		Long: `Fetch a job's commits into refs/agentlab/JOB of a local repository. Nothing is
checked out or merged, and no branch changes. Files that programs of this machine
execute or obey without a command after a merge are named. Inspect the commits with 'git log
refs/agentlab/JOB', merge them with 'git merge refs/agentlab/JOB'.

With --with-changes, also fetch the uncommitted changes of the agent, as one
commit in refs/agentlab/JOB-changes on top of the others. 'agentlab job apply'
applies them to the work tree instead.

While a job runs, and when it has ended without a result (for example because its
VM was lost), the command uses the last checkpoint of the agent's work, and says
from when it is.

If the result or the checkpoint has no commits, the command says so and exits with 0.`,
		Args: exactArgs("JOB"),
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository")
	cmd.Flags().BoolVar(&withChanges, "with-changes", false, "also fetch uncommitted changes into refs/agentlab/JOB-changes")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.Job(ctx, args[0])
		if err != nil {
			return err
		}
		got, err := a.fetchJob(ctx, c, j, repo, withChanges)
		if errors.Is(err, errNoCommits) && (got.Checkpoint != nil || hasNothing(j, withChanges)) {
			return a.nothingToFetch(j, got)
		}
		if err != nil {
			return err
		}
		if got.found, err = gitsafe.JudgeFetched(ctx, repo, cmp.Or(got.Changes, got.Commit)); err != nil {
			return agentlab.Errorf(agentlab.CodeOf(err), "the commits of job %s are fetched and cannot be checked: %w", j.ID, err).
				WithHint("do not check them out before you have read them: git log --stat HEAD..%s", cmp.Or(got.ChangesRef, got.Ref))
		}
		got.Findings = gitsafe.FindingsJSON(got.found)
		return a.emit(got, func() error { return a.printFetched(j, got) })
	})
	return cmd
}

func (a *App) printFetched(j api.Job, got fetched) error {
	gitsafe.NoteFetched(a, got.found, "git diff HEAD..."+cmp.Or(got.ChangesRef, got.Ref))
	if got.Ref != "" {
		fmt.Fprintf(a.Stdout, "%s %s\n", got.Ref, got.Commit)
		a.Progressf("  → git log -p HEAD..%s\n  → git merge %s", got.Ref, got.Ref)
	}
	if got.ChangesRef != "" {
		fmt.Fprintf(a.Stdout, "%s %s\n", got.ChangesRef, got.Changes)
		a.Progressf("  → git show %s\n  → git cherry-pick --no-commit %s", got.ChangesRef, got.ChangesRef)
	} else if n := j.Result.Uncommitted; n > 0 {
		a.Progressf("note: %s with uncommitted changes\n  → agentlab job diff %s", agentlab.Plural(n, "file"), j.ID)
	}
	return nil
}

// hasResult reports whether the result of a job is known: a job without a
// repository has none to wait for.
func hasResult(j api.Job) bool { return j.Result.HeadCommit != "" || j.RepoURL == "" && !j.Bundled }

// hasNothing reports whether a job has ended with a known result that has
// nothing to fetch.
func hasNothing(j api.Job, withChanges bool) bool {
	r := j.Result
	commits := r.Commits > 0 || r.HeadCommit != r.BaseCommit // 0 also means that they could not be counted
	changes := withChanges && (r.Uncommitted > 0 || r.Dirty)
	return hasResult(j) && agentlab.JobStatus(j.Status).Final() && !commits && !changes
}

func (a *App) nothingToFetch(j api.Job, got fetched) error {
	a.Progressf("nothing to fetch: job %s has no commits", j.ID)
	what := ""
	switch {
	case got.left:
		what = "uncommitted changes"
	case j.Result.Uncommitted > 0:
		what = uncommittedFiles(j.Result.Uncommitted)
	}
	if what != "" {
		a.Progressf("note: %s\n  → agentlab job fetch --with-changes %s\n  → agentlab job apply %s", what, j.ID, j.ID)
	}
	a.noteModuleDiffs(j)
	return a.emit(got, silent)
}

// fetched are the refs that were set from a job's bundle; none if it has no commits.
type fetched struct {
	Ref        string `json:"ref,omitempty"`
	Commit     string `json:"commit,omitempty"`
	Commits    int    `json:"commits"`
	ChangesRef string `json:"changes_ref,omitempty"`
	Changes    string `json:"changes_commit,omitempty"`

	Checkpoint *checkpoint       `json:"checkpoint,omitempty"` // nil: they are the result of the job
	Findings   []gitsafe.Finding `json:"findings,omitempty"`   // of the return check, about a merge into HEAD

	found []returncheck.Finding
	left  bool // the checkpoint has uncommitted changes, which were not asked for
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

// fetchJob fetches the branch of the job's bundle into refs/agentlab/JOB, and
// with withChanges its uncommitted changes. It takes no other ref and checks
// nothing out.
func (a *App) fetchJob(ctx context.Context, c *client.Client, j api.Job, repo string, withChanges bool) (fetched, error) {
	var got fetched
	err := a.withResult(ctx, c, j, repo, func(b *gitsafe.Bundle, _ string) (err error) {
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
			got.left = b.Header.Refs[guestapi.RefChanges] != ""
			return errNoCommits
		}
		if len(refs) == 0 {
			return noCommits(j)
		}
		if err := a.fetchJobLFS(ctx, c, j, b); err != nil {
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

var errNoCommits = errors.New("has no commits")

// noCommits returns why a job has no bundle.
func noCommits(j api.Job) error {
	if !agentlab.JobStatus(j.Status).Final() {
		return agentlab.Errorf(agentlab.CodeNotFound, "job %s has not ended (it is %s) and has no checkpoint yet; its result is uploaded at its end", j.ID, j.Status).
			WithHint("wait for it: agentlab job logs --follow %s", j.ID)
	}
	err := agentlab.Errorf(agentlab.CodeNotFound, "job %s %w (it is %s)", j.ID, errNoCommits, j.Status)
	if r := j.Result; r.HeadCommit != "" && r.HeadCommit != r.BaseCommit {
		err = agentlab.Errorf(agentlab.CodeNotFound, "job %s %w that can be fetched (it is %s): its branch is at %.12s, and no bundle contains that commit",
			j.ID, errNoCommits, j.Status, r.HeadCommit)
	}
	if n := j.Result.Uncommitted; n > 0 {
		return err.WithHint("%s with uncommitted changes: agentlab job diff %s, agentlab job apply %s", agentlab.Plural(n, "file"), j.ID, j.ID)
	}
	return err.WithHint("list its artifacts: agentlab job artifacts %s", j.ID)
}

// withResult downloads the job's bundle, checks every object against the
// repository, and calls fn with it and a temporary directory. An untrusted guest
// wrote the bundle. A job without a result can have a checkpoint.
func (a *App) withResult(ctx context.Context, c *client.Client, j api.Job, repo string, fn func(b *gitsafe.Bundle, dir string) error) error {
	if _, err := gitsafe.Git(ctx, repo, "rev-parse", "--git-dir"); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a git repository: %v", repo, err).WithHint("set --repo to the path of one")
	}
	dir, remove, err := gitsafe.TempDir("agentlab-fetch-*")
	if err != nil {
		return err
	}
	defer remove()
	work, err := downloadWork(ctx, c, j, dir)
	if err != nil {
		return err
	}
	refs := []string{resultBranch(j), guestapi.RefChanges}
	b, err := gitsafe.OpenBundle(ctx, dir, filepath.Join(dir, work[0].Path), repo, refs...)
	if errors.Is(err, gitsafe.ErrNoRefs) && work[0].Path == agentlab.ArtifactResult { // it has only other branches
		return noCommits(j)
	}
	if missing, ok := errors.AsType[gitsafe.MissingCommit](err); ok && ctx.Err() == nil {
		return lacksCommit(ctx, c, j, missing)
	}
	if err != nil {
		return bundleFault(ctx, j, err)
	}
	defer b.Close()
	if work[0].Path == agentlab.ArtifactCheckpoint {
		b.Taken = work[0].CreatedAt
		if len(work) > 1 {
			err := b.Add(ctx, filepath.Join(dir, work[1].Path), refs...)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err == nil {
				b.Taken = work[1].CreatedAt
			} else {
				a.Progressf("note: the newest part of the checkpoint is not used: %s", agentlab.WithoutControls(err.Error()))
			}
		}
		a.Progressf("note: job %s is %s and has no result; this is the checkpoint of %s", j.ID, j.Status, localTime(b.Taken))
	}
	return fn(b, dir)
}

// workOf returns the artifacts with the commits and uncommitted changes of a job:
// its result, or the parts of its checkpoint in order.
func workOf(j api.Job) (work []api.Artifact) {
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
	work = append(work, *full)
	if increment != nil && !increment.CreatedAt.Before(full.CreatedAt) { // otherwise it continues an earlier one
		work = append(work, *increment)
	}
	return work
}

// checkpointTime returns when the checkpoint of a job was stored; "" if it has a
// result or nothing.
func checkpointTime(j api.Job) string {
	w := workOf(j)
	if len(w) == 0 || w[0].Path != agentlab.ArtifactCheckpoint {
		return ""
	}
	return localTime(w[len(w)-1].CreatedAt)
}

// downloadWork downloads workOf(j) to dir. While the job runs, its checkpoint
// may be replaced: then it begins again.
func downloadWork(ctx context.Context, c *client.Client, j api.Job, dir string) ([]api.Artifact, error) {
	const tries = 5
	for range tries {
		work := workOf(j)
		if len(work) == 0 {
			return nil, noCommits(j)
		}
		complete := true
		for _, f := range work {
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
		if complete && slices.Equal(workOf(now), work) {
			return work, nil
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
