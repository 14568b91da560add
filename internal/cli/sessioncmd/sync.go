package sessioncmd

import (
	"cmp"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

func syncCmd(a *cli.App) *cobra.Command {
	var into, worktree, name string
	var fetchOnly, artifacts bool
	o := transfer.ArtifactOptions{Gib: 16}
	cmd := &cobra.Command{
		Use:   "sync [SESSION] | sync --artifacts [PATTERN...]",
		Short: "Fetch the commits or the artifacts of a session",
		Long: `Fetch the commits of the session of this repository and merge them into the current
branch: fast-forward if possible, else with a merge commit. Conflicts remain in the
work tree, as after 'git merge'. All branches of the session are in
refs/remotes/agentlab. No other ref of this repository changes.

Everything is checked before git uses it. No hook, filter or other program of the
repository runs. New or changed files that programs of this machine execute or obey
without a command, such as .envrc, .vscode and git hooks, must be confirmed; without a
terminal nothing is merged ('git config agentlab.return' is ask, hold or allow). Files
that make a directory a git repository and links out of the work tree are refused.
Uncommitted changes in the sandbox stay there; see 'agentlab diff'
and 'agentlab apply'.

With --artifacts, files that git does not carry are copied instead, and no commits:
those that match a PATTERN, or else the outputs of .agentlab.yaml in the work tree here.
Only regular files are copied. A file that git tracks here is never replaced, and any
other file that differs only with --force. What .agentlabignore names is left out. Either
everything is copied, or nothing.`,
		Example: `  agentlab sync
  agentlab sync --into review
  agentlab sync --worktree fix-12
  agentlab sync --fetch-only && git log -p HEAD..agentlab/main
  agentlab sync --artifacts
  agentlab sync --artifacts 'dist/**' '*.log' --force`,
		Args: func(cmd *cobra.Command, args []string) error {
			if artifacts {
				return nil
			}
			return cobra.MaximumNArgs(1)(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&artifacts, "artifacts", false, "copy files that git does not carry, and no commits")
	cmd.Flags().BoolVar(&o.Force, "force", false, "with --artifacts: replace existing files that git does not track")
	cli.Between(cmd.Flags(), &o.Gib, "max-size", 1, 1<<20, "with --artifacts: limit of the copy, in GiB")
	cmd.Flags().StringVar(&into, "into", "", "branch to merge into; it is created if it is missing (default: the current one)")
	cmd.Flags().StringVar(&worktree, "worktree", "", "merge this branch of the session, or copy artifacts from its work tree (default: the one with the name of the current branch; for artifacts /workspace)")
	cmd.Flags().StringVar(&name, "session", "", "session, instead of the argument (default: that of this repository)")
	cmd.Flags().BoolVar(&fetchOnly, "fetch-only", false, "fetch, and merge nothing")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if fetchOnly && into != "" {
			return work.UsageErrorf("--fetch-only and --into cannot be used together")
		}
		switch {
		case artifacts && (fetchOnly || into != ""):
			return work.UsageErrorf("--artifacts cannot be used with --fetch-only or --into").WithHint("run 'agentlab sync' for the commits")
		case artifacts:
			o.Patterns, o.Worktree, o.Session = args, worktree, name
			return syncArtifacts(ctx, a, c, o)
		case o.Force || cmd.Flags().Changed("max-size"):
			return work.UsageErrorf("--force and --max-size require --artifacts")
		}
		if name != "" && len(args) > 0 {
			return work.UsageErrorf("a session and --session cannot be used together")
		}
		return syncCommits(ctx, a, c, cmp.Or(name, cli.FirstOf(args)), into, worktree, fetchOnly)
	})
	return cmd
}

// syncCommits fetches the commits of a session, and merges a branch of it.
func syncCommits(ctx context.Context, a *cli.App, c *client.Client, name, into, worktree string, fetchOnly bool) error {
	w, err := session.Open(ctx, a, c, name)
	if err != nil {
		return err
	}
	defer session.Leave(ctx, a, w)
	got, err := session.Sync(ctx, a, w, into, worktree, fetchOnly)
	if err != nil {
		printHeads(a, w, got)
		return err
	}
	return a.Emit(got, func() error { return printSynced(a, w, got) })
}

// printHeads prints the refs that were fetched; with --json they are in the document.
func printHeads(a *cli.App, w *session.Opened, got session.Synced) {
	for _, h := range got.Fetched {
		if !a.JSON {
			fmt.Fprintf(a.Stdout, "%s %.12s %s\n", w.Link.Remote+"/"+h.Branch, h.Commit, agentlab.Plural(h.Commits, "new commit"))
		}
	}
}

// printSynced prints what a sync has fetched, and says what it has merged.
func printSynced(a *cli.App, w *session.Opened, got session.Synced) error {
	printHeads(a, w, got)
	session.NoteSynced(a, w, got)
	return nil
}
