package session

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// mergeSession merges a branch of a session into a local one, with the findings of the
// return check; nil means that it had everything.
func mergeSession(ctx context.Context, ui work.UI, w *Opened, into, worktree string) (*merged, []returncheck.Finding, error) {
	current := gitsafe.CurrentBranch(ctx, w.Path)
	from := w.mergeSource(current, into, worktree)
	if w.Guest.Branches[from] == "" {
		if worktree == "" && into == "" && current != "" {
			return nil, nil, nil // notMerged says that the session has no such branch
		}
		return nil, nil, agentlab.Errorf(agentlab.CodeNotFound, "session %s has no branch %q", w.Session.Name, from).
			WithHint("choose one with --worktree; list them: git branch -r --list '%s/*'", w.Link.Remote)
	}
	if into == "" && current == "" {
		return nil, nil, agentlab.Errorf(agentlab.CodeConflict, "no branch is checked out in %s", w.Path).
			WithHint("the commits are fetched; merge them with --into BRANCH")
	}
	ref, elsewhere := w.Link.Ref(from), into != "" && into != current
	ours := "HEAD"
	if elsewhere {
		if err := checkBranch(into, "into"); err != nil {
			return nil, nil, err
		}
		if _, err := gitsafe.Git(ctx, w.Path, "rev-parse", "--verify", "--quiet", "refs/heads/"+into); err == nil {
			ours = "refs/heads/" + into
		}
	}
	if _, err := gitsafe.Git(ctx, w.Path, "rev-parse", "--verify", "--quiet", ours+"^{commit}"); err != nil {
		ours = ""
	}
	if at := w.Guest.Branches[from]; ours != "" && !gitsafe.IsAncestor(ctx, w.Path, ours, at) && replacedHere(ctx, w.Path, cmp.Or(into, current), at) {
		return nil, nil, nil // notMerged says so
	}
	if !elsewhere {
		if err := idle(ctx, w.Path); err != nil {
			return nil, nil, err
		}
	}
	j, err := gitsafe.JudgeCommit(ctx, w.Path, w.Path, !elsewhere, ours, ref)
	if err == nil {
		err = gitsafe.Admit(ctx, ui, j.Found, w.admission(cmp.Or(into, "HEAD"), ref, false))
	}
	if err != nil {
		return nil, nil, err
	}
	var m *merged
	if elsewhere {
		m, err = forwardBranch(ctx, ui, w.Path, into, ref, j)
	} else {
		m, err = mergeRef(ctx, ui, w.Path, current, ref, j)
	}
	if m != nil {
		m.From = from
	}
	return m, j.Found, err
}

// forwardBranch sets a branch that is not checked out to a descendant, or creates it.
func forwardBranch(ctx context.Context, ui work.UI, path, branch, ref string, j gitsafe.Judgement) (*merged, error) {
	to := j.Theirs
	full := "refs/heads/" + branch
	old, err := gitsafe.Git(ctx, path, "rev-parse", "--verify", "--quiet", full)
	switch {
	case err != nil:
		old = ""
	case old == to:
		return nil, nil
	default:
		if !gitsafe.IsAncestor(ctx, path, old, to) {
			return nil, agentlab.Errorf(agentlab.CodeConflict, "branch %s has commits that the session lacks", branch).
				WithHint("the commits are fetched; merge them: git checkout %s && git merge %s", branch, strings.TrimPrefix(ref, "refs/remotes/"))
		}
	}
	if used, _ := gitsafe.Git(ctx, path, "for-each-ref", "--format=%(worktreepath)", full); used != "" {
		return nil, agentlab.Errorf(agentlab.CodeConflict, "branch %s is checked out in %s", branch, agentlab.WithoutControls(used)).
			WithHint("run 'agentlab sync' there")
	}
	if _, err := gitsafe.Git(ctx, path, "update-ref", "-m", "agentlab sync", full, to, cmp.Or(old, gitsafe.NoBlob)); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeConflict, "branch %s cannot be set: %s", branch, agentlab.WithoutControls(err.Error()))
	}
	return &merged{Branch: branch, Commit: to, FastForward: true, old: old}, nil
}

