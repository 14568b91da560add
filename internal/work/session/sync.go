package session

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"path"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// Synced is the output of 'agentlab sync' under --json.
type Synced struct {
	SessionID   string            `json:"session_id"`
	Fetched     []fetchedHead     `json:"fetched"` // branches that have changed
	Merged      *merged           `json:"merged,omitempty"`
	NotMerged   string            `json:"not_merged,omitempty"`  // why nothing was merged
	Uncommitted int               `json:"uncommitted"`           // files in the session with uncommitted changes
	Findings    []gitsafe.Finding `json:"findings,omitempty"`    // of the return check
	MissingLFS  int               `json:"missing_lfs,omitempty"` // objects of Git LFS that were not fetched

	next  string // command that merges
	found []returncheck.Finding
}

// fetchedHead is a branch of a session that was fetched.
type fetchedHead struct {
	Branch  string `json:"branch"`
	Ref     string `json:"ref"` // local
	Commit  string `json:"commit"`
	Commits int    `json:"commits"` // that the ref did not have
}

// merged is a local branch that has the work of a session.
type merged struct {
	Branch      string `json:"branch"`
	From        string `json:"from"` // branch of the session
	Commit      string `json:"commit"`
	FastForward bool   `json:"fast_forward"`

	old string // commit that the branch had before; "" if it is new
}

// Sync fetches the commits of a session, and merges a branch of it. If only the
// merge fails, the branches that were fetched are returned with the error: they stay.
func Sync(ctx context.Context, ui work.UI, w *Opened, into, worktree string, fetchOnly bool) (Synced, error) {
	unlock, err := gitsafe.LockRepo(ctx, ui, w.Path, false)
	if err != nil {
		return Synced{}, err
	}
	defer unlock()
	got, err := fetchSession(ctx, ui, w)
	if err != nil {
		return Synced{}, err
	}
	if !fetchOnly {
		if got.Merged, got.found, err = mergeSession(ctx, ui, w, into, worktree); err != nil {
			return got, err
		}
		if got.Merged == nil {
			got.NotMerged, got.next = notMerged(ctx, ui, w, into, worktree)
		}
	}
	if fetchOnly {
		if got.found, err = w.judgeHeads(ctx, got.Fetched); err != nil {
			return Synced{}, err
		}
	}
	got.Findings = gitsafe.FindingsJSON(got.found)
	return got, nil
}

// maxJudged limits the branches that one command judges.
const maxJudged = 100

// judgeHeads is the return check of branches that were fetched and are not merged.
func (w *Opened) judgeHeads(ctx context.Context, heads []fetchedHead) (found []returncheck.Finding, err error) {
	for _, h := range heads[:min(len(heads), maxJudged)] {
		more, err := gitsafe.JudgeFetched(ctx, w.Path, h.Commit)
		if err != nil {
			return nil, err
		}
		for _, f := range more {
			if !slices.ContainsFunc(found, func(have returncheck.Finding) bool { return have.Path == f.Path && have.Level <= f.Level }) {
				found = append(found, f)
			}
		}
	}
	return found, nil
}

// admission says how the return check treats commits of the session that are merged into a
// branch. quiet is set while a program has the terminal.
func (w *Opened) admission(into, ref string, quiet bool) gitsafe.Admission {
	short := strings.TrimPrefix(ref, "refs/remotes/")
	return gitsafe.Admission{
		Dir: w.Path, Verb: "merged", Show: "git diff " + into + "..." + short, Quiet: quiet,
		Instead: "the commits are fetched; merge them with git if you agree: git merge " + short,
	}
}

// fetchSession fetches all branches of a session. The refs are set in one step.
func fetchSession(ctx context.Context, ui work.UI, w *Opened) (Synced, error) {
	got := Synced{SessionID: w.Session.ID, Fetched: []fetchedHead{}}
	for _, t := range w.Guest.Worktrees {
		got.Uncommitted += t.Uncommitted
	}
	have, err := w.Link.Heads(ctx)
	if err != nil {
		return got, err
	}
	heads := maps.Clone(w.Guest.Branches)
	maps.DeleteFunc(heads, func(branch, commit string) bool { return have[branch] == commit })
	if len(heads) == 0 {
		return got, nil
	}
	branches := slices.Sorted(maps.Keys(heads))
	err = w.Fetch(ctx, branches, false, "", func(b *gitsafe.Bundle) (err error) {
		if b == nil {
			return nil
		}
		if got.MissingLFS, err = w.FetchLFS(ctx, b); err != nil {
			return err
		}
		for _, branch := range branches { // they may have moved since the state was read
			if commit := b.Header.Refs["refs/heads/"+branch]; commit != "" {
				heads[branch] = commit
			}
		}
		return b.Keep(ctx, nil)
	})
	if err != nil {
		return got, err
	}
	if err := clearWay(ctx, ui, w, have, branches); err != nil {
		return got, err
	}
	var update strings.Builder
	for _, branch := range branches {
		h := fetchedHead{Branch: branch, Ref: w.Link.Ref(branch), Commit: heads[branch]}
		if have[branch] == h.Commit { // it was reset there
			continue
		}
		h.Commits, _ = countRevs(ctx, w.Path, h.Commit, "--not", "--all") // 0 if it is unknown
		fmt.Fprintf(&update, "update %s %s\n", h.Ref, h.Commit)
		got.Fetched = append(got.Fetched, h)
	}
	if len(got.Fetched) == 0 {
		return got, nil
	}
	if _, err := (gitsafe.Command{Stdin: strings.NewReader(update.String())}).Run(ctx, w.Path, "update-ref", "--no-deref", "--stdin"); err != nil {
		return got, agentlab.Errorf(agentlab.CodeConflict, "the refs of the session cannot be set: %s", agentlab.WithoutControls(err.Error())).
			WithHint("no ref was changed; run the command again")
	}
	return got, nil
}

