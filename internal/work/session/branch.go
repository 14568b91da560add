package session

import (
	"context"

	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/project"
)

// NewImage returns the image of a session that is created for a repository: the
// one that was asked for, or that of the project file of a local repository.
func NewImage(ctx context.Context, repo, ref, asked string) (string, error) {
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
	_, err = project.Use(ctx, src, &r)
	return r.Image, err
}

// OfBranch returns the session of a branch of a repository, and creates it as
// requested if there is none. Without a repository it is the session of the branch.
func OfBranch(ctx context.Context, ui work.UI, c *client.Client, repo string, r api.SessionCreate) (api.Session, error) {
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
		ui.Progressf("note: created session %s for branch %s of %s; other sessions for a branch of that name: %s\n  → to continue one of them: --session %s", s.Name, branch, agentlab.WithoutControls(of.ID), work.JoinNames(others), others[0])
	}
	return s, err
}

// LinkedBranches returns the branches of the sessions of the repository in the current
// directory that are for one, by the IDs of the sessions.
func LinkedBranches(ctx context.Context) map[string]string {
	out, _ := gitsafe.Git(ctx, ".", "config", "--local", "--get-regexp", `^remote\.agentlab-.*\.(url|agentlabbranch)$`) // "" outside of a repository
	ids, branches := map[string]string{}, map[string]string{}
	for line := range strings.Lines(out) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if remote, ok := strings.CutSuffix(key, ".url"); ok {
			ids[remote] = strings.TrimPrefix(value, RemoteScheme)
		} else if remote, ok := strings.CutSuffix(key, ".agentlabbranch"); ok {
			branches[remote] = value
		}
	}
	of := map[string]string{}
	for remote, branch := range branches {
		of[ids[remote]] = branch
	}
	return of
}

// clearWay deletes refs of branches that the session no longer has and that are in the way
// of one of branches: git cannot have both a and a/b. A ref of their commits is kept.
func clearWay(ctx context.Context, ui work.UI, w *Opened, have map[string]string, branches []string) error {
	var update strings.Builder
	for _, old := range slices.Sorted(maps.Keys(have)) {
		inWay := func(branch string) bool {
			return strings.HasPrefix(branch, old+"/") || strings.HasPrefix(old, branch+"/")
		}
		if i := slices.IndexFunc(branches, inWay); i >= 0 && w.Guest.Branches[old] == "" {
			kept := "refs/agentlab/stale/" + w.Link.Remote + "/" + have[old]
			fmt.Fprintf(&update, "update %s %s\ndelete %s %s\n", kept, have[old], w.Link.Ref(old), have[old])
			ui.Progressf("note: branch %s of the session is gone, and %s has taken its place\n  → its last commit: git log %s", old, branches[i], kept)
		}
	}
	if update.Len() == 0 {
		return nil
	}
	_, err := (gitsafe.Command{Stdin: strings.NewReader(update.String())}).Run(ctx, w.Path, "update-ref", "--no-deref", "--stdin")
	return err
}
