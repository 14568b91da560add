package session

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

// Removal says how a session is removed. command is the command that the user runs for it.
type Removal struct {
	Yes, Force bool
	keepLink   bool // of the repository; only the session is deleted
	Command    string
}

// Remove deletes a session with its sandbox, after a check for work that is only
// there. Its workspace goes to the trash.
func Remove(ctx context.Context, ui work.UI, c *client.Client, l *Link, how Removal) error {
	s, err := c.Session(ctx, l.Session)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil
	}
	if err != nil {
		return err
	}
	if how.Command == "" {
		how.Command = "agentlab rm " + s.Name
	}
	if err := checkSynced(ctx, ui, c, s, *l, how); err != nil {
		return err
	}
	if !how.Yes {
		if !ui.Confirm(fmt.Sprintf("Delete session %s with its sandbox?", s.Name)) {
			return work.UsageErrorf("session %s not deleted: not confirmed", s.Name).WithHint("delete it without confirmation with --yes")
		}
		if err := checkSynced(ctx, ui, c, s, *l, how); err != nil { // its agent worked on while the question was open
			return err
		}
	}
	if s.Sandbox != "" {
		after := work.LastSandboxEvent(ctx, c, s)
		sb, err := c.StopSession(ctx, s.ID, false)
		if err == nil && !work.IsDestroyed(sb) {
			_, err = work.WaitSandbox(ctx, ui, c, sb, after, work.IsDestroyed)
		}
		if err != nil && agentlab.CodeOf(err) != agentlab.CodeConflict { // it has none
			return err
		}
	}
	if err := destroyFailed(ctx, ui, c, s); err != nil {
		return err
	}
	if err := c.DeleteSession(ctx, s.ID, false); err != nil {
		return err
	}
	ui.Progressf("session %s is deleted; its workspace is in the trash\n  → agentlab workspace undelete %s", s.Name, s.WorkspaceID)
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
func checkSynced(ctx context.Context, ui work.UI, c *client.Client, s api.Session, l Link, how Removal) error {
	if how.Force {
		return nil
	}
	left, st, err := unsynced(ctx, ui, c, s, l)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeOf(err), "cannot find out whether session %s has work that is not here: %w", s.Name, err).
			WithHint("delete it nevertheless, its workspace goes to the trash: %s --force", how.Command)
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
			WithHint("get commits, in %s: agentlab sync --session %s --worktree BRANCH --into BRANCH; and uncommitted changes: agentlab apply --session %s%s; or delete it nevertheless, its workspace goes to the trash: %s --force", l.Path, s.Name, s.Name, more, how.Command)
	}
	return nil
}

// unsynced lists the work of a session that the user's repository does not have, and
// returns the state of its repository. The sandbox is started for that if necessary:
// unknown is not absent.
func unsynced(ctx context.Context, ui work.UI, c *client.Client, s api.Session, l Link) (left []string, st guestapi.RepoState, err error) {
	if l.Remote == "" {
		return nil, st, agentlab.Errorf(agentlab.CodeConflict, "the current directory is not in its repository")
	}
	if w, err := c.Workspace(ctx, s.WorkspaceID); err != nil || w.Unused {
		return nil, st, err // it is empty
	}
	sb, err := Resume(ctx, ui, c, s, 0)
	if err != nil {
		return nil, st, err
	}
	w := newOpened(c, s, sb, l)
	w.Slow = slow(ui)
	defer func() {
		if err != nil || len(left) > 0 { // else the session is deleted
			Leave(ctx, ui, w)
		}
	}()
	if w.Guest, err = w.Repo.State(ctx); err != nil {
		return nil, st, err
	}
	if err := w.leaveOutApplied(ctx); err != nil {
		return nil, st, err
	}
	return onlyInSession(ctx, l, w.Guest), w.Guest, nil
}

// onlyInSession lists the work in a session that its repository here does not have. Refs
// of the session do not count: they are deleted with it.
func onlyInSession(ctx context.Context, l Link, st guestapi.RepoState) (left []string) {
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
			missing("the detached HEAD of "+ShownGuest(t.Dir), t.Head)
		}
		if t.Uncommitted > 0 {
			left = append(left, fmt.Sprintf("%s with uncommitted changes in %s", agentlab.Plural(t.Uncommitted, "file"), ShownGuest(t.Dir)))
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
			left = append(left, fmt.Sprintf("%s in the submodule %s", agentlab.Plural(n, "commit"), agentlab.WithoutControls(ShownGuest(dir))))
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
