package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// startHead is the commit that a start pushes.
type startHead struct {
	gitsafe.LocalCommit
	first *Pushed // what a new session gets; set by packFirst
}

// SourceHead returns the commit and branch that a start pushes.
func SourceHead(ctx context.Context, ui work.UI, path, branch string) (gitsafe.LocalCommit, error) {
	ref := branch
	if branch != "" {
		ref = "refs/heads/" + branch // and no tag of that name
	}
	src, err := gitsafe.FindCommit(ctx, path, ref)
	if branch != "" && agentlab.CodeOf(err) == agentlab.CodeNotFound {
		begin, what := "refs/remotes/origin/"+branch, "origin/"+branch
		if src, err = gitsafe.FindCommit(ctx, path, begin); agentlab.CodeOf(err) == agentlab.CodeNotFound {
			src, err = gitsafe.FindCommit(ctx, path, "")
			what = "the current commit"
		}
		if src.Branch = branch; err == nil {
			ui.Progressf("there is no branch %s here: it begins in the session, at %s (%.12s)", branch, what, src.Commit)
		}
	}
	if e, ok := errors.AsType[*agentlab.Error](err); ok && e.Field == "repo" && e.Code == agentlab.CodeInvalid {
		return src, agentlab.Errorf(agentlab.CodeInvalid, "%s", e.Message).WithHint("commit something first: git add . && git commit -m First")
	}
	return src, err
}

// packFirst packs what a new session gets, before the session exists: a repository that
// cannot be packed, for example because it is damaged, leaves nothing behind.
func packFirst(ctx context.Context, ui work.UI, l Link, src *startHead) (done func(), err error) {
	tmp, remove, err := gitsafe.TempDir("agentlab-push-*")
	if err != nil {
		return nil, err
	}
	p := Pushed{Modules: src.Modules, Updates: []guestapi.RepoUpdate{{Branch: src.Branch, Commit: src.Commit}}}
	if name, commit := defaultBranch(ctx, l.Path); name != "" && name != src.Branch {
		p.Updates = append(p.Updates, guestapi.RepoUpdate{Branch: name, Commit: commit})
	}
	m := ui.Meter()
	defer m.Done()
	p.Bundle, err = Repo{Path: l.Path}.Pack(ctx, tmp, p, nil, m)
	if err != nil {
		remove()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, gitsafe.CannotPack(l.Path, err)
	}
	src.first = &p
	return func() {
		_ = p.Bundle.Close()
		remove()
	}, nil
}

// sendCode pushes a branch to the repository of a session, whose state is st, checks it out
// there, and brings what else out has. Work in the guest is never overwritten: then the
// branch there stays, with a note about the reason.
func sendCode(ctx context.Context, ui work.UI, r Repo, l Link, src startHead, st guestapi.RepoState, o StartOptions, out *outgoing) (got applied, err error) {
	p, stays, err := codeFor(ctx, ui, r, l, src, st, o)
	if err != nil {
		return got, err
	}
	if p.Changes, err = carriedChanges(ctx, ui, &l, o); err != nil {
		return got, err
	}
	lfs, err := findLFS(ctx, r.Path, src.Commit, out.treeCommit)
	if err != nil {
		return got, err
	}
	later := Pushed{Changes: p.Changes, Updates: out.push.Updates}
	if slices.ContainsFunc(p.Updates, func(u guestapi.RepoUpdate) bool { return u.Branch == out.added }) {
		later.Updates, out.added = nil, ""
	}
	for _, u := range later.Updates {
		if slices.ContainsFunc(p.Updates, func(sent guestapi.RepoUpdate) bool { return gitsafe.IsAncestor(ctx, l.Path, u.Commit, sent.Commit) }) {
			p.Updates, later.Updates = append(p.Updates, u), nil // the bundle has its commits
		}
	}
	if p.Bundle != nil && !later.empty() { // it has neither
		p.Changes = ""
		if st, err = applyFirst(ctx, ui, r, l, st, &outgoing{push: p}); err != nil {
			return got, err
		}
		out.push = later
	} else {
		p.Updates = append(p.Updates, later.Updates...)
		out.push = p
	}
	if len(lfs) > 0 { // the commands of the rest may need the content
		first := &outgoing{push: out.push, worktree: out.worktree, added: out.added}
		if st, err = applyFirst(ctx, ui, r, l, st, first); err != nil {
			return got, err
		}
		for _, found := range lfs {
			if err := sendLFS(ctx, ui, r, found); err != nil {
				return got, err
			}
		}
		out.push, out.worktree = Pushed{}, ""
	}
	if out.known = knownTo(st); len(st.Worktrees) > 0 && st.Worktrees[0].Branch == out.push.Checkout {
		out.push.Checkout = ""
	}
	if !out.empty() {
		if got, err = applyCarried(ctx, ui, r, l, out); err != nil {
			return got, err
		}
	}
	if stays != "" {
		ui.Progressf("note: /workspace stays on %s: %s\n  → beside it: agentlab start --worktree %s", branchOrDetached(st.Worktrees[0].Branch), stays, src.Branch)
	}
	return got, nil
}

