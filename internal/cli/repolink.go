package cli

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// ensureSession returns the session of a repository, and creates it as in want if there is
// none. An empty profile is that of the session that was there before, or else the default.
// The name is written to the repository first: after a crash in between, the next call
// creates that session instead of a second one.
func (a *App) ensureSession(ctx context.Context, c *client.Client, l *session.Link, branch string, want api.SessionCreate) (s api.Session, created bool, err error) {
	unlock, err := gitsafe.LockRepo(ctx, a, l.Path, false)
	if err != nil {
		return s, false, err
	}
	defer unlock()
	if *l, err = session.FindLink(ctx, l.Path, branch); err != nil { // another command may have created it
		return s, false, err
	}
	name := l.Session
	if name != "" {
		s, err = c.Session(ctx, name)
		switch {
		case err == nil && l.Owns(s, branch):
			if err := session.SameProfile(s, want.Profile); err != nil {
				return s, false, err
			}
			if err := sameBackend(ctx, c, s, want.Backend); err != nil {
				return s, false, err
			}
			return s, false, l.Set(ctx, s.ID, s.Profile)
		case err == nil: // of another repository, since this one was interrupted
			name = ""
		case agentlab.CodeOf(err) != agentlab.CodeNotFound:
			return s, false, err
		}
	}
	if want.Profile == "" {
		if want.Profile, err = l.Profile(ctx, c); err != nil {
			return s, false, err
		}
	}
	if name == "" || agentlab.IsSessionID(name) { // of a session that was deleted
		if name, err = l.FreeName(ctx, c, branch); err != nil {
			return s, false, err
		}
		if err := l.Set(ctx, name, ""); err != nil {
			return s, false, err
		}
	}
	if l.Key(ctx, session.CarriedKey) != "" { // into the session that was there before
		if err := l.SetKey(ctx, session.CarriedKey, "none"); err != nil {
			return s, false, err
		}
	}
	plain := name == l.ProjectName(branch)
	want.Name, want.IfMissing = name, !plain
	s, err = c.CreateSession(ctx, want)
	if plain && agentlab.CodeOf(err) == agentlab.CodeExists { // another repository was faster
		name = l.LongName(branch)
		if err := l.Set(ctx, name, ""); err != nil {
			return s, false, err
		}
		want.Name, want.IfMissing = name, true
		s, err = c.CreateSession(ctx, want)
	}
	if err != nil {
		return s, false, err
	}
	return s, true, l.Set(ctx, s.ID, s.Profile)
}

// sameBackend returns an error if the workspace of a session is not on the backend that
// the command names; "" names none.
func sameBackend(ctx context.Context, c *client.Client, s api.Session, want string) error {
	if want == "" {
		return nil
	}
	w, err := c.Workspace(ctx, s.WorkspaceID)
	if err != nil || w.Backend == want {
		return err
	}
	return agentlab.Errorf(agentlab.CodeConflict, "session %s is on backend %s, not %s", s.Name, w.Backend, want).WithField("backend").
		WithHint("leave out --backend, or replace the session: agentlab start --fresh --backend %s", want)
}

// chosenSession returns the session that an argument names, or without one that of the
// repository in the current directory. The repository's link is returned with it if
// there is one.
func (a *App) chosenSession(ctx context.Context, c *client.Client, arg string) (api.Session, session.Link, error) {
	l, err := session.CurrentLink(ctx, ".")
	if arg != "" {
		s, serr := c.Session(ctx, arg)
		if serr == nil && err == nil && l.Session != s.ID {
			l = session.Link{Path: l.Path}
			l = session.OtherLink(ctx, a, l, s.ID)
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
