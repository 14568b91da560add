package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

func (a *App) worktreeCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "worktree", Short: "Manage the work trees of a session",
		Long: `Manage the work trees of the session of this repository. Each has a branch, at
/workspace/.worktrees/BRANCH in the sandbox, and its own terminal and agent.`,
		Example: `  agentlab worktree add fix-12
  agentlab claude --worktree fix-12
  agentlab sync --worktree fix-12 --into fix-12
  agentlab worktree rm fix-12`,
	}
	cmd.AddCommand(a.worktreeAddCmd(), a.worktreeListCmd(), a.worktreeRemoveCmd())
	return cmd
}

func (a *App) worktreeAddCmd() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "add BRANCH", Short: "Add a work tree", Args: exactArgs("BRANCH"),
		Long: `Add a work tree of a branch. A branch that exists here and not in the session is
pushed first; one that exists nowhere begins at the current commit here.`,
	}
	cmd.Flags().StringVar(&name, "session", "", "session (default: that of this repository)")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		src, err := a.sourceHead(ctx, ".", "")
		if err != nil {
			return err
		}
		w, err := a.openSession(ctx, c, name)
		if err != nil {
			return err
		}
		dir, err := a.worktreeDir(ctx, w.Repo, args[0], src)
		if err != nil {
			a.leave(ctx, w)
			return err
		}
		if w.wasStopped {
			a.Progressf("note: the sandbox of session %[1]s was started for this command, and runs now\n  → agentlab stop %[1]s", w.session.Name)
		}
		return a.done(map[string]string{"session_id": w.session.ID, "branch": args[0], "dir": dir},
			"work tree %s\n  → agentlab claude --worktree %s", session.ShownPath(dir), args[0])
	})
	return cmd
}

// worktreeDir returns the directory of the work tree of a branch in the guest, and adds
// it if it is missing. "" is the main one.
func (a *App) worktreeDir(ctx context.Context, r session.Repo, branch string, src gitsafe.LocalCommit) (string, error) {
	if branch == "" {
		return guestapi.RepoDir, nil
	}
	if err := session.CheckBranch(branch, ""); err != nil {
		return "", err
	}
	st, err := r.State(ctx)
	if err != nil {
		return "", err
	}
	for _, t := range st.Worktrees {
		if t.Branch == branch {
			return session.JoinGuest(t.Dir), nil
		}
	}
	commit := st.Branches[branch]
	if commit == "" {
		commit, err = gitsafe.Git(ctx, r.Path, "rev-parse", "--verify", "--quiet", "refs/heads/"+branch+"^{commit}")
		if err != nil || !gitsafe.IsCommit(commit) {
			commit = src.Commit
		}
		m := a.Meter()
		defer m.Done()
		faults, err := r.Push(ctx, session.Pushed{Updates: []guestapi.RepoUpdate{{Branch: branch, Commit: commit}}}, session.KnownTo(st), m)
		if err != nil {
			return "", err
		}
		if fault := faults[branch]; fault != "" {
			return "", agentlab.Errorf(agentlab.CodeConflict, "branch %s cannot be pushed to the session: %s", branch, fault)
		}
	}
	if err := r.Call(ctx, nil, io.Discard, "worktree", "add", branch); err != nil {
		return "", err
	}
	if _, err := gitsafe.Git(ctx, r.Path, "cat-file", "-e", commit+"^{commit}"); err == nil { // otherwise it is of the session
		if err := session.SendLFS(ctx, a, r, commit); err != nil {
			return "", err
		}
	}
	return session.JoinGuest(guestapi.WorktreesDir + "/" + branch), nil
}

// listedWorktree is a work tree under --json.
type listedWorktree struct {
	guestapi.RepoWorktree

	Dir string `json:"dir"` // absolute
}

func (a *App) worktreeListCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "list [SESSION]", Aliases: []string{"ls"}, Short: "List the work trees of a session", Args: cobra.MaximumNArgs(1)}
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		w, err := a.openSession(ctx, c, firstOf(args))
		if err != nil {
			return err
		}
		defer a.leave(ctx, w)
		doc := api.List[listedWorktree]{Items: []listedWorktree{}}
		for _, tree := range w.state.Worktrees {
			doc.Items = append(doc.Items, listedWorktree{tree, session.JoinGuest(tree.Dir)})
		}
		return a.emit(doc, func() error {
			t := newTable(a.Stdout, "BRANCH", "COMMIT", "UNCOMMITTED", "DIRECTORY")
			for _, tree := range w.state.Worktrees {
				t.row(orDash(tree.Branch), orDash(tree.Head[:min(12, len(tree.Head))]), fmt.Sprint(tree.Uncommitted), session.ShownGuest(tree.Dir))
			}
			return t.flush()
		})
	})
	return cmd
}

func (a *App) worktreeRemoveCmd() *cobra.Command {
	var name string
	var force, yes bool
	cmd := &cobra.Command{
		Use: "rm BRANCH", Short: "Remove a work tree; its branch stays", Args: exactArgs("BRANCH"),
		Long: `Remove a work tree from the sandbox. Its branch and commits stay. A work tree with
uncommitted changes is not removed without --force. Programs that run in it, such as
its agent, are ended after a confirmation or with --yes.`,
	}
	cmd.Flags().StringVar(&name, "session", "", "session (default: that of this repository)")
	cmd.Flags().BoolVar(&force, "force", false, "also lose uncommitted changes, and end what runs in it")
	cmd.Flags().BoolVar(&yes, "yes", false, "end what runs in it without confirmation")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		w, err := a.openSession(ctx, c, name)
		if err != nil {
			return err
		}
		defer a.leave(ctx, w)
		t, err := w.worktree(args[0])
		if err != nil {
			return err
		}
		if t.Dir == "" {
			return work.UsageErrorf("%s is checked out in /workspace itself", args[0]).WithHint("delete the session instead: agentlab rm")
		}
		if t.Uncommitted > 0 && !force {
			return agentlab.Errorf(agentlab.CodeConflict, "the work tree of %s has %s with uncommitted changes", args[0], agentlab.Plural(t.Uncommitted, "file")).
				WithHint("apply them: agentlab apply --worktree %s; or lose them: --force", args[0])
		}
		if err := a.endPrograms(ctx, w, t, yes || force); err != nil {
			return err
		}
		command := []string{"worktree", "remove"}
		if force {
			command = append(command, "--force")
		}
		// A terminal of the work tree would keep its directory in use.
		end := guestapi.ExecRequest{Command: []string{"agentlab-agent", "close", "--session", terminalName(args[0])}}
		if err := guestrun.Run(ctx, w.C, w.Sandbox, end, nil, io.Discard); err != nil {
			return err
		}
		if err := w.Call(ctx, nil, io.Discard, append(command, strings.TrimPrefix(t.Dir, guestapi.WorktreesDir+"/"))...); err != nil {
			return err
		}
		return a.done(map[string]string{"session_id": w.session.ID, "branch": args[0]}, "work tree of %s is removed", args[0])
	})
	return cmd
}
