package session

import (
	"context"
	"fmt"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// Choose returns the session that an argument names, or without one that of the
// repository in the current directory. The repository's link is returned with it if
// there is one.
func Choose(ctx context.Context, ui work.UI, c *client.Client, arg string) (api.Session, Link, error) {
	l, err := currentLink(ctx, ".")
	if arg != "" {
		s, serr := c.Session(ctx, arg)
		if serr == nil && err == nil && l.Session != s.ID {
			l = Link{Path: l.Path}
			l = otherLink(ctx, ui, l, s.ID)
		}
		return s, l, serr
	}
	if err != nil {
		return api.Session{}, l, err
	}
	if l.Session == "" {
		return api.Session{}, l, agentlab.Errorf(agentlab.CodeNotFound, "the repository %s has no session", l.Path).
			WithHint("start one: agentlab start; list those of other repositories: agentlab ls")
	}
	s, err := c.Session(ctx, l.Session)
	return s, l, err
}

// newOpened returns a session, as it was before, with its running sandbox.
func newOpened(c *client.Client, s api.Session, sb api.Sandbox, l Link) *Opened {
	stopped := s.Sandbox == "" || work.IsStopped(api.Sandbox{State: s.State})
	s.Sandbox, s.SandboxVMID, s.State = sb.Name, sb.VMID, sb.State
	return &Opened{Repo: Repo{C: c, Sandbox: fmt.Sprint(sb.VMID), Path: l.Path}, Session: s, Link: l, WasStopped: stopped}
}

// Opened is a session with its running sandbox and the user's repository.
type Opened struct {
	Repo

	Session api.Session
	Link    Link
	Guest   guestapi.RepoState
	// WasStopped is set if the sandbox was stopped or missing before, see leave.
	WasStopped bool
}

// Open starts the sandbox of a session if necessary, and reads the state of its
// repository.
func Open(ctx context.Context, ui work.UI, c *client.Client, arg string) (*Opened, error) {
	s, l, err := Choose(ctx, ui, c, arg)
	if err != nil {
		return nil, err
	}
	if l.Remote == "" {
		return nil, agentlab.Errorf(agentlab.CodeConflict, "session %s is not one of the repository in the current directory", s.Name).
			WithHint("change to its repository, or fetch its commits: git fetch %s%s", RemoteScheme, s.ID)
	}
	sb, err := Resume(ctx, ui, c, s, 0)
	if err != nil {
		return nil, err
	}
	w := newOpened(c, s, sb, l)
	w.Slow = slow(ui)
	if !work.IsUp(api.Sandbox{State: s.State}) && !w.WasStopped {
		ui.Progressf("note: the sandbox of session %[1]s did not run; it was started for this command, and runs now\n  → agentlab stop %[1]s", s.Name)
	}
	if w.Guest, err = w.Repo.State(ctx); err == nil && len(w.Guest.Worktrees) == 0 {
		err = agentlab.Errorf(agentlab.CodeNotFound, "session %s has no repository yet", s.Name).WithHint("push this one: agentlab start")
	}
	if err != nil {
		Leave(ctx, ui, w)
	}
	return w, err
}

// worktree returns the work tree of a branch; "" is the main one.
func (w *Opened) worktree(branch string) (guestapi.RepoWorktree, error) {
	if branch == "" {
		return w.Guest.Worktrees[0], nil
	}
	for _, t := range w.Guest.Worktrees {
		if t.Branch == branch || t.Dir == guestapi.WorktreesDir+"/"+branch {
			return t, nil
		}
	}
	return guestapi.RepoWorktree{}, agentlab.Errorf(agentlab.CodeNotFound, "session %s has no work tree of branch %s", w.Session.Name, branch).
		WithHint("list them: agentlab worktree list")
}

// option returns the option that selects the session in a command, if one is needed: ""
// for the session that commands use by themselves.
func (w *Opened) option() string {
	if w.Link.Remote == remoteName {
		return ""
	}
	return " --session " + w.Session.Name
}
