package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

// The modes of synchronization while a terminal is attached.
const (
	syncManual   = "manual"
	syncOnCommit = "on-commit"
	syncOnIdle   = "on-idle"
)

// How often the branches of a session are read, and for how many reads they must stay
// the same to be idle.
const (
	syncEvery  = 5 * time.Second
	idleRounds = 4
	// After each fetch the next read is twice as late, until nothing has changed. A guest
	// that commits all the time so costs little.
	syncSlowest = 2 * time.Minute
	// syncTotal is the maximum of commits, in bytes, that one attached terminal fetches.
	syncTotal = 1 << 30
)

// syncMode returns the mode of a flag, or else of the configuration of a repository.
func syncMode(ctx context.Context, path, flag string) (string, error) {
	mode := flag
	if mode == "" {
		mode, _ = gitsafe.Git(ctx, path, "config", "--get", "agentlab.sync")
	}
	switch mode {
	case "":
		return syncManual, nil
	case syncManual, syncOnCommit, syncOnIdle:
		return mode, nil
	}
	return "", work.UsageErrorf("unknown mode of synchronization %q", mode).WithHint("use one of %s, %s, %s", syncManual, syncOnCommit, syncOnIdle)
}

// work attaches to the terminal of a session until the user detaches.
func (a *App) work(ctx context.Context, c *client.Client, l session.Link, got started, open guestapi.ExecRequest, mode string) error {
	sandbox := fmt.Sprint(got.Sandbox.VMID)
	a.Progressf("attaching to %s of session %s; detach with Ctrl-]", session.ShownPath(got.Dir), got.Session.Name)
	auto := a.startSync(ctx, newOpened(c, got.Session, got.Sandbox, l), mode)
	err := a.attached().Open(ctx, c, sandbox, open, nil)
	auto.stop()
	if err != nil {
		return err
	}
	auto.report(a)
	a.noteKeepsRunning(got.Session, true)
	return nil
}

// noteKeepsRunning says what follows after a terminal of a session; here reports whether
// it is the session of the repository in the current directory.
func (a *App) noteKeepsRunning(s api.Session, here bool) {
	sync := ""
	if here {
		sync = "\n  → agentlab sync"
	}
	a.Progressf("session %s keeps running%s\n  → agentlab stop %[1]s", s.Name, sync)
}

func (a *App) sessionDiffCmd() *cobra.Command {
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
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		if name != "" && len(args) > 0 {
			return work.UsageErrorf("a session and --session cannot be used together")
		}
		return a.withChanges(ctx, c, cmp.Or(name, firstOf(args)), worktree, false, func(b *gitsafe.Bundle, of source.Source) error {
			if b == nil {
				a.Progressf("session %s has no uncommitted changes", of.Name)
				return a.emit(of.Document([]source.ChangedFile{}, "", stat), silent)
			}
			return a.showChanges(ctx, b, of, stat)
		})
	})
	return cmd
}

func (a *App) sessionApplyCmd() *cobra.Command {
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
	applyFlags(cmd, &o)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, paths []string) error {
		return a.withChanges(ctx, c, name, worktree, true, func(b *gitsafe.Bundle, of source.Source) error {
			if b == nil {
				a.Progressf("nothing to apply: session %s has no uncommitted changes", of.Name)
				return a.emit(of.Applied([]string{}, 0, []string{}, nil), silent)
			}
			o.Paths = paths
			return a.applyChanges(ctx, b, of, b.Dir(), o)
		})
	})
	return cmd
}

// withChanges calls fn with the uncommitted changes of a work tree of a session; nil if
// there are none. With lfs, it gets their objects of Git LFS.
func (a *App) withChanges(ctx context.Context, c *client.Client, name, worktree string, lfs bool, fn func(*gitsafe.Bundle, source.Source) error) error {
	w, err := a.openSession(ctx, c, name)
	if err != nil {
		return err
	}
	defer a.leave(ctx, w)
	t, err := w.worktree(worktree)
	if err != nil {
		return err
	}
	of := source.Source{
		Kind: "session", ID: w.session.ID, Name: w.session.Name, Dir: t.Dir, Commits: "agentlab sync", Apply: "agentlab apply", Diff: "agentlab diff",
		Merge: "commit the changes in the session, then agentlab sync",
	}
	if t.Uncommitted == 0 {
		return fn(nil, of)
	}
	return w.fetchChanges(ctx, t, func(b *gitsafe.Bundle) error {
		if b != nil && b.Header.Refs[guestapi.RefChanges] == "" {
			b = nil // they have been committed since
		}
		if b != nil && lfs {
			missing, err := w.FetchLFS(ctx, b)
			if err != nil {
				return err
			}
			gitsafe.NoteLFS(a, missing)
		}
		return fn(b, of)
	})
}

