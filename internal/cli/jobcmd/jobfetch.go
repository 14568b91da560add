package jobcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

func jobFetchCmd(a *cli.App) *cobra.Command {
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
		Args: cli.ExactArgs("JOB"),
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository")
	cmd.Flags().BoolVar(&withChanges, "with-changes", false, "also fetch uncommitted changes into refs/agentlab/JOB-changes")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.Job(ctx, args[0])
		if err != nil {
			return err
		}
		got, err := source.FetchJob(ctx, a, c, j, repo, withChanges)
		if errors.Is(err, source.ErrNoCommits) && (got.Checkpoint != nil || source.HasNothing(j, withChanges)) {
			return nothingToFetch(a, j, got)
		}
		if err != nil {
			return err
		}
		if got.Found, err = gitsafe.JudgeFetched(ctx, repo, cmp.Or(got.Changes, got.Commit)); err != nil {
			return agentlab.Errorf(agentlab.CodeOf(err), "the commits of job %s are fetched and cannot be checked: %w", j.ID, err).
				WithHint("do not check them out before you have read them: git log --stat HEAD..%s", cmp.Or(got.ChangesRef, got.Ref))
		}
		got.Findings = gitsafe.FindingsJSON(got.Found)
		return a.Emit(got, func() error { return printFetched(a, j, got) })
	})
	return cmd
}

func printFetched(a *cli.App, j api.Job, got source.Fetched) error {
	gitsafe.NoteFetched(a, got.Found, "git diff HEAD..."+cmp.Or(got.ChangesRef, got.Ref))
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

func nothingToFetch(a *cli.App, j api.Job, got source.Fetched) error {
	a.Progressf("nothing to fetch: job %s has no commits", j.ID)
	what := ""
	switch {
	case got.Left:
		what = "uncommitted changes"
	case j.Result.Uncommitted > 0:
		what = session.UncommittedFiles(j.Result.Uncommitted)
	}
	if what != "" {
		a.Progressf("note: %s\n  → agentlab job fetch --with-changes %s\n  → agentlab job apply %s", what, j.ID, j.ID)
	}
	source.NoteModuleDiffs(a, j)
	return a.Emit(got, cli.Silent)
}
