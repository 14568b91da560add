package session

import (
	"context"

	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

// WithChanges calls fn with the uncommitted changes of a work tree of a session; nil if
// there are none. With lfs, it gets their objects of Git LFS.
func WithChanges(ctx context.Context, ui work.UI, c *client.Client, name, worktree string, lfs bool, fn func(*gitsafe.Bundle, source.Source) error) error {
	w, err := Open(ctx, ui, c, name)
	if err != nil {
		return err
	}
	defer Leave(ctx, ui, w)
	t, err := w.worktree(worktree)
	if err != nil {
		return err
	}
	of := source.Source{
		Kind: "session", ID: w.Session.ID, Name: w.Session.Name, Dir: t.Dir, Commits: "agentlab sync", Apply: "agentlab apply", Diff: "agentlab diff",
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
			gitsafe.NoteLFS(ui, missing)
		}
		return fn(b, of)
	})
}

// fetchChanges is fetch for the uncommitted changes of a work tree, with the commits that
// they are on top of.
func (w *Opened) fetchChanges(ctx context.Context, t guestapi.RepoWorktree, fn func(*gitsafe.Bundle) error) error {
	var branches []string
	if t.Branch != "" && w.Guest.Branches[t.Branch] != "" {
		branches = []string{t.Branch}
	}
	return w.Fetch(ctx, branches, true, t.Dir, fn)
}

// leaveOutApplied reduces the state to the uncommitted changes that the user's work tree
// does not have.
func (w *Opened) leaveOutApplied(ctx context.Context) error {
	for i, t := range w.Guest.Worktrees {
		if t.Uncommitted == 0 {
			continue
		}
		n, err := w.uncommittedElsewhere(ctx, t)
		if err != nil {
			return err
		}
		w.Guest.Worktrees[i].Uncommitted = n
	}
	return nil
}

// uncommittedElsewhere returns how many files with uncommitted changes of a work tree of
// the session differ from the user's. The content is compared, which the guest sends: a
// guest that lies loses its own work.
func (w *Opened) uncommittedElsewhere(ctx context.Context, t guestapi.RepoWorktree) (n int, err error) {
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