// fetchChanges is fetch for the uncommitted changes of a work tree, with the commits that
// they are on top of.
func (w *openedSession) fetchChanges(ctx context.Context, t guestapi.RepoWorktree, fn func(*gitsafe.Bundle) error) error {
	var branches []string
	if t.Branch != "" && w.state.Branches[t.Branch] != "" {
		branches = []string{t.Branch}
	}
	return w.Fetch(ctx, branches, true, t.Dir, fn)
}

// removal says how a session is removed. command is the one that the user runs for it.
type removal struct {
	yes, force bool
	keepLink   bool // of the repository; only the session is deleted
	command    string
}

// removeSession deletes a session with its sandbox, after a check for work that is only
// there. Its workspace goes to the trash.
func (a *App) removeSession(ctx context.Context, c *client.Client, l *session.Link, how removal) error {
	s, err := c.Session(ctx, l.Session)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil
	}
	if err != nil {
		return err
	}
	if how.command == "" {
		how.command = "agentlab rm " + s.Name
	}
	if err := a.checkSynced(ctx, c, s, *l, how); err != nil {
		return err
	}
	if !how.yes {
		if !a.Confirm(fmt.Sprintf("Delete session %s with its sandbox?", s.Name)) {
			return work.UsageErrorf("session %s not deleted: not confirmed", s.Name).WithHint("delete it without confirmation with --yes")
		}
		if err := a.checkSynced(ctx, c, s, *l, how); err != nil { // its agent worked on while the question was open
			return err
		}
	}
	if s.Sandbox != "" {
		after := work.LastSandboxEvent(ctx, c, s)
		sb, err := c.StopSession(ctx, s.ID, false)
		if err == nil && !work.IsDestroyed(sb) {
			_, err = work.WaitSandbox(ctx, a, c, sb, after, work.IsDestroyed)
		}
		if err != nil && agentlab.CodeOf(err) != agentlab.CodeConflict { // it has none
			return err
		}
	}
	if err := a.destroyFailed(ctx, c, s); err != nil {
		return err
	}
	if err := c.DeleteSession(ctx, s.ID, false); err != nil {
		return err
	}
	a.Progressf("session %s is deleted; its workspace is in the trash\n  → agentlab workspace undelete %s", s.Name, s.WorkspaceID)
	if l.Remote == "" {
		return nil
	}
	err = source.ForgetApplied(ctx, l.Path, s.ID)
	if how.keepLink {
		return err
	}
	return errors.Join(err, l.Remove(ctx))
}

// checkSynced returns an error if a session has work that the user's repository does not
// have, unless it is removed with force.
func (a *App) checkSynced(ctx context.Context, c *client.Client, s api.Session, l session.Link, how removal) error {
	if how.force {
		return nil
	}
	left, st, err := a.unsynced(ctx, c, s, l)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeOf(err), "cannot find out whether session %s has work that is not here: %w", s.Name, err).
			WithHint("delete it nevertheless, its workspace goes to the trash: %s --force", how.command)
	}
	if len(left) > 0 {
		more := ""
		if st.Stashes == nil && st.Elsewhere > 0 || st.Stashes != nil && *st.Stashes > 0 {
			more = fmt.Sprintf("; and stashes, after 'agentlab start': agentlab exec %s -- git -C %s stash show --patch stash@{0} >stash.patch", s.Name, guestapi.RepoDir)
		}
		if len(st.ModuleWork) > 0 {
			more += "; and commits of submodules, with the commands that 'agentlab sync' prints"
		}
		return agentlab.Errorf(agentlab.CodeConflict, "session %s has work that is not here: %s", s.Name, strings.Join(left, "; ")).
			WithHint("get commits, in %s: agentlab sync --session %s --worktree BRANCH --into BRANCH; and uncommitted changes: agentlab apply --session %s%s; or delete it nevertheless, its workspace goes to the trash: %s --force", l.Path, s.Name, s.Name, more, how.command)
	}
	return nil
}