// applyCarried is Repo.apply, and records that the session has the uncommitted changes in
// out, also if a later step fails.
func applyCarried(ctx context.Context, ui work.UI, r Repo, l Link, out *outgoing) (applied, error) {
	got, err := r.apply(ctx, ui, out)
	if out.push.Changes == "" || got.faults == nil {
		return got, err
	}
	tree, terr := gitsafe.Git(ctx, l.Path, "rev-parse", "--verify", out.push.Changes+"^{tree}")
	if terr == nil {
		terr = l.SetKey(ctx, carriedKey, tree)
	}
	return got, cmp.Or(err, terr)
}

// applyFirst brings something to a session whose state is st, and returns the state after
// it.
func applyFirst(ctx context.Context, ui work.UI, r Repo, l Link, st guestapi.RepoState, out *outgoing) (guestapi.RepoState, error) {
	if out.known = knownTo(st); out.empty() {
		return st, nil
	}
	got, err := applyCarried(ctx, ui, r, l, out)
	if err == nil && got.state != nil {
		st = *got.state
	}
	return st, err
}

// codeFor returns what a start pushes to a session without uncommitted changes, and why its
// branch is not checked out in /workspace; "" if it is.
func codeFor(ctx context.Context, ui work.UI, r Repo, l Link, src startHead, st guestapi.RepoState, o StartOptions) (p Pushed, stays string, err error) {
	isNew := len(st.Branches) == 0
	p.Modules = slices.DeleteFunc(slices.Clone(src.Modules), func(m gitsafe.Submodule) bool { return slices.Contains(st.Modules, m.Commit) })
	if isNew && src.first != nil {
		p = *src.first
	} else if at := st.Branches[src.Branch]; at != src.Commit {
		switch note, next := behind(ctx, ui, l, src.Branch, at, src.Commit); {
		case note != "":
			ui.Progressf("note: %s of the session is kept: %s\n  → %s", src.Branch, note, next)
		default:
			p.Updates = append(p.Updates, guestapi.RepoUpdate{Branch: src.Branch, Commit: src.Commit})
		}
	}
	if isNew {
		gitsafe.WarnUnsent(ctx, ui, src.LocalCommit)
	}
	if o.Worktree == "" {
		if stays, err = checkoutFault(ctx, ui, r, st, src.Branch); err == nil && stays == "" {
			p.Checkout = src.Branch
		}
	}
	return p, stays, err
}

// notePushed says which commits a session has got.
func notePushed(ui work.UI, out *outgoing, got applied) {
	p, faults := out.push, maps.Clone(got.faults)
	p.Updates = slices.DeleteFunc(slices.Clone(p.Updates), func(u guestapi.RepoUpdate) bool { return u.Branch == out.added })
	delete(faults, out.added)
	if fault := faults[""]; fault != "" {
		ui.Progressf("note: submodules of the session are not checked out: %s", fault)
	}
	delete(faults, "")
	for branch, fault := range faults {
		ui.Progressf("note: branch %s of the session is not updated: %s", branch, fault)
	}
	if n := len(p.Modules); n > 0 {
		ui.Progressf("sent %s", agentlab.Plural(n, "submodule"))
	}
	if i := slices.IndexFunc(p.Updates, func(u guestapi.RepoUpdate) bool { return faults[u.Branch] == "" }); i >= 0 {
		ui.Progressf("pushed %s (%.12s) to /workspace", p.Updates[i].Branch, p.Updates[i].Commit)
	}
	switch {
	case p.Checkout == "" || got.state == nil:
	case len(got.state.Worktrees) > 0 && got.state.Worktrees[0].Branch == p.Checkout:
		ui.Progressf("/workspace is on %s now", p.Checkout)
	default:
		ui.Progressf("note: %s is not checked out in /workspace\n  → beside it: agentlab start --worktree %s", p.Checkout, p.Checkout)
	}
}

