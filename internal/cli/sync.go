package cli

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// synced is the output of 'agentlab sync' under --json.
type synced struct {
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

func (a *App) syncCmd() *cobra.Command {
	var into, worktree, session string
	var fetchOnly, artifacts bool
	o := transfer.ArtifactOptions{Gib: 16}
	cmd := &cobra.Command{
		Use:   "sync [SESSION] | sync --artifacts [PATTERN...]",
		Short: "Fetch the commits or the artifacts of a session",
		Long: `Fetch the commits of the session of this repository and merge them into the current
branch: fast-forward if possible, else with a merge commit. Conflicts remain in the
work tree, as after 'git merge'. All branches of the session are in
refs/remotes/agentlab. No other ref of this repository changes.

Everything is checked before git uses it. No hook, filter or other program of the
repository runs. New or changed files that programs of this machine execute or obey
without a command, such as .envrc, .vscode and git hooks, must be confirmed; without a
terminal nothing is merged ('git config agentlab.return' is ask, hold or allow). Files
that make a directory a git repository and links out of the work tree are refused.
Uncommitted changes in the sandbox stay there; see 'agentlab diff'
and 'agentlab apply'.

With --artifacts, files that git does not carry are copied instead, and no commits:
those that match a PATTERN, or else the outputs of .agentlab.yaml in the work tree here.
Only regular files are copied. A file that git tracks here is never replaced, and any
other file that differs only with --force. What .agentlabignore names is left out. Either
everything is copied, or nothing.`,
		Example: `  agentlab sync
  agentlab sync --into review
  agentlab sync --worktree fix-12
  agentlab sync --fetch-only && git log -p HEAD..agentlab/main
  agentlab sync --artifacts
  agentlab sync --artifacts 'dist/**' '*.log' --force`,
		Args: func(cmd *cobra.Command, args []string) error {
			if artifacts {
				return nil
			}
			return cobra.MaximumNArgs(1)(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&artifacts, "artifacts", false, "copy files that git does not carry, and no commits")
	cmd.Flags().BoolVar(&o.Force, "force", false, "with --artifacts: replace existing files that git does not track")
	between(cmd.Flags(), &o.Gib, "max-size", 1, 1<<20, "with --artifacts: limit of the copy, in GiB")
	cmd.Flags().StringVar(&into, "into", "", "branch to merge into; it is created if it is missing (default: the current one)")
	cmd.Flags().StringVar(&worktree, "worktree", "", "merge this branch of the session, or copy artifacts from its work tree (default: the one with the name of the current branch; for artifacts /workspace)")
	cmd.Flags().StringVar(&session, "session", "", "session, instead of the argument (default: that of this repository)")
	cmd.Flags().BoolVar(&fetchOnly, "fetch-only", false, "fetch, and merge nothing")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		if fetchOnly && into != "" {
			return work.UsageErrorf("--fetch-only and --into cannot be used together")
		}
		switch {
		case artifacts && (fetchOnly || into != ""):
			return work.UsageErrorf("--artifacts cannot be used with --fetch-only or --into").WithHint("run 'agentlab sync' for the commits")
		case artifacts:
			o.Patterns, o.Worktree, o.Session = args, worktree, session
			return a.syncArtifacts(ctx, c, o)
		case o.Force || cmd.Flags().Changed("max-size"):
			return work.UsageErrorf("--force and --max-size require --artifacts")
		}
		if session != "" && len(args) > 0 {
			return work.UsageErrorf("a session and --session cannot be used together")
		}
		w, err := a.openSession(ctx, c, cmp.Or(session, firstOf(args)))
		if err != nil {
			return err
		}
		defer a.leave(ctx, w)
		return a.syncCommits(ctx, w, into, worktree, fetchOnly)
	})
	return cmd
}

// syncCommits fetches the commits of a session, and merges a branch of it.
func (a *App) syncCommits(ctx context.Context, w *openedSession, into, worktree string, fetchOnly bool) error {
	unlock, err := gitsafe.LockRepo(ctx, a, w.Path, false)
	if err != nil {
		return err
	}
	defer unlock()
	got, err := a.fetchSession(ctx, w)
	if err != nil {
		return err
	}
	if !fetchOnly {
		if got.Merged, got.found, err = a.mergeSession(ctx, w, into, worktree); err != nil {
			a.printHeads(w, got) // they stay
			return err
		}
		if got.Merged == nil {
			got.NotMerged, got.next = a.notMerged(ctx, w, into, worktree)
		}
	}
	if fetchOnly {
		if got.found, err = w.judgeHeads(ctx, got.Fetched); err != nil {
			return err
		}
	}
	got.Findings = gitsafe.FindingsJSON(got.found)
	return a.emit(got, func() error { return a.printSynced(w, got) })
}

// maxJudged limits the branches that one command judges.
const maxJudged = 100

// judgeHeads is the return check of branches that were fetched and are not merged.
func (w *openedSession) judgeHeads(ctx context.Context, heads []fetchedHead) (found []returncheck.Finding, err error) {
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
func (w *openedSession) admission(into, ref string, quiet bool) gitsafe.Admission {
	short := strings.TrimPrefix(ref, "refs/remotes/")
	return gitsafe.Admission{
		Dir: w.Path, Verb: "merged", Show: "git diff " + into + "..." + short, Quiet: quiet,
		Instead: "the commits are fetched; merge them with git if you agree: git merge " + short,
	}
}

func firstOf(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

// openedSession is a session with its running sandbox and the user's repository.
type openedSession struct {
	session.Repo

	session api.Session
	link    session.Link
	state   guestapi.RepoState
	// wasStopped is set if the sandbox was stopped or missing before, see leave.
	wasStopped bool
}

// openSession starts the sandbox of a session if necessary, and reads the state of its
// repository.
func (a *App) openSession(ctx context.Context, c *client.Client, arg string) (*openedSession, error) {
	s, l, err := a.chosenSession(ctx, c, arg)
	if err != nil {
		return nil, err
	}
	if l.Remote == "" {
		return nil, agentlab.Errorf(agentlab.CodeConflict, "session %s is not one of the repository in the current directory", s.Name).
			WithHint("change to its repository, or fetch its commits: git fetch %s%s", session.RemoteScheme, s.ID)
	}
	sb, err := a.resumeForWork(ctx, c, s, 0)
	if err != nil {
		return nil, err
	}
	w := newOpened(c, s, sb, l)
	w.Slow = a.slow
	if !work.IsUp(api.Sandbox{State: s.State}) && !w.wasStopped {
		a.Progressf("note: the sandbox of session %[1]s did not run; it was started for this command, and runs now\n  → agentlab stop %[1]s", s.Name)
	}
	if w.state, err = w.Repo.State(ctx); err == nil && len(w.state.Worktrees) == 0 {
		err = agentlab.Errorf(agentlab.CodeNotFound, "session %s has no repository yet", s.Name).WithHint("push this one: agentlab start")
	}
	if err != nil {
		a.leave(ctx, w)
	}
	return w, err
}

// worktree returns the work tree of a branch; "" is the main one.
func (w *openedSession) worktree(branch string) (guestapi.RepoWorktree, error) {
	if branch == "" {
		return w.state.Worktrees[0], nil
	}
	for _, t := range w.state.Worktrees {
		if t.Branch == branch || t.Dir == guestapi.WorktreesDir+"/"+branch {
			return t, nil
		}
	}
	return guestapi.RepoWorktree{}, agentlab.Errorf(agentlab.CodeNotFound, "session %s has no work tree of branch %s", w.session.Name, branch).
		WithHint("list them: agentlab worktree list")
}

// fetchSession fetches all branches of a session. The refs are set in one step.
func (a *App) fetchSession(ctx context.Context, w *openedSession) (synced, error) {
	got := synced{SessionID: w.session.ID, Fetched: []fetchedHead{}}
	for _, t := range w.state.Worktrees {
		got.Uncommitted += t.Uncommitted
	}
	have, err := w.link.Heads(ctx)
	if err != nil {
		return got, err
	}
	heads := maps.Clone(w.state.Branches)
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
	if err := a.clearWay(ctx, w, have, branches); err != nil {
		return got, err
	}
	var update strings.Builder
	for _, branch := range branches {
		h := fetchedHead{Branch: branch, Ref: w.link.Ref(branch), Commit: heads[branch]}
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

// printHeads prints the refs that were fetched; with --json they are in the document.
func (a *App) printHeads(w *openedSession, got synced) {
	for _, h := range got.Fetched {
		if !a.json {
			fmt.Fprintf(a.Stdout, "%s %.12s %s\n", w.link.Remote+"/"+h.Branch, h.Commit, agentlab.Plural(h.Commits, "new commit"))
		}
	}
}

func (a *App) printSynced(w *openedSession, got synced) error {
	a.printHeads(w, got)
	gitsafe.NoteLFS(a, got.MissingLFS)
	if got.Merged == nil {
		gitsafe.NoteFetched(a, got.found, "")
	} else {
		gitsafe.NoteNamed(a, got.found)
	}
	switch m := got.Merged; {
	case m != nil && m.old == "":
		a.Progressf("branch %s is new, at %.12s of the session's %s\n  → git log -p %s", m.Branch, m.Commit, m.From, m.Branch)
	case m != nil:
		a.Progressf("merged %s of the session: branch %s is at %.12s now\n  → git log -p %.12s..%s", m.From, m.Branch, m.Commit, m.old, m.Branch)
	case got.NotMerged != "":
		a.Progressf("nothing is merged: %s", got.NotMerged)
	case len(got.Fetched) == 0:
		a.Progressf("there is nothing new")
	}
	if got.next != "" {
		a.Progressf("  → %s", got.next)
	}
	a.noteModules(w)
	for _, t := range w.state.Worktrees {
		if t.Uncommitted == 0 {
			continue
		}
		of := w.option()
		if t.Dir != "" {
			of += " --worktree " + strings.TrimPrefix(t.Dir, guestapi.WorktreesDir+"/")
		}
		a.Progressf("note: %s in %s of the session\n  → agentlab diff%s\n  → agentlab apply%s", uncommittedFiles(t.Uncommitted), session.ShownGuest(t.Dir), of, of)
	}
	return nil
}

// option returns the option that selects the session in a command, if one is needed: ""
// for the session that commands use by themselves.
func (w *openedSession) option() string {
	if w.link.Remote == session.RemoteName {
		return ""
	}
	return " --session " + w.session.Name
}

// notMerged returns why a sync has merged nothing, and a command that merges what the
// session has and the branch lacks; "" if there is none.
func (a *App) notMerged(ctx context.Context, w *openedSession, into, worktree string) (why, next string) {
	current := gitsafe.CurrentBranch(ctx, w.Path)
	from, target := w.mergeSource(current, into, worktree), cmp.Or(into, current)
	switch at := w.state.Branches[from]; {
	case at == "":
		why = "the session has no branch " + from
	case replacedHere(ctx, w.Path, target, at) && !gitsafe.IsAncestor(ctx, w.Path, at, "refs/heads/"+target):
		return from + " of the session has nothing new: " + replacedWhy(at) + " (to merge it nevertheless: git merge " + w.link.Remote + "/" + from + ")", w.link.ForcePush(target + ":" + from)
	default:
		why = "branch " + target + " has all commits of " + from
	}
	for _, t := range w.state.Worktrees {
		if t.Branch == "" || t.Branch == from || w.state.Branches[t.Branch] == "" {
			continue
		}
		n, err := countRevs(ctx, w.Path, w.link.Ref(t.Branch), "--not", "refs/heads/"+target)
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
func (w *openedSession) mergeSource(current, into, worktree string) string {
	switch {
	case worktree != "":
		return worktree
	case into != "" || current == "":
		return w.state.Worktrees[0].Branch
	}
	return current
}
