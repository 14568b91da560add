package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
)

func (a *App) jobFetchCmd() *cobra.Command {
	var repo string
	var withChanges bool
	cmd := &cobra.Command{
		Use:   "fetch JOB",
		Short: "Fetch a job's commits into refs/agentlab/JOB of a local repository",
		Long: `Fetch a job's commits into refs/agentlab/JOB of a local repository. Nothing
is checked out or merged, and no branch of yours moves. Look at the work with
'git log refs/agentlab/JOB', take it with 'git merge refs/agentlab/JOB'.

With --with-changes, what the agent left uncommitted is fetched too, as one
commit on top in refs/agentlab/JOB-changes. 'agentlab job apply' puts it into
the work tree instead.

For a job that has ended and made no commits, the command says so and exits
with 0.`,
		Args: exactArgs("JOB"),
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository to fetch into")
	cmd.Flags().BoolVar(&withChanges, "with-changes", false, "fetch uncommitted changes into refs/agentlab/JOB-changes")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.Job(ctx, args[0])
		if err != nil {
			return err
		}
		got, err := fetchJob(ctx, c, j, repo, withChanges)
		if errors.Is(err, errNoCommits) && madeNothing(j, withChanges) {
			return a.nothingToFetch(j)
		}
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(got)
		}
		if got.Ref != "" {
			fmt.Fprintf(a.Stdout, "%s %s\n", got.Ref, got.Commit)
			a.progressf("  → git log -p HEAD..%s\n  → git merge %s", got.Ref, got.Ref)
		}
		if got.ChangesRef != "" {
			fmt.Fprintf(a.Stdout, "%s %s\n", got.ChangesRef, got.Changes)
			a.progressf("  → git show %s\n  → git cherry-pick --no-commit %s", got.ChangesRef, got.ChangesRef)
		} else if n := j.Result.Uncommitted; n > 0 {
			a.progressf("note: %d file(s) of the job are not committed\n  → agentlab job diff %s", n, j.ID)
		}
		return nil
	})
	return cmd
}

// madeNothing reports that a job has ended, that its result is known, and that
// the result has nothing to fetch.
func madeNothing(j api.Job, withChanges bool) bool {
	r := j.Result
	known := r.HeadCommit != "" || j.RepoURL == "" && !j.Bundled
	commits := r.Commits > 0 || r.HeadCommit != r.BaseCommit // 0 is also the number of those that could not be counted
	changes := withChanges && (r.Uncommitted > 0 || r.Dirty)
	return known && agentlab.JobStatus(j.Status).Final() && !commits && !changes
}

func (a *App) nothingToFetch(j api.Job) error {
	a.progressf("nothing to fetch: %s made no commits", j.ID)
	if n := j.Result.Uncommitted; n > 0 {
		a.progressf("note: %d file(s) of the job are not committed\n  → agentlab job fetch --with-changes %s\n  → agentlab job apply %s", n, j.ID, j.ID)
	}
	a.noteModuleDiffs(j)
	if a.json {
		return a.printJSON(fetched{Code: agentlab.CodeNotFound})
	}
	return nil
}

// fetched is what a job's bundle gave to a repository.
type fetched struct {
	Code       agentlab.Code `json:"code,omitempty"` // not_found: the job made no commits
	Ref        string        `json:"ref,omitempty"`
	Commit     string        `json:"commit,omitempty"`
	Commits    int           `json:"commits"`
	ChangesRef string        `json:"changes_ref,omitempty"`
	Changes    string        `json:"changes_commit,omitempty"`
}

// fetchJob takes the one branch of the job's bundle into refs/agentlab/JOB,
// and its uncommitted changes on demand. No other ref is taken, and nothing is
// checked out.
func fetchJob(ctx context.Context, c *client.Client, j api.Job, repo string, withChanges bool) (fetched, error) {
	var got fetched
	err := withResult(ctx, c, j, repo, func(b *takenBundle, _ string) error {
		refs := map[string]string{}
		if commit := b.header.refs[resultBranch(j)]; commit != "" {
			got.Ref, got.Commit, got.Commits = "refs/agentlab/"+j.ID, commit, j.Result.Commits
			refs[got.Ref] = resultBranch(j)
		}
		if commit := b.header.refs[guestapi.RefChanges]; commit != "" && withChanges {
			got.ChangesRef, got.Changes = "refs/agentlab/"+j.ID+"-changes", commit
			refs[got.ChangesRef] = guestapi.RefChanges
		}
		if len(refs) == 0 {
			return noCommits(j)
		}
		return bundleFault(ctx, j, b.keep(ctx, refs))
	})
	return got, err
}

// resultBundle is the artifact that holds a job's new commits and its
// uncommitted changes.
const resultBundle = "result.bundle"

func resultBranch(j api.Job) string { return "refs/heads/agentlab/" + j.ID }

var errNoCommits = errors.New("left no commits")

func noCommits(j api.Job) error {
	err := agentlab.Errorf(agentlab.CodeNotFound, "job %s %w (it is %s)", j.ID, errNoCommits, j.Status)
	if r := j.Result; r.HeadCommit != "" && r.HeadCommit != r.BaseCommit {
		err = agentlab.Errorf(agentlab.CodeNotFound, "job %s %w that can be fetched (it is %s): its branch is at %.12s, and no bundle contains that commit",
			j.ID, errNoCommits, j.Status, r.HeadCommit)
	}
	if j.Result.Uncommitted > 0 {
		return err.WithHint("it left %d file(s) uncommitted: agentlab job diff %s, agentlab job apply %s", j.Result.Uncommitted, j.ID, j.ID)
	}
	return err.WithHint("look at its artifacts: agentlab job artifacts %s", j.ID)
}

// withResult downloads the job's bundle, checks every object against the
// repository at path repo, and calls fn with it and a temporary folder. The
// bundle was written by an untrusted guest.
func withResult(ctx context.Context, c *client.Client, j api.Job, repo string, fn func(b *takenBundle, dir string) error) error {
	if _, err := git(ctx, repo, "rev-parse", "--git-dir"); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a git repository: %v", repo, err).WithHint("give its path with --repo")
	}
	body, err := c.Artifact(ctx, j.ID, resultBundle)
	if err != nil {
		if agentlab.CodeOf(err) == agentlab.CodeNotFound {
			return noCommits(j)
		}
		return err
	}
	defer func() { _ = body.Close() }()
	dir, err := os.MkdirTemp("", "agentlab-fetch-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, resultBundle)
	if _, err := saveTo(file, body, false); err != nil {
		return err
	}
	b, err := openBundle(ctx, dir, file, repo, resultBranch(j), guestapi.RefChanges)
	if err != nil {
		return bundleFault(ctx, j, err)
	}
	defer b.close()
	return fn(b, dir)
}

// bundleFault makes an error of what git says about a job's bundle.
func bundleFault(ctx context.Context, j api.Job, err error) error {
	e, ours := errors.AsType[*agentlab.Error](err)
	if err == nil || ctx.Err() != nil || ours && e.Code != agentlab.CodeLimit {
		return err
	}
	code := agentlab.CodeConflict
	if ours {
		code = e.Code
	}
	fault := agentlab.Errorf(code, "git does not take the bundle of job %s: %s", j.ID, plain(err.Error()))
	if errors.Is(err, errLacksBase) {
		return fault.WithHint("it builds on commit %.12s, which this repository must have; use the repository that the job came from, with --repo", j.Result.BaseCommit)
	}
	return fault.WithHint("nothing of it was taken; look at the artifacts instead: agentlab job artifacts %s", j.ID)
}