// mergeRef merges a ref into the branch that is checked out. Conflicts stay in the work
// tree for the user.
func mergeRef(ctx context.Context, ui work.UI, path, branch, ref string, j gitsafe.Judgement) (*merged, error) {
	old, err := gitsafe.Git(ctx, path, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
	switch {
	case err != nil && j.Ours == "":
		return nil, agentlab.Errorf(agentlab.CodeConflict, "branch %s has no commits yet", branch).
			WithHint("the commits are fetched; begin with them: git reset --hard %s", strings.TrimPrefix(ref, "refs/remotes/"))
	case err != nil:
		return nil, err
	case old != j.Ours:
		return nil, agentlab.Errorf(agentlab.CodeConflict, "branch %s has changed since the command began", branch).WithHint("run the command again")
	case gitsafe.IsAncestor(ctx, path, j.Theirs, old):
		return nil, nil
	case len(j.InWay) > 0:
		return nil, errInWay(branch, j.InWay)
	}
	env, err := gitsafe.DisableFilters(ctx, path)
	if err != nil {
		return nil, err
	}
	drivers, err := gitsafe.PlainMergeDrivers(ctx, path)
	if err != nil {
		return nil, err
	}
	env = gitsafe.WithConfig(env, "branch."+branch+".mergeOptions", "") // it can resolve conflicts: -X theirs
	in := gitsafe.Command{Env: append(append(env, identity()...), "GIT_MERGE_AUTOEDIT=no", "GIT_EDITOR=true"), Whole: true, Limited: true, Patient: true}
	var said bounded.Tail
	said.Max, in.Stderr = guestrun.MaxToolOutput, &said
	_, err = in.Run(ctx, path, slices.Concat(drivers, gitsafe.MergeOptions, []string{
		"merge", "--quiet", "--no-edit", "--no-verify", "--no-gpg-sign", "--no-autostash",
		"--ff", "--commit", "--no-squash", "--no-verify-signatures", "--no-signoff", "--no-stat", "--no-log", "-m", fmt.Sprintf("Merge remote-tracking branch '%s' into %s", ref, branch), j.Theirs,
	})...)
	if err != nil && ctx.Err() == nil {
		if _, cerr := gitsafe.Git(ctx, path, "rev-parse", "--verify", "--quiet", "MERGE_HEAD"); cerr == nil {
			return nil, agentlab.Errorf(agentlab.CodeConflict, "the work of the session conflicts with branch %s%s", branch, conflicted(ctx, ui, path)).
				WithHint("resolve the conflicts and commit, or cancel: git merge --abort")
		}
		return nil, mergeFault(branch, ref, cmp.Or(strings.TrimSpace(said.String()), err.Error()))
	}
	if err != nil {
		return nil, err
	}
	now, err := gitsafe.Git(ctx, path, "rev-parse", "--verify", "HEAD^{commit}")
	if err == nil {
		err = gitsafe.CheckOutLFS(ctx, ui, path, old, now)
	}
	if err != nil {
		return nil, err
	}
	return &merged{Branch: branch, Commit: now, FastForward: now == j.Theirs && gitsafe.IsAncestor(ctx, path, old, now), old: old}, nil
}

// conflicted lists the files with conflicts after a merge, for the end of a sentence.
func conflicted(ctx context.Context, ui work.UI, path string) string {
	out, err := gitsafe.Command{Raw: true}.Run(ctx, path, "diff", "--name-only", "--diff-filter=U", "--no-ext-diff", "--no-textconv", "-z")
	if err != nil || out == "" {
		return ""
	}
	return " in " + work.JoinNames(strings.Split(strings.TrimSuffix(out, "\x00"), "\x00"))
}

// identity is the variables of the user's environment that name the author and the
// committer of a merge.
func identity() (env []string) {
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "GIT_AUTHOR_") || strings.HasPrefix(kv, "GIT_COMMITTER_") {
			env = append(env, kv)
		}
	}
	return env
}

// idle returns an error if a merge, a rebase or a similar operation of the user is not
// finished in a work tree.
func idle(ctx context.Context, path string) error {
	for name, next := range map[string]string{
		"MERGE_HEAD": "git merge --continue", "CHERRY_PICK_HEAD": "git cherry-pick --continue", "REVERT_HEAD": "git revert --continue",
		"rebase-merge": "git rebase --continue", "rebase-apply": "git rebase --continue",
	} {
		at, err := gitsafe.Git(ctx, path, "rev-parse", "--path-format=absolute", "--git-path", name)
		if err != nil {
			return err
		}
		if _, err := os.Lstat(at); err == nil {
			return agentlab.Errorf(agentlab.CodeConflict, "another operation of git is not finished in %s", agentlab.WithoutControls(path)).
				WithHint("the commits are fetched; finish it: %s; and run the command again", next)
		}
	}
	return nil
}

// errInWay is the error of a merge that would lose files.
func errInWay(branch string, files []string) error {
	return agentlab.Errorf(agentlab.CodeConflict, "the merge into branch %s would overwrite uncommitted changes or files that git does not track: %s", branch, work.JoinNames(files)).
		WithHint("the commits are fetched; commit, stash or move these files, and run the command again: git stash push --include-untracked -- FILE")
}

// mergeFault returns the error of a merge that git has not begun. Git lists the files that
// are in the way, each after a tab.
func mergeFault(branch, ref, said string) error {
	var files []string
	for line := range strings.Lines(said) {
		if name, is := strings.CutPrefix(line, "\t"); is {
			files = append(files, strings.TrimSuffix(name, "\n"))
		}
	}
	short := strings.TrimPrefix(ref, "refs/remotes/")
	if len(files) > 0 {
		return errInWay(branch, files)
	}
	return agentlab.Errorf(agentlab.CodeConflict, "git cannot merge into branch %s: %s", branch, agentlab.WithoutControls(gitsafe.OneLine(said))).
		WithHint("the commits are fetched; merge them with git: git merge %s", short)
}
