package session

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// real answers as 'agentlab-agent repo' does in a guest that has no further work trees.
func (w *sessionWorld) real(verb string, in []byte) (out []byte, errOut string, code int) {
	w.Helper()
	switch verb {
	case "state":
		st := guestapi.RepoState{Branches: map[string]string{}, Worktrees: []guestapi.RepoWorktree{{
			Branch: worktest.Git(w.T, w.guest, "branch", "--show-current"), Head: worktest.Git(w.T, w.guest, "rev-parse", "HEAD"),
			Uncommitted: len(strings.Fields(worktest.Git(w.T, w.guest, "status", "--porcelain"))) / 2,
		}}}
		for line := range strings.Lines(worktest.Git(w.T, w.guest, "for-each-ref", "--format=%(objectname) %(refname:strip=2)", "refs/heads")) {
			commit, name, _ := strings.Cut(strings.TrimSpace(line), " ")
			st.Branches[name] = commit
		}
		out, _ = json.Marshal(st)
	case "pack":
		var p guestapi.RepoPack
		if err := json.Unmarshal(in, &p); err != nil {
			w.Error(err)
		}
		revs := append(p.Branches, "^origin/trunk")
		if p.Changes {
			worktest.Git(w.T, w.guest, "add", "-A")
			tree := worktest.Git(w.T, w.guest, "write-tree")
			worktest.Git(w.T, w.guest, "update-ref", guestapi.RefChanges, worktest.Git(w.T, w.guest, "commit-tree", tree, "-p", "HEAD", "-m", "x"))
			worktest.Git(w.T, w.guest, "reset", "-q")
			revs = append(revs, guestapi.RefChanges)
		}
		return w.bundle(revs...), "", 0
	}
	return out, "", 0
}

// opened returns the session, with its commits fetched.
func (w *sessionWorld) opened() *Opened {
	w.Helper()
	s, err := w.open(w.real)
	if err == nil {
		_, err = fetchSession(w.Context(), w.app, s)
	}
	if err != nil {
		w.Fatal(err)
	}
	return s
}

// A sync that merges nothing gives the reason, and the command that merges.
func TestSyncThatMergesNothing(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	w.commit(map[string]string{"new": "1"})
	s := w.opened()
	worktest.Git(t, w.user, "checkout", "-q", "-b", "topic")
	before := worktest.Git(t, w.user, "rev-parse", "HEAD")
	for _, has := range []bool{false, true} {
		if has {
			worktest.Git(t, w.guest, "branch", "-q", "topic", "origin/trunk")
			worktest.Git(t, w.user, "update-ref", "refs/remotes/agentlab/topic", before)
			s = w.opened()
		}
		m, _, err := mergeSession(t.Context(), w.app, s, "", "")
		if m != nil || err != nil || worktest.Git(t, w.user, "rev-parse", "HEAD") != before {
			t.Fatalf("another branch was merged: %+v, %v", m, err)
		}
		why, next := notMerged(t.Context(), w.app, s, "", "")
		want := "the session has no branch topic"
		if has {
			want = "branch topic has all commits of topic"
		}
		if why != want+"; trunk of the session has 1 commit that topic lacks" || next != "agentlab sync --worktree trunk" {
			t.Errorf("%q, %q", why, next)
		}
	}
	m, _, err := mergeSession(t.Context(), w.app, s, "", "trunk")
	if err != nil || m.From != "trunk" || m.old != before {
		t.Errorf("%+v, %v", m, err)
	}
	if why, next := notMerged(t.Context(), w.app, s, "", ""); why != "branch topic has all commits of topic" || next != "" {
		t.Errorf("%q, %q", why, next)
	}
}

