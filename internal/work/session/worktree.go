package session

import (
	"context"
	"io"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// WorktreeDir returns the directory of the work tree of a branch in the guest, and adds
// it if it is missing. "" is the main one.
func WorktreeDir(ctx context.Context, ui work.UI, r Repo, branch string, src gitsafe.LocalCommit) (string, error) {
	if branch == "" {
		return guestapi.RepoDir, nil
	}
	if err := checkBranch(branch, ""); err != nil {
		return "", err
	}
	st, err := r.State(ctx)
	if err != nil {
		return "", err
	}
	out := &outgoing{known: knownTo(st)}
	dir, err := out.addWorktree(ctx, r.Path, st, branch, src)
	if err != nil || out.worktree == "" {
		return JoinGuest(dir), err
	}
	if _, err := r.apply(ctx, ui, out); err != nil {
		return "", err
	}
	lfs, err := findLFS(ctx, r.Path, out.treeCommit)
	if err != nil {
		return "", err
	}
	for _, found := range lfs {
		if err := sendLFS(ctx, ui, r, found); err != nil {
			return "", err
		}
	}
	return JoinGuest(dir), nil
}

// addWorktree adds the work tree of a branch to what is brought to a session, unless the
// session has it. "" is the main one. It returns its directory, relative to the repository.
func (o *outgoing) addWorktree(ctx context.Context, path string, st guestapi.RepoState, branch string, src gitsafe.LocalCommit) (dir string, err error) {
	if branch == "" {
		return "", nil
	}
	if err := checkBranch(branch, ""); err != nil {
		return "", err
	}
	for _, t := range st.Worktrees {
		if t.Branch == branch {
			return t.Dir, nil
		}
	}
	commit := st.Branches[branch]
	if commit == "" {
		commit, err = gitsafe.Git(ctx, path, "rev-parse", "--verify", "--quiet", "refs/heads/"+branch+"^{commit}")
		if err != nil || !gitsafe.IsCommit(commit) {
			commit = src.Commit
		}
		o.added = branch
		o.push.Updates = append(o.push.Updates, guestapi.RepoUpdate{Branch: branch, Commit: commit})
	}
	if _, err := gitsafe.Git(ctx, path, "cat-file", "-e", commit+"^{commit}"); err == nil { // otherwise the session made it
		o.treeCommit = commit
	}
	o.worktree = branch
	return guestapi.WorktreesDir + "/" + branch, nil
}

// RemoveWorktree removes the work tree of a branch from a session. force also loses
// uncommitted changes; yes ends what runs in the work tree without confirmation.
func RemoveWorktree(ctx context.Context, ui work.UI, w *Opened, branch string, force, yes bool) error {
	t, err := w.worktree(branch)
	if err != nil {
		return err
	}
	if t.Dir == "" {
		return work.UsageErrorf("%s is checked out in /workspace itself", branch).WithHint("delete the session instead: agentlab rm")
	}
	if t.Uncommitted > 0 && !force {
		return agentlab.Errorf(agentlab.CodeConflict, "the work tree of %s has %s with uncommitted changes", branch, agentlab.Plural(t.Uncommitted, "file")).
			WithHint("apply them: agentlab apply --worktree %s; or lose them: --force", branch)
	}
	if err := endPrograms(ctx, ui, w, t, yes || force); err != nil {
		return err
	}
	command := []string{"worktree", "remove"}
	if force {
		command = append(command, "--force")
	}
	// A terminal of the work tree would keep its directory in use.
	end := guestapi.ExecRequest{Command: []string{"agentlab-agent", "close", "--session", terminalName(branch)}}
	if err := guestrun.Run(ctx, w.C, w.Sandbox, end, nil, io.Discard); err != nil {
		return err
	}
	return w.Call(ctx, nil, io.Discard, append(command, strings.TrimPrefix(t.Dir, guestapi.WorktreesDir+"/"))...)
}
