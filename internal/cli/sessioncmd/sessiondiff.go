package sessioncmd

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/jobcmd"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

func sessionDiffCmd(a *cli.App) *cobra.Command {
	var name, worktree string
	var stat bool
	cmd := &cobra.Command{
		Use: "diff [SESSION]", Short: "Show the uncommitted changes in a session", Args: cobra.MaximumNArgs(1),
		Long: `Show the uncommitted changes in the session of this repository, against the last
commit there. Nothing changes here. Commits are fetched by 'agentlab sync'.

On a terminal, the pager of git shows them. Elsewhere they are a patch for
'git apply', binary files included.`,
	}
	cmd.Flags().StringVar(&name, "session", "", "session, instead of the argument (default: that of this repository)")
	cmd.Flags().StringVar(&worktree, "worktree", "", "branch of the work tree (default: the main one)")
	cmd.Flags().BoolVar(&stat, "stat", false, "list the files instead of their content")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if name != "" && len(args) > 0 {
			return work.UsageErrorf("a session and --session cannot be used together")
		}
		return session.WithChanges(ctx, a, c, cmp.Or(name, cli.FirstOf(args)), worktree, false, func(b *gitsafe.Bundle, of source.Source) error {
			if b == nil {
				a.Progressf("session %s has no uncommitted changes", of.Name)
				return a.Emit(of.Document([]source.ChangedFile{}, "", stat), cli.Silent)
			}
			return jobcmd.ShowChanges(ctx, a, b, of, stat)
		})
	})
	return cmd
}

func sessionApplyCmd(a *cli.App) *cobra.Command {
	var name, worktree string
	var o source.Options
	cmd := &cobra.Command{
		Use: "apply [PATH...]", Short: "Apply the uncommitted changes in a session to the work tree",
		Long: `Apply the uncommitted changes in the session of this repository to the work tree here;
with paths, only those of these files and directories. A file that differs from the
one that was changed is merged (three-way). If a file cannot be merged, nothing is
applied. The index and branches do not change, and the changes stay in the session.
Links that lead out of the work tree are left out.`,
		Example: "  agentlab diff --stat\n  agentlab apply src --exclude src/gen",
	}
	cmd.Flags().StringVar(&name, "session", "", "session (default: that of this repository)")
	cmd.Flags().StringVar(&worktree, "worktree", "", "branch of the work tree (default: the main one)")
	jobcmd.ApplyFlags(cmd, &o)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, paths []string) error {
		return session.WithChanges(ctx, a, c, name, worktree, true, func(b *gitsafe.Bundle, of source.Source) error {
			if b == nil {
				a.Progressf("nothing to apply: session %s has no uncommitted changes", of.Name)
				return a.Emit(of.Applied([]string{}, 0, []string{}, nil), cli.Silent)
			}
			o.Paths = paths
			return jobcmd.ApplyChanges(ctx, a, b, of, b.Dir(), o)
		})
	})
	return cmd
}