// What is printed after a sync is true: a new branch has no commit before it, and
// uncommitted changes are named with their work tree.
func TestSyncPrints(t *testing.T) {
	w := newSessionWorld(t)
	w.commit(map[string]string{"new": "1"})
	s := w.opened()
	m, _, err := mergeSession(t.Context(), w.app, s, "review", "trunk")
	if err != nil {
		t.Fatal(err)
	}
	s.Guest.Worktrees = append(s.Guest.Worktrees, guestapi.RepoWorktree{Dir: ".worktrees/fix-12", Branch: "fix-12", Uncommitted: 3})
	NoteSynced(w.app, s, Synced{Merged: m})
	notes := w.notes.String()
	if strings.Contains(notes, "ORIG_HEAD") || !strings.Contains(notes, "git log -p review\n") ||
		!strings.Contains(notes, "3 files with uncommitted changes in /workspace/.worktrees/fix-12 of the session\n  → agentlab diff --worktree fix-12\n") {
		t.Error(notes)
	}
}

func TestConflictNamesFiles(t *testing.T) {
	w := newSessionWorld(t)
	w.commit(map[string]string{"both": "theirs"})
	worktest.Put(t, w.user, map[string]string{"both": "mine"})
	worktest.Git(t, w.user, "add", "-A")
	worktest.Git(t, w.user, "commit", "-q", "-m", "mine")
	if _, _, err := mergeSession(t.Context(), w.app, w.opened(), "", ""); err == nil || !strings.HasSuffix(err.Error(), "conflicts with branch trunk in both") {
		t.Error(err)
	}
}

// Uncommitted changes that the user's work tree has, too, are not lost with the session.
func TestAppliedChangesAreHere(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	w.commit(map[string]string{"new": "1"})
	worktest.Put(t, w.guest, map[string]string{"a.txt": "changed", "more": "2"})
	left := func(want int) {
		t.Helper()
		s := w.opened()
		if err := s.leaveOutApplied(t.Context()); err != nil || s.Guest.Worktrees[0].Uncommitted != want {
			t.Errorf("%+v, %v, want %d", s.Guest, err, want)
		}
	}
	left(2)
	worktest.Put(t, w.user, map[string]string{"a.txt": "changed"})
	left(1)
	worktest.Put(t, w.user, map[string]string{"more": "2"})
	left(0)
	worktest.Put(t, w.user, map[string]string{"more": "3"})
	left(1)
}