// checkoutFault returns why a start does not check out a branch in /workspace; "" if it
// does, because nothing there is lost, and no program runs there, or the user agrees.
func checkoutFault(ctx context.Context, ui work.UI, r Repo, st guestapi.RepoState, branch string) (string, error) {
	if len(st.Worktrees) == 0 || st.Worktrees[0].Branch == branch {
		return "", nil
	}
	at := st.Worktrees[0]
	switch {
	case at.Uncommitted > 0:
		return "it has " + agentlab.Plural(at.Uncommitted, "file") + " with uncommitted changes", nil
	case at.Branch == "":
		return "the session has checked that out", nil
	case slices.ContainsFunc(st.Worktrees[1:], func(t guestapi.RepoWorktree) bool { return t.Branch == branch }):
		return branch + " has a work tree of its own", nil
	}
	if _, err := gitsafe.Git(ctx, r.Path, "rev-parse", "--verify", "--quiet", "refs/heads/"+at.Branch); err != nil && at.Branch != gitsafe.DetachedBranch {
		return "that branch was made in the session", nil
	}
	if at.Head != "" {
		if _, err := gitsafe.Git(ctx, r.Path, "cat-file", "-e", at.Head+"^{commit}"); err != nil {
			return "it has commits that are not here; get them first: agentlab sync", nil //nolint:nilerr // nor the commit
		}
	}
	p, err := r.Programs(ctx, guestapi.MainWorktree)
	if err != nil || len(p.Names) == 0 {
		return "", err
	}
	running := strings.Join(p.Names, ", ")
	if ui.Confirm(fmt.Sprintf("In /workspace, which is on %s, runs: %s. Check out %s there nevertheless?", branchOrDetached(at.Branch), running, branch)) {
		return "", nil
	}
	return "in it runs: " + running, nil
}

// branchOrDetached names what a work tree has checked out.
func branchOrDetached(branch string) string {
	if branch == "" {
		return "a detached HEAD"
	}
	return "branch " + branch
}

// behind returns why a branch of a session, which is at a commit, cannot be set to another
// commit without the loss of work, and a command for it; "" if it can.
func behind(ctx context.Context, ui work.UI, l Link, branch, at, to string) (why, next string) {
	if at == "" {
		return "", ""
	}
	if _, err := gitsafe.Git(ctx, l.Path, "cat-file", "-e", at+"^{commit}"); err != nil {
		return "it has commits that are not here", "agentlab sync"
	}
	if gitsafe.IsAncestor(ctx, l.Path, at, to) {
		return "", ""
	}
	if gitsafe.IsAncestor(ctx, l.Path, to, at) {
		return "it has commits that are not merged here", "agentlab sync"
	}
	if replacedHere(ctx, l.Path, branch, at) {
		return replacedWhy(at), l.ForcePush(branch)
	}
	return "it and the branch here have diverged", "agentlab sync"
}

// replacedHere reports whether a branch was at a commit before it was amended, rebased or
// reset.
func replacedHere(ctx context.Context, path, branch, commit string) bool {
	out, err := gitsafe.Git(ctx, path, "reflog", "show", "--format=%H", "refs/heads/"+branch, "--")
	return err == nil && slices.Contains(strings.Fields(out), commit)
}

func replacedWhy(at string) string {
	return fmt.Sprintf("it is at %.12s, which was amended or replaced here", at)
}

// repoInit returns how the repository of a session is made.
func repoInit(ctx context.Context, path string, src gitsafe.LocalCommit, o StartOptions) (guestapi.RepoInit, error) {
	in := guestapi.RepoInit{Branch: src.Branch, UserName: o.userName, UserEmail: o.userEmail}
	if url, err := gitsafe.Git(ctx, path, "config", "--get", "remote.origin.url"); err == nil && agentlab.ValidateRepoURL(url) == nil {
		in.Origin = url
	}
	if !o.NoEnv {
		_, names, err := transfer.FindEnvFiles(ctx, path)
		if err != nil {
			return in, err
		}
		in.Exclude = append([]string{}, names...)
	}
	return in, nil
}

// defaultBranch returns the default branch of the remote origin, which agents compare
// their work with.
func defaultBranch(ctx context.Context, path string) (name, commit string) {
	ref, err := gitsafe.Git(ctx, path, "symbolic-ref", "--quiet", "refs/remotes/origin/HEAD")
	name, ok := strings.CutPrefix(ref, "refs/remotes/origin/")
	if err != nil || !ok || agentlab.ValidateRef(name) != nil {
		return "", ""
	}
	commit, err = gitsafe.Git(ctx, path, "rev-parse", "--verify", "--quiet", ref+"^{commit}")
	if err != nil || !gitsafe.IsCommit(commit) {
		return "", ""
	}
	return name, commit
}
