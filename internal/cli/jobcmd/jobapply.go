package jobcmd

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

func jobApplyCmd(a *cli.App) *cobra.Command {
	var repo string
	var o source.Options
	cmd := &cobra.Command{
		Use:   "apply JOB [PATH...]",
		Short: "Apply a job's uncommitted changes to the work tree",
		Long: `Apply the uncommitted changes of a job's agent to the work tree of a local
repository; with paths, only those of these files and directories. A file that
differs from the one that the agent changed is merged (three-way). If a file
cannot be merged, nothing is applied. The index and branches do not change. Links that
lead out of the work tree are left out.

Merging into files with uncommitted changes requires confirmation or --force.
For the commits of the job see 'agentlab job fetch'. For a job without a result,
the changes are those of its last checkpoint.`,
		Args: cobra.MinimumNArgs(1),
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository")
	ApplyFlags(cmd, &o)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.Job(ctx, args[0])
		if err != nil {
			return err
		}
		if source.NoChanges(j) && len(args) == 1 {
			return nothingToApply(a, j, nil)
		}
		return source.WithResult(ctx, a, c, j, repo, func(b *gitsafe.Bundle, dir string) error {
			if source.WithoutChanges(b, j) && len(args) == 1 {
				return nothingToApply(a, j, b)
			}
			o.Paths = args[1:]
			return ApplyChanges(ctx, a, b, source.OfJob(j, b), dir, o)
		})
	})
	return cmd
}

// nothingToApply says that a job has no uncommitted changes; b is nil without a bundle.
func nothingToApply(a *cli.App, j api.Job, b *gitsafe.Bundle) error {
	a.Progressf("nothing to apply: job %s has no uncommitted changes", j.ID)
	source.NoteModuleDiffs(a, j)
	return a.Emit(source.OfJob(j, b).Applied([]string{}, 0, []string{}, nil), cli.Silent)
}

// ApplyFlags adds the flags of the commands that apply changes.
func ApplyFlags(cmd *cobra.Command, o *source.Options) {
	cmd.Flags().BoolVar(&o.Force, "force", false, "merge into files with uncommitted changes without confirmation")
	cmd.Flags().StringSliceVar(&o.Exclude, "exclude", nil, "leave out a file or directory (repeatable)")
}

// ApplyChanges applies the uncommitted changes in a bundle to the work tree, and prints
// what was applied.
func ApplyChanges(ctx context.Context, a *cli.App, b *gitsafe.Bundle, of source.Source, dir string, o source.Options) error {
	got, err := source.Apply(ctx, a, b, of, dir, o)
	if err != nil {
		return err
	}
	doc := of.Applied(got.Files, got.Same, got.Skipped, got.Found)
	if len(got.Pointers) > 0 {
		doc["lfs_pointers"] = got.Pointers
	}
	return a.Emit(doc, func() error {
		for _, name := range got.Files {
			fmt.Fprintln(a.Stdout, agentlab.WithoutControls(name))
		}
		for _, name := range got.Skipped {
			a.Progressf("note: the submodule %s is not changed", agentlab.WithoutControls(name))
		}
		for _, f := range got.Left {
			a.Progressf("note: %s is left out: it %s", agentlab.WithoutControls(f.Path), agentlab.WithoutControls(f.Why))
		}
		gitsafe.NoteNamed(a, got.Found)
		if len(got.Pointers) > 0 {
			a.Progressf("note: only the pointers of %s are written; to get the content, commit them, then:\n  → git lfs checkout", gitsafe.LFSNames(got.Pointers))
		}
		a.Progressf("applied %s; %d had the changes already\n  → git diff", agentlab.Plural(len(got.Files), "file"), got.Same)
		if n := of.NewCommits; n > 0 {
			a.Progressf("note: the %s also has %s\n  → %s", of.Kind, agentlab.Plural(n, "commit"), of.Commits)
		}
		return nil
	})
}