// A branch with a session of its own uses that one.
func TestCurrentLink(t *testing.T) {
	repo := worktest.Repo(t)
	for _, branch := range []string{"", "fix-9"} {
		l, err := FindLink(t.Context(), repo, branch)
		if err == nil {
			err = l.Set(t.Context(), "of-"+branch, "")
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	worktest.Git(t, repo, "branch", "other")
	worktest.Git(t, repo, "branch", "fix-9")
	for branch, want := range map[string]string{"trunk": "of-", "other": "of-", "fix-9": "of-fix-9"} {
		worktest.Git(t, repo, "checkout", "-q", branch)
		if l, err := currentLink(t.Context(), repo); err != nil || l.Session != want {
			t.Errorf("%s: %+v, %v", branch, l, err)
		}
	}
}

// --branch accepts a branch that does not exist yet, as --worktree does.
func TestSourceOfANewBranch(t *testing.T) {
	repo := worktest.Repo(t)
	var notes bytes.Buffer
	a := worktest.UI{Out: &notes}
	head := worktest.Git(t, repo, "rev-parse", "HEAD")
	src, err := SourceHead(t.Context(), a, repo, "fix-12")
	if err != nil || src.Branch != "fix-12" || src.Commit != head || !strings.Contains(notes.String(), "no branch fix-12") {
		t.Errorf("%+v, %v, %s", src, err, notes.String())
	}
	worktest.Git(t, repo, "commit", "-q", "--allow-empty", "-m", "later")
	worktest.Git(t, repo, "update-ref", "refs/remotes/origin/fix-12", head)
	if src, err := SourceHead(t.Context(), a, repo, "fix-12"); err != nil || src.Branch != "fix-12" || src.Commit != head {
		t.Errorf("a branch of origin: %+v, %v", src, err)
	}
}

// A start checks its branch out in the session where that is in nobody's way.
func TestStartChecksOut(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	worktest.Git(t, w.user, "checkout", "-q", "-b", "topic")
	worktest.Git(t, w.user, "commit", "-q", "--allow-empty", "-m", "mine")
	var sent guestapi.RepoReceive
	var running []string
	g := w.realGuest()
	g.applies = func(a guestapi.SessionApply) {
		if a.Receive != nil {
			sent = *a.Receive
		}
	}
	g.repo = func(string, []byte) ([]byte, string, int) {
		out, _ := json.Marshal(guestapi.RepoPrograms{Names: running})
		return out, "", 0
	}
	start := func(checkout, note string) {
		t.Helper()
		sent = guestapi.RepoReceive{}
		w.notes.Reset()
		src, err := gitsafe.FindCommit(t.Context(), w.user, "")
		if err != nil {
			t.Fatal(err)
		}
		if err := g.send(src, StartOptions{}, &outgoing{}); err != nil {
			t.Fatal(err)
		}
		if sent.Checkout != checkout || !strings.Contains(w.notes.String(), note) {
			t.Errorf("checkout %q: %s", sent.Checkout, w.notes.String())
		}
	}
	worktest.Put(t, w.guest, map[string]string{"more": "2"})
	start("", "/workspace stays on branch trunk: it has 1 file with uncommitted changes\n  → beside it: agentlab start --worktree topic\n")
	w.commit(map[string]string{"more": "3"})
	start("", "/workspace stays on branch trunk: it has commits that are not here; get them first: agentlab sync\n")
	worktest.Git(t, w.guest, "checkout", "-q", "-b", "of-the-agent", "origin/trunk")
	start("", "/workspace stays on branch of-the-agent: that branch was made in the session")
	worktest.Git(t, w.guest, "checkout", "-q", "trunk")
	worktest.Git(t, w.guest, "reset", "-q", "--hard", "origin/trunk")
	running = []string{"claude"}
	start("", "/workspace stays on branch trunk: in it runs: claude\n  → beside it: agentlab start --worktree topic\n")
	running = nil
	start("topic", "/workspace is on topic now")
	start("", "")
	if w.notes.Len() > 0 {
		t.Errorf("nothing is new: %s", &w.notes)
	}
	worktest.Git(t, w.user, "commit", "-q", "--allow-empty", "-m", "more")
	start("", "pushed topic")
}

// Changes that were carried are in the sandbox: a later start does not deny it.
func TestCarriedChangesAreNotReported(t *testing.T) {
	w := newSessionWorld(t)
	worktest.Put(t, w.user, map[string]string{"local": "1"})
	l := &Link{Path: w.user, Remote: remoteName}
	note := func() string {
		t.Helper()
		w.notes.Reset()
		if commit, err := carriedChanges(t.Context(), w.app, l, StartOptions{}); commit != "" || err != nil {
			t.Fatal(commit, err)
		}
		return w.notes.String()
	}
	if got := note(); !strings.Contains(got, "the sandbox does not have") {
		t.Error(got)
	}
	commit, err := carriedChanges(t.Context(), w.app, l, StartOptions{WithChanges: true})
	if err == nil {
		err = l.SetKey(t.Context(), carriedKey, worktest.Git(t, w.user, "rev-parse", commit+"^{tree}"))
	}
	if err != nil {
		t.Fatal(err)
	}
	if got := note(); got != "" {
		t.Errorf("it was carried, but: %s", got)
	}
	worktest.Put(t, w.user, map[string]string{"local": "2"})
	if got := note(); !strings.Contains(got, "the sandbox does not have") {
		t.Errorf("it has changed since: %q", got)
	}
}

// What is not a work tree of a repository gets a hint that fits.
func TestLinkOfNoWorkTree(t *testing.T) {
	bare := filepath.Join(t.TempDir(), "bare.git")
	worktest.Git(t, worktest.Repo(t), "clone", "-q", "--bare", ".", bare)
	for path, want := range map[string]string{bare: "git clone " + bare, filepath.Join(bare, "none"): "check the path", t.TempDir(): "git init"} {
		if _, err := FindLink(t.Context(), path, ""); !strings.Contains(agentlab.HintOf(err), want) {
			t.Errorf("%s: %v (%s)", path, err, agentlab.HintOf(err))
		}
	}
}

func TestShownPath(t *testing.T) {
	for dir, want := range map[string]string{"/work/repo": "/workspace", "/work/repo/.worktrees/a": "/workspace/.worktrees/a", "/srv": "/srv"} {
		if got := ShownPath(dir); got != want {
			t.Errorf("%s: %s", dir, got)
		}
	}
}

// Environment files are sent by themselves, and what .agentlabignore names is not sent:
// neither are uncommitted changes, which would be carried or reported.
func TestSentFilesAreNoChanges(t *testing.T) {
	w := newSessionWorld(t)
	worktest.Put(t, w.user, map[string]string{".env.local": "A=1", "app/.envrc": "x", "private/key": "secret", ".env.key": "secret", transfer.IgnoreFile: "private/\n.env.key\n/.agentlabignore\n"})
	carried := func() string {
		t.Helper()
		w.notes.Reset()
		l := &Link{Path: w.user, Remote: remoteName}
		if _, err := carriedChanges(t.Context(), w.app, l, StartOptions{}); err != nil {
			t.Fatal(err)
		}
		note := w.notes.String()
		commit, err := carriedChanges(t.Context(), w.app, l, StartOptions{WithChanges: true})
		if err != nil {
			t.Fatal(err)
		}
		if commit == "" {
			return note
		}
		return note + worktest.Git(t, w.user, "diff", "--name-status", "HEAD", commit)
	}
	if got := carried(); got != "" {
		t.Errorf("without changes: %s", got)
	}
	worktest.Put(t, w.user, map[string]string{"new": "1"})
	if got := carried(); !strings.Contains(got, "does not have 1 file with") || !strings.HasSuffix(got, "start --with-changes\nA\tnew") {
		t.Errorf("with a new file: %s", got)
	}
}

// A start and 'agentlab sync-env' tell git in the session which files it gets; a start with
// --no-env leaves those of the last one.
func TestSentFilesAreExcluded(t *testing.T) {
	w := newSessionWorld(t)
	worktest.Put(t, w.user, map[string]string{".env": "A=1", "app/.envrc": "x"})
	src, err := gitsafe.FindCommit(t.Context(), w.user, "")
	if err != nil {
		t.Fatal(err)
	}
	var inits []string
	c := worktest.CommandClient(t, func(command []string, in []byte) ([]byte, string, int) {
		switch strings.Join(command[1:], " ") {
		case "session prepare":
			inits = append(inits, string(in))
			return []byte("{}"), "", 0
		case "repo init":
			inits = append(inits, string(in))
			return nil, "", 0
		}
		return w.real(command[2], in)
	})
	start := func(o StartOptions) {
		t.Helper()
		init, err := repoInit(t.Context(), w.user, src, o)
		if err == nil {
			_, _, err = Repo{C: c, Sandbox: "1", Path: w.user}.prepare(t.Context(), guestapi.SessionPrepare{Init: init})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	start(StartOptions{})
	start(StartOptions{NoEnv: true})
	for _, dir := range []string{"/home/agent", guestapi.ProjectDir, guestapi.RepoDir + "/"} {
		if err := ExcludeSent(t.Context(), c, transfer.SentEnvFiles{Sandbox: "1", Directory: dir, Files: []string{}}); err != nil {
			t.Error(err)
		}
	}
	for i, want := range []string{`"exclude":[".env","app/.envrc"]`, `"exclude":null`, `"exclude":[]`, `"exclude":[]`} {
		if i >= len(inits) || !strings.Contains(inits[i], want) {
			t.Errorf("%d: %q lacks %s", i, inits, want)
		}
	}
	if len(inits) != 4 {
		t.Errorf("calls: %q", inits)
	}
}