// countRevs returns the number of commits that the arguments of git rev-list select.
func countRevs(ctx context.Context, path string, revs ...string) (n int, err error) {
	out, err := gitsafe.Git(ctx, path, append([]string{"rev-list", "--count"}, revs...)...)
	if err == nil {
		n, err = strconv.Atoi(out)
	}
	return n, err
}

// NoteSynced says what a sync has merged, and what it leaves in the session.
func NoteSynced(ui work.UI, w *Opened, got Synced) {
	gitsafe.NoteLFS(ui, got.MissingLFS)
	if got.Merged == nil {
		gitsafe.NoteFetched(ui, got.found, "")
	} else {
		gitsafe.NoteNamed(ui, got.found)
	}
	switch m := got.Merged; {
	case m != nil && m.old == "":
		ui.Progressf("branch %s is new, at %.12s of the session's %s\n  → git log -p %s", m.Branch, m.Commit, m.From, m.Branch)
	case m != nil:
		ui.Progressf("merged %s of the session: branch %s is at %.12s now\n  → git log -p %.12s..%s", m.From, m.Branch, m.Commit, m.old, m.Branch)
	case got.NotMerged != "":
		ui.Progressf("nothing is merged: %s", got.NotMerged)
	case len(got.Fetched) == 0:
		ui.Progressf("there is nothing new")
	}
	if got.next != "" {
		ui.Progressf("  → %s", got.next)
	}
	noteModules(ui, w)
	for _, t := range w.Guest.Worktrees {
		if t.Uncommitted == 0 {
			continue
		}
		of := w.option()
		if t.Dir != "" {
			of += " --worktree " + strings.TrimPrefix(t.Dir, guestapi.WorktreesDir+"/")
		}
		ui.Progressf("note: %s in %s of the session\n  → agentlab diff%s\n  → agentlab apply%s", UncommittedFiles(t.Uncommitted), ShownGuest(t.Dir), of, of)
	}
}

// notMerged returns why a sync has merged nothing, and a command that merges what the
// session has and the branch lacks; "" if there is none.
func notMerged(ctx context.Context, ui work.UI, w *Opened, into, worktree string) (why, next string) {
	current := gitsafe.CurrentBranch(ctx, w.Path)
	from, target := w.mergeSource(current, into, worktree), cmp.Or(into, current)
	switch at := w.Guest.Branches[from]; {
	case at == "":
		why = "the session has no branch " + from
	case replacedHere(ctx, w.Path, target, at) && !gitsafe.IsAncestor(ctx, w.Path, at, "refs/heads/"+target):
		return from + " of the session has nothing new: " + replacedWhy(at) + " (to merge it nevertheless: git merge " + w.Link.Remote + "/" + from + ")", w.Link.ForcePush(target + ":" + from)
	default:
		why = "branch " + target + " has all commits of " + from
	}
	for _, t := range w.Guest.Worktrees {
		if t.Branch == "" || t.Branch == from || w.Guest.Branches[t.Branch] == "" {
			continue
		}
		n, err := countRevs(ctx, w.Path, w.Link.Ref(t.Branch), "--not", "refs/heads/"+target)
		if err != nil || n == 0 {
			continue
		}
		why += fmt.Sprintf("; %s of the session has %s that %s lacks", t.Branch, agentlab.Plural(n, "commit"), target)
		if next == "" {
			next = "agentlab sync" + w.option() + " --worktree " + t.Branch
			if into != "" {
				next += " --into " + into
			}
		}
	}
	return why, next
}

// mergeSource returns the branch of the session that a sync merges.
func (w *Opened) mergeSource(current, into, worktree string) string {
	switch {
	case worktree != "":
		return worktree
	case into != "" || current == "":
		return w.Guest.Worktrees[0].Branch
	}
	return current
}

// maxModuleNotes limits the submodules that one command names.
const maxModuleNotes = 5

// noteModules names the submodules with commits of the agent, which come in no bundle of the
// repository, and the commands that bring them to the submodules here. A branch has them
// there: 'git submodule update' uses no commit that is on none.
func noteModules(ui work.UI, w *Opened) {
	for i, dir := range slices.Sorted(maps.Keys(w.Guest.ModuleWork)) {
		if i == maxModuleNotes {
			ui.Progressf("note: %d other submodules have commits, too", len(w.Guest.ModuleWork)-i)
			return
		}
		n := agentlab.Plural(w.Guest.ModuleWork[dir], "commit")
		if !agentlab.IsPrintable(dir) { // no command would be right
			ui.Progressf("note: a sync does not bring %s in the submodule %s", n, agentlab.WithoutControls(ShownGuest(dir)))
			continue
		}
		here := dir
		for _, t := range w.Guest.Worktrees {
			if rest, ok := strings.CutPrefix(dir, t.Dir+"/"); ok && t.Dir != "" {
				here = rest
			}
		}
		up := strings.Repeat("../", strings.Count(path.Clean(here), "/")+1)
		ui.Progressf("note: a sync does not bring %s in the submodule %s; at the top of the repository:\n  → agentlab exec %s -- git -C %s bundle create - HEAD >agentlab.bundle\n  → git -C %s -c fetch.fsckObjects=true fetch %sagentlab.bundle HEAD:%s",
			n, ShownGuest(dir), w.Session.Name, work.ShellQuote(guestapi.ProjectDir+"/"+dir), work.ShellQuote(here), up, moduleBranch)
	}
}

// moduleBranch is the branch for the commits of a session in a submodule.
const moduleBranch = "agentlab"
