package sessioncmd

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

func worktreeCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "worktree", Short: "Manage the work trees of a session",
		Long: `Manage the work trees of the session of this repository. Each has a branch, at
/workspace/.worktrees/BRANCH in the sandbox, and its own terminal and agent.`,
		Example: `  agentlab worktree add fix-12
  agentlab claude --worktree fix-12
  agentlab sync --worktree fix-12 --into fix-12
  agentlab worktree rm fix-12`,
	}
	cmd.AddCommand(worktreeAddCmd(a), worktreeListCmd(a), worktreeRemoveCmd(a))
	return cmd
}

func worktreeAddCmd(a *cli.App) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "add BRANCH", Short: "Add a work tree", Args: cli.ExactArgs("BRANCH"),
		Long: `Add a work tree of a branch. A branch that exists here and not in the session is
pushed first; one that exists nowhere begins at the current commit here.`,
	}
	cmd.Flags().StringVar(&name, "session", "", "session (default: that of this repository)")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		src, err := session.SourceHead(ctx, a, ".", "")
		if err != nil {
			return err
		}
		w, err := session.Open(ctx, a, c, name)
		if err != nil {
			return err
		}
		dir, err := session.WorktreeDir(ctx, a, w.Repo, args[0], src)
		if err != nil {
			session.Leave(ctx, a, w)
			return err
		}
		if w.WasStopped {
			a.Progressf("note: the sandbox of session %[1]s was started for this command, and runs now\n  → agentlab stop %[1]s", w.Session.Name)
		}
		return a.Done(map[string]string{"session_id": w.Session.ID, "branch": args[0], "dir": dir},
			"work tree %s\n  → agentlab claude --worktree %s", session.ShownPath(dir), args[0])
	})
	return cmd
}

// listedWorktree is a work tree under --json.
type listedWorktree struct {
	guestapi.RepoWorktree

	Dir string `json:"dir"` // absolute
}

func worktreeListCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "list [SESSION]", Aliases: []string{"ls"}, Short: "List the work trees of a session", Args: cobra.MaximumNArgs(1)}
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		w, err := session.Open(ctx, a, c, cli.FirstOf(args))
		if err != nil {
			return err
		}
		defer session.Leave(ctx, a, w)
		doc := api.List[listedWorktree]{Items: []listedWorktree{}}
		for _, tree := range w.Guest.Worktrees {
			doc.Items = append(doc.Items, listedWorktree{tree, session.JoinGuest(tree.Dir)})
		}
		return a.Emit(doc, func() error {
			t := cli.NewTable(a.Stdout, "BRANCH", "COMMIT", "UNCOMMITTED", "DIRECTORY")
			for _, tree := range w.Guest.Worktrees {
				t.Row(cli.OrDash(tree.Branch), cli.OrDash(tree.Head[:min(12, len(tree.Head))]), fmt.Sprint(tree.Uncommitted), session.ShownGuest(tree.Dir))
			}
			return t.Flush()
		})
	})
	return cmd
}

func worktreeRemoveCmd(a *cli.App) *cobra.Command {
	var name string
	var force, yes bool
	cmd := &cobra.Command{
		Use: "rm BRANCH", Short: "Remove a work tree; its branch stays", Args: cli.ExactArgs("BRANCH"),
		Long: `Remove a work tree from the sandbox. Its branch and commits stay. A work tree with
uncommitted changes is not removed without --force. Programs that run in it, such as
its agent, are ended after a confirmation or with --yes.`,
	}
	cmd.Flags().StringVar(&name, "session", "", "session (default: that of this repository)")
	cmd.Flags().BoolVar(&force, "force", false, "also lose uncommitted changes, and end what runs in it")
	cmd.Flags().BoolVar(&yes, "yes", false, "end what runs in it without confirmation")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		w, err := session.Open(ctx, a, c, name)
		if err != nil {
			return err
		}
		defer session.Leave(ctx, a, w)
		if err := session.RemoveWorktree(ctx, a, w, args[0], force, yes); err != nil {
			return err
		}
		return a.Done(map[string]string{"session_id": w.Session.ID, "branch": args[0]}, "work tree of %s is removed", args[0])
	})
	return cmd
}
