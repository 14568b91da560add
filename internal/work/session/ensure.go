package session

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// ensureSession returns the session of a repository, and creates it as in want if there is
// none. An empty profile is that of the session that was there before, or else the default.
// The name is written to the repository first: after a crash in between, the next call
// creates that session instead of a second one.
func ensureSession(ctx context.Context, ui work.UI, c *client.Client, l *Link, branch string, want api.SessionCreate) (s api.Session, created bool, err error) {
	unlock, err := gitsafe.LockRepo(ctx, ui, l.Path, false)
	if err != nil {
		return s, false, err
	}
	defer unlock()
	if *l, err = FindLink(ctx, l.Path, branch); err != nil { // another command may have created it
		return s, false, err
	}
	name := l.Session
	if name != "" {
		s, err = c.Session(ctx, name)
		switch {
		case err == nil && l.Owns(s, branch):
			if err := sameProfile(s, want.Profile); err != nil {
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
	if l.Key(ctx, carriedKey) != "" { // into the session that was there before
		if err := l.SetKey(ctx, carriedKey, "none"); err != nil {
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

// sameImage returns an error for an image that a session does not have. If only the
// repository names another one, a note says so.
func sameImage(ui work.UI, s api.Session, asked, project string) error {
	switch {
	case asked != "" && asked != s.Image:
		return agentlab.Errorf(agentlab.CodeConflict, "session %s has %s, not %s", s.Name, imageOf(s), agentlab.WithoutControls(asked)).
			WithHint("continue it without --image, or replace it by a new one with --fresh --image %s", agentlab.WithoutControls(asked))
	case asked == "" && project != "" && project != s.Image:
		ui.Progressf("note: %s asks for the image %s, and session %s has %s\n  → a new session: agentlab start --fresh", projectfile.Name, project, s.Name, imageOf(s))
	}
	return nil
}

func imageOf(s api.Session) string {
	if s.Image == "" {
		return "the image of profile " + s.Profile
	}
	return "the image " + s.Image
}
