package cli

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// newSessionImage returns the image of a session that is created for a repository: the
// one that was asked for, or that of the project file of a local repository.
func newSessionImage(ctx context.Context, repo, ref, asked string) (string, error) {
	if repo == "" || asked != "" {
		return asked, nil
	}
	path, local, err := gitsafe.LocalRepo(repo)
	if err != nil || !local {
		return "", err
	}
	src, err := gitsafe.FindCommit(ctx, path, ref)
	if err != nil {
		return "", err
	}
	r := api.JobCreate{}
	_, err = useProject(ctx, src, &r)
	return r.Image, err
}

// branchSession returns the session of a branch of a repository, and creates it as
// requested if there is none. Without a repository it is that of the branch.
func (a *App) branchSession(ctx context.Context, c *client.Client, repo string, r api.SessionCreate) (api.Session, error) {
	branch := r.Branch
	r.IfMissing = true
	if repo == "" {
		return c.CreateSession(ctx, r)
	}
	of, err := gitsafe.Identify(ctx, repo)
	if err != nil {
		return api.Session{}, err
	}
	r.Name = of.SessionName(branch)
	if _, err := c.Session(ctx, r.Name); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		if err != nil {
			return api.Session{}, err
		}
		return c.CreateSession(ctx, r) // which checks the branch
	}
	all, err := c.Sessions(ctx)
	if err != nil {
		return api.Session{}, err
	}
	var others []string
	for _, s := range all.Items {
		if s.Branch != branch {
			continue
		}
		// Versions before the hash used this name, and so do sessions of a branch that were
		// created outside of a repository.
		if s.Name == agentlab.SessionNameOf(branch) {
			if ours, err := of.WorkedIn(ctx, c, s.ID); err != nil || ours {
				return s, err
			}
		}
		others = append(others, s.Name)
	}
	s, err := c.CreateSession(ctx, r)
	if err == nil && len(others) > 0 {
		a.Progressf("note: created session %s for branch %s of %s; other sessions for a branch of that name: %s\n  → to continue one of them: --session %s", s.Name, branch, agentlab.WithoutControls(of.ID), work.JoinNames(others), others[0])
	}
	return s, err
}