// unsynced lists the work of a session that the user's repository does not have, and
// returns the state of its repository. The sandbox is started for that if necessary:
// unknown is not absent.
func (a *App) unsynced(ctx context.Context, c *client.Client, s api.Session, l session.Link) (left []string, st guestapi.RepoState, err error) {
	if l.Remote == "" {
		return nil, st, agentlab.Errorf(agentlab.CodeConflict, "the current directory is not in its repository")
	}
	if w, err := c.Workspace(ctx, s.WorkspaceID); err != nil || w.Unused {
		return nil, st, err // it is empty
	}
	sb, err := a.resumeForWork(ctx, c, s, 0)
	if err != nil {
		return nil, st, err
	}
	w := newOpened(c, s, sb, l)
	w.Slow = a.slow
	defer func() {
		if err != nil || len(left) > 0 { // else the session is deleted
			a.leave(ctx, w)
		}
	}()
	if w.state, err = w.Repo.State(ctx); err != nil {
		return nil, st, err
	}
	if err := w.leaveOutApplied(ctx); err != nil {
		return nil, st, err
	}
	return onlyInSession(ctx, l, w.state), w.state, nil
}

// onlyInSession lists the work in a session that its repository here does not have. Refs
// of the session do not count: they are deleted with it.
func onlyInSession(ctx context.Context, l session.Link, st guestapi.RepoState) (left []string) {
	if len(st.Branches) == guestapi.MaxRepoBranches || len(st.Worktrees) == guestapi.MaxWorktrees {
		left = append(left, "more branches or work trees than are listed")
	}
	missing := func(what, commit string) {
		found, err := gitsafe.Git(ctx, l.Path, "for-each-ref", "--format=%(refname)", "--contains", commit)
		elsewhere := slices.ContainsFunc(strings.Fields(found), func(ref string) bool { return !strings.HasPrefix(ref, l.Ref("")) })
		switch {
		case err == nil && elsewhere:
		case err == nil && found != "":
			left = append(left, "commits of "+what+", which only "+l.Ref("*")+" has")
		default:
			left = append(left, "commits of "+what)
		}
	}
	for _, branch := range slices.Sorted(maps.Keys(st.Branches)) {
		missing(branch, st.Branches[branch])
	}
	for _, t := range st.Worktrees {
		if t.Branch == "" && t.Head != "" {
			missing("the detached HEAD of "+session.ShownGuest(t.Dir), t.Head)
		}
		if t.Uncommitted > 0 {
			left = append(left, fmt.Sprintf("%s with uncommitted changes in %s", agentlab.Plural(t.Uncommitted, "file"), session.ShownGuest(t.Dir)))
		}
	}
	stashes := 0
	if st.Stashes != nil {
		stashes = *st.Stashes
	}
	if stashes > 0 {
		left = append(left, agentlab.Plural(stashes, "stash entry"))
	}
	others := st.Elsewhere - stashes
	for i, dir := range slices.Sorted(maps.Keys(st.ModuleWork)) {
		n := st.ModuleWork[dir]
		if others -= n; i < maxModuleNotes {
			left = append(left, fmt.Sprintf("%s in the submodule %s", agentlab.Plural(n, "commit"), agentlab.WithoutControls(session.ShownGuest(dir))))
		}
	}
	if n := len(st.ModuleWork) - maxModuleNotes; n > 0 {
		left = append(left, fmt.Sprintf("commits in %d other submodules", n))
	}
	switch {
	case others == 0:
	case st.Stashes == nil:
		left = append(left, "stashes, or work outside of "+guestapi.ProjectDir)
	default:
		left = append(left, fmt.Sprintf("work trees outside of %s, or what jobs have put into %s", guestapi.ProjectDir, path.Join(guestapi.WorkspaceDir, guestapi.SavedDir)))
	}
	return left
}

// leaveOutApplied reduces the state to the uncommitted changes that the user's work tree
// does not have.
func (w *openedSession) leaveOutApplied(ctx context.Context) error {
	for i, t := range w.state.Worktrees {
		if t.Uncommitted == 0 {
			continue
		}
		n, err := w.uncommittedElsewhere(ctx, t)
		if err != nil {
			return err
		}
		w.state.Worktrees[i].Uncommitted = n
	}
	return nil
}

// uncommittedElsewhere returns how many files with uncommitted changes of a work tree of
// the session differ from the user's. The content is compared, which the guest sends: a
// guest that lies loses its own work.
func (w *openedSession) uncommittedElsewhere(ctx context.Context, t guestapi.RepoWorktree) (n int, err error) {
	err = w.fetchChanges(ctx, t, func(b *gitsafe.Bundle) error {
		if b == nil || b.Header.Refs[guestapi.RefChanges] == "" {
			n = t.Uncommitted // the guest contradicts itself
			return nil
		}
		n, err = source.Differing(ctx, b)
		return err
	})
	return n, err
}
