package session

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// guestFunc answers a command of the host in place of a guest.
type guestFunc func(verb string, in []byte) (out []byte, errOut string, code int)

// guestClient returns a client whose sandboxes all are guest.
func guestClient(t *testing.T, guest guestFunc) *client.Client {
	t.Helper()
	return worktest.CommandClient(t, func(command []string, in []byte) ([]byte, string, int) { return guest(command[2], in) })
}

// sessionWorld is a repository of the user and the one of a session.
type sessionWorld struct {
	*testing.T
	user, guest string
	app         worktest.UI
	notes       bytes.Buffer
}

func newSessionWorld(t *testing.T) *sessionWorld {
	w := &sessionWorld{T: t, user: worktest.Repo(t), guest: filepath.Join(t.TempDir(), "guest")}
	worktest.Git(t, w.user, "clone", "-q", w.user, w.guest)
	w.app = worktest.UI{Out: &w.notes}
	return w
}

// honest answers as 'agentlab-agent repo' does.
func (w *sessionWorld) honest(verb string, in []byte) (out []byte, errOut string, code int) {
	w.Helper()
	switch verb {
	case "state":
		st := guestapi.RepoState{
			Branches:  map[string]string{"trunk": worktest.Git(w.T, w.guest, "rev-parse", "trunk")},
			Worktrees: []guestapi.RepoWorktree{{Branch: "trunk"}},
		}
		out, _ = json.Marshal(st)
	case "pack":
		var p guestapi.RepoPack
		if err := json.Unmarshal(in, &p); err != nil {
			w.Error(err)
		}
		return w.bundle("trunk", "^origin/trunk"), "", 0
	}
	return out, "", 0
}

func (w *sessionWorld) bundle(revs ...string) []byte {
	w.Helper()
	name := filepath.Join(w.TempDir(), "bundle")
	worktest.Git(w.T, w.guest, append([]string{"bundle", "create", "-q", name}, revs...)...)
	p, err := os.ReadFile(name)
	if err != nil {
		w.Fatal(err)
	}
	return p
}

func (w *sessionWorld) commit(files map[string]string) string {
	w.Helper()
	worktest.Put(w.T, w.guest, files)
	worktest.Git(w.T, w.guest, "add", "-A")
	worktest.Git(w.T, w.guest, "commit", "-q", "-m", "of the guest")
	return worktest.Git(w.T, w.guest, "rev-parse", "HEAD")
}

// open returns the session with a guest that answers so.
func (w *sessionWorld) open(guest guestFunc) (*Opened, error) {
	w.Helper()
	s := &Opened{
		Repo:    Repo{C: guestClient(w.T, guest), Sandbox: "1", Path: w.user},
		Session: api.Session{ID: "se-1", Name: "s"},
		Link:    Link{Path: w.user, Remote: remoteName, Session: "se-1"},
	}
	var err error
	s.Guest, err = s.Repo.State(w.Context())
	return s, err
}

// refs are the refs of the user's repository.
func (w *sessionWorld) refs() string { return worktest.Git(w.T, w.user, "for-each-ref") }

func TestSync(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	head := w.commit(map[string]string{"new": "1"})
	s, err := w.open(w.honest)
	if err != nil {
		t.Fatal(err)
	}
	got, err := fetchSession(t.Context(), w.app, s)
	if err != nil || len(got.Fetched) != 1 || got.Fetched[0].Commit != head || got.Fetched[0].Commits != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	m, _, err := mergeSession(t.Context(), w.app, s, "", "")
	if err != nil || m == nil || m.Branch != "trunk" || m.Commit != head || !m.FastForward {
		t.Fatalf("%+v, %v", m, err)
	}
	if m, _, err := mergeSession(t.Context(), w.app, s, "", ""); m != nil || err != nil {
		t.Errorf("a second time: %+v, %v", m, err)
	}
	if m, _, err := mergeSession(t.Context(), w.app, s, "review", ""); err != nil || m.Commit != head {
		t.Errorf("into a new branch: %+v, %v", m, err)
	}
	worktest.Git(t, w.user, "branch", "-q", "other", "trunk~1")
	worktest.Git(t, w.user, "checkout", "-q", "other")
	worktest.Put(t, w.user, map[string]string{"new": "conflict"})
	worktest.Git(t, w.user, "add", "-A")
	worktest.Git(t, w.user, "commit", "-q", "-m", "mine")
	if _, _, err := mergeSession(t.Context(), w.app, s, "", "trunk"); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(agentlab.HintOf(err), "git merge --abort") {
		t.Errorf("a conflict: %v (%s)", err, agentlab.HintOf(err))
	}
	worktest.Git(t, w.user, "merge", "--abort")
	worktest.Git(t, w.user, "branch", "-q", "theirs", "other")
	if _, _, err := mergeSession(t.Context(), w.app, s, "theirs", ""); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("commits of a branch were lost: %v", err)
	}
}

// A commit of the session that the user has amended is not merged again.
func TestSyncOfAnAmendedCommit(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	w.commit(map[string]string{"new": "1"})
	s := w.fetched()
	if m, _, err := mergeSession(t.Context(), w.app, s, "", ""); err != nil || m == nil {
		t.Fatalf("%+v, %v", m, err)
	}
	worktest.Put(t, w.user, map[string]string{"new": "2"})
	worktest.Git(t, w.user, "commit", "-q", "-a", "--amend", "-m", "better")
	amended := worktest.Git(t, w.user, "rev-parse", "HEAD")
	if m, _, err := mergeSession(t.Context(), w.app, s, "", ""); err != nil || m != nil || worktest.Git(t, w.user, "rev-parse", "HEAD") != amended {
		t.Errorf("%+v, %v", m, err)
	}
	why, next := notMerged(t.Context(), w.app, s, "", "")
	if !strings.Contains(why, "amended or replaced here") || next != "git push --force agentlab trunk:trunk" {
		t.Errorf("%s → %s", why, next)
	}
	why, next = behind(t.Context(), w.app, s.Link, "trunk", s.Guest.Branches["trunk"], amended)
	if !strings.Contains(why, "amended or replaced here") || next != "git push --force agentlab trunk" {
		t.Errorf("a start: %s → %s", why, next)
	}
}

// Files that block a merge are named, and two commands wait for each other.
func TestSyncNamesWhatIsInTheWay(t *testing.T) {
	w := newSessionWorld(t)
	w.commit(map[string]string{"new": "1", "other": "1"})
	s := w.fetched()
	worktest.Put(t, w.user, map[string]string{"new": "mine"})
	_, _, err := mergeSession(t.Context(), w.app, s, "", "")
	if agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.HasSuffix(err.Error(), ": new") {
		t.Errorf("%v", err)
	}
	unlock, err := gitsafe.LockRepo(t.Context(), w.app, w.user, false)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	w.app.Out = cancelOn{"waiting for another command", cancel}
	if _, err := Sync(ctx, w.app, s, "", "", true); !errors.Is(err, context.Canceled) {
		t.Errorf("a second one: %v", err)
	}
	unlock()
	w.app.Out = &w.notes
	if _, err := Sync(t.Context(), w.app, s, "", "", true); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// cancelOn cancels a context when a text is written.
type cancelOn struct {
	text   string
	cancel func()
}

func (c cancelOn) Write(p []byte) (int, error) {
	if strings.Contains(string(p), c.text) {
		c.cancel()
	}
	return len(p), nil
}

// A user without an identity in git's configuration can have one in the environment.
func TestMergeHasTheIdentityOfTheUser(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv("GIT_AUTHOR_NAME", "Author")
	t.Setenv("GIT_AUTHOR_EMAIL", "author@example.com")
	t.Setenv("GIT_COMMITTER_NAME", "Committer")
	t.Setenv("GIT_COMMITTER_EMAIL", "committer@example.com")
	w := newSessionWorld(t)
	w.commit(map[string]string{"theirs": "1"})
	worktest.Put(t, w.user, map[string]string{"mine": "1"})
	worktest.Git(t, w.user, "add", "-A")
	worktest.Git(t, w.user, "commit", "-q", "-m", "mine")
	s, err := w.open(w.honest)
	if err == nil {
		_, err = fetchSession(t.Context(), w.app, s)
	}
	if err == nil {
		_, _, err = mergeSession(t.Context(), w.app, s, "", "")
	}
	if got := worktest.Git(t, w.user, "log", "-1", "--format=%an %ce"); err != nil || got != "Author committer@example.com" {
		t.Errorf("%q, %v", got, err)
	}
}

// A sync without new commits asks the guest for nothing more than its state.
func TestSyncOfNothingIsShort(t *testing.T) {
	w := newSessionWorld(t)
	w.commit(map[string]string{"new": "1"})
	packs := 0
	s, err := w.open(func(verb string, in []byte) ([]byte, string, int) {
		if verb == "pack" {
			packs++
		}
		return w.honest(verb, in)
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := fetchSession(t.Context(), w.app, s); err != nil {
			t.Fatal(err)
		}
	}
	if packs != 1 {
		t.Errorf("the guest packed %d times", packs)
	}
}

// A session is removed only if all its work is here, on more than the refs of the session,
// which are removed with it.
func TestWorkOnlyInSession(t *testing.T) {
	w := newSessionWorld(t)
	l := Link{Path: w.user, Remote: remoteName}
	st := guestapi.RepoState{
		Branches:  map[string]string{"trunk": worktest.Git(t, w.user, "rev-parse", "trunk")},
		Worktrees: []guestapi.RepoWorktree{{Branch: "trunk"}},
	}
	check := func(want string) {
		t.Helper()
		if left := strings.Join(onlyInSession(t.Context(), l, st), "; "); left != want {
			t.Errorf("got %q, want %q", left, want)
		}
	}
	check("")
	head := w.commit(map[string]string{"new": "1"})
	st.Branches["fix"] = head
	check("commits of fix")
	worktest.Git(t, w.user, "fetch", "-q", w.guest, "+trunk:refs/remotes/agentlab/fix")
	check("commits of fix, which only refs/remotes/agentlab/* has")
	worktest.Git(t, w.user, "branch", "-q", "mine", "refs/remotes/agentlab/fix")
	check("")
	st.Worktrees = append(st.Worktrees, guestapi.RepoWorktree{Dir: ".worktrees/x", Head: strings.Repeat("ab", 20), Uncommitted: 2})
	check("commits of the detached HEAD of /workspace/.worktrees/x; 2 files with uncommitted changes in /workspace/.worktrees/x")
	st.Worktrees, st.Elsewhere = st.Worktrees[:1], 1
	check("stashes, or work outside of /workspace") // of an earlier version
	stashes := 0
	st.Stashes = &stashes
	check("work trees outside of /workspace, or what jobs have put into /work/.agentlab-saved")
	stashes = 1
	check("1 stash entry")
	st.Elsewhere, stashes = 4, 3
	check("3 stash entries; work trees outside of /workspace, or what jobs have put into /work/.agentlab-saved")
}

// Nothing that a guest answers changes anything but the refs of its session.
func TestHostileSession(t *testing.T) {
	t.Parallel()
	good := strings.Repeat("ab", 20)
	state := func(text string) func(*sessionWorld) guestFunc {
		return func(*sessionWorld) guestFunc {
			return func(verb string, _ []byte) ([]byte, string, int) {
				if verb != "state" {
					return nil, "", 0 // otherwise a bundle would be what is refused
				}
				return []byte(text), "", 0
			}
		}
	}
	trees := `"worktrees":[{"dir":""}]`
	pack := func(bundle func(*sessionWorld) []byte) func(*sessionWorld) guestFunc {
		return func(w *sessionWorld) guestFunc {
			return func(verb string, in []byte) ([]byte, string, int) {
				if verb == "pack" {
					return bundle(w), "", 0
				}
				return w.honest(verb, in)
			}
		}
	}
	for name, attack := range map[string]func(*sessionWorld) guestFunc{
		"not JSON":               state("x"),
		"endless state":          state(`{"branches":{"` + strings.Repeat("a", guestapi.MaxRepoState) + `"`),
		"branch leaves refs":     state(`{"branches":{"../../heads/trunk":"` + good + `"},` + trees + `}`),
		"branch is an option":    state(`{"branches":{"--upload-pack=x":"` + good + `"},` + trees + `}`),
		"branch is empty":        state(`{"branches":{"":"` + good + `"},` + trees + `}`),
		"branch has controls":    state(`{"branches":{"a\u001b[31m":"` + good + `"},` + trees + `}`),
		"branch has a newline":   state(`{"branches":{"a\nupdate refs/heads/trunk":"` + good + `"},` + trees + `}`),
		"commit is an option":    state(`{"branches":{"a":"--all"},` + trees + `}`),
		"commit is a ref":        state(`{"branches":{"a":"refs/heads/trunk"},` + trees + `}`),
		"first tree elsewhere":   state(`{"branches":{},"worktrees":[{"dir":"../x"}]}`),
		"tree leaves the folder": state(`{"branches":{},"worktrees":[{"dir":""},{"dir":".worktrees/../../x"}]}`),
		"tree is absolute":       state(`{"branches":{},"worktrees":[{"dir":""},{"dir":"/etc"}]}`),
		"tree in .git":           state(`{"branches":{},"worktrees":[{"dir":""},{"dir":".worktrees/.git/x"}]}`),
		"tree has controls":      state(`{"branches":{},"worktrees":[{"dir":""},{"dir":".worktrees/\u001b]0;x\u0007","branch":"a"}]}`),
		"negative rest":          state(`{"branches":{},"worktrees":[{"dir":""}],"elsewhere":-1}`),
		"more stashes":           state(`{"branches":{},"worktrees":[],"elsewhere":1,"stashes":2}`),
		"negative count":         state(`{"branches":{},"worktrees":[{"dir":"","uncommitted":-1}]}`),
		"branches without trees": state(`{"branches":{"a":"` + good + `"},"worktrees":[]}`),
		"commit that is nowhere": func(w *sessionWorld) guestFunc {
			return func(verb string, in []byte) ([]byte, string, int) {
				if verb == "state" {
					return []byte(`{"branches":{"trunk":"` + good + `"},` + trees + `}`), "", 0
				}
				return nil, "", 0
			}
		},
		"command fails": func(w *sessionWorld) guestFunc {
			return func(string, []byte) ([]byte, string, int) { return nil, "\x1b]0;title\a", 1 }
		},
		"bundle is garbage":   pack(func(*sessionWorld) []byte { return []byte("garbage") }),
		"bundle without pack": pack(func(*sessionWorld) []byte { return []byte("# v2 git bundle\n" + good + " refs/heads/trunk\n\n") }),
		"bundle of other refs": pack(func(w *sessionWorld) []byte {
			w.commit(map[string]string{"x": "x"})
			worktest.Git(w.T, w.guest, "branch", "-q", "other")
			return w.bundle("other", "^origin/trunk")
		}),
		"bundle has .git": pack(func(w *sessionWorld) []byte {
			worktest.Put(w.T, w.guest, map[string]string{"config": "[core]\n"})
			blob := worktest.Git(w.T, w.guest, "hash-object", "-w", "config")
			sub := mktree(w, "100644 blob "+blob+"\tconfig\n")
			tree := mktree(w, "040000 tree "+sub+"\t.git\n")
			worktest.Git(w.T, w.guest, "update-ref", "refs/heads/trunk", worktest.Git(w.T, w.guest, "commit-tree", "-p", "trunk", "-m", "x", tree))
			return w.bundle("trunk", "^origin/trunk")
		}),
	} {
		t.Run(name, func(t *testing.T) {
			w := newSessionWorld(t)
			before := w.refs()
			s, err := w.open(attack(w))
			if err == nil {
				_, err = fetchSession(t.Context(), w.app, s)
			}
			if err == nil {
				t.Error("it was accepted")
			} else if strings.ContainsAny(err.Error()+agentlab.HintOf(err), "\x1b\a\n") {
				t.Errorf("the error has control characters: %q", err)
			}
			if after := w.refs(); after != before {
				t.Errorf("refs have changed:\n%s\nbefore:\n%s", after, before)
			}
		})
	}
}

// mktree writes a tree without git's checks of names.
func mktree(w *sessionWorld, entries string) string {
	w.Helper()
	out, err := gitsafe.Command{Stdin: strings.NewReader(entries)}.Run(w.Context(), w.guest, "-c", "core.protectHFS=false", "-c", "core.protectNTFS=false", "mktree", "--missing")
	if err != nil {
		w.Fatal(err)
	}
	return out
}

// A guest's commits choose filters and merge drivers by .gitattributes; those of the
// user's configuration, and hooks, are not run.
func TestSyncRunsNothing(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	marker := filepath.Join(t.TempDir(), "ran")
	run := "touch " + marker + "; cat"
	for key, value := range map[string]string{
		"filter.evil.smudge": run, "filter.evil.clean": run, "filter.evil.required": "true",
		"merge.evil.driver": "touch " + marker, "diff.evil.textconv": run, "core.fsmonitor": "touch " + marker,
		"commit.gpgSign": "true", "gpg.program": "touch " + marker, "agentlab.return": "allow",
	} {
		worktest.Git(t, w.user, "config", key, value)
	}
	for _, hook := range []string{"post-merge", "post-checkout", "reference-transaction", "pre-merge-commit", "commit-msg", "prepare-commit-msg"} {
		name := filepath.Join(w.user, ".git/hooks", hook)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte("#!/bin/sh\ntouch "+marker+"\n"), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	worktest.Put(t, w.user, map[string]string{"both": "1\n2\n3\n4\n5\n6\n7\n8\nmine\n"})
	worktest.Git(t, w.user, "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "commit.gpgSign=false", "add", "-A")
	worktest.Git(t, w.user, "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "commit.gpgSign=false", "commit", "-q", "-m", "mine")
	w.commit(map[string]string{".gitattributes": "* filter=evil merge=evil diff=evil\n", "new": "1"})
	s := w.fetched()
	m, _, err := mergeSession(t.Context(), w.app, s, "", "")
	if err != nil || m == nil || m.FastForward {
		t.Fatalf("%+v, %v", m, err)
	}
	if p, err := os.ReadFile(filepath.Join(w.user, "new")); string(p) != "1" {
		t.Errorf("the merge has %q, %v", p, err)
	}
	if _, err := os.Lstat(marker); err == nil {
		t.Error("a program of the user's configuration was run")
	}
}

// The answer of a guest to a push is shown without control characters, and only for the
// branches that were pushed.
func TestPushAnswers(t *testing.T) {
	w := newSessionWorld(t)
	worktest.Put(t, w.user, map[string]string{"new": "1"})
	worktest.Git(t, w.user, "add", "-A")
	worktest.Git(t, w.user, "commit", "-q", "-m", "mine")
	var sent guestapi.RepoReceive
	var bundle []byte
	s, err := w.open(func(verb string, in []byte) ([]byte, string, int) {
		if verb != "receive" {
			return w.honest(verb, in)
		}
		var line []byte
		line, bundle, _ = bytes.Cut(in, []byte("\n"))
		if err := json.Unmarshal(line, &sent); err != nil {
			t.Error(err)
		}
		return []byte(`{"errors":{"trunk":"no\u001b[31m\nok refs/heads/x","elsewhere":"x"}}`), "", 0
	})
	if err != nil {
		t.Fatal(err)
	}
	head := worktest.Git(t, w.user, "rev-parse", "HEAD")
	got, err := s.Push(t.Context(), Pushed{Updates: []guestapi.RepoUpdate{{Branch: "trunk", Commit: head}}}, knownTo(s.Guest), w.app.Meter())
	if err != nil || len(got) != 1 || strings.ContainsAny(got["trunk"], "\x1b\n") || !strings.HasPrefix(got["trunk"], "no") {
		t.Errorf("%q, %v", got, err)
	}
	if len(sent.Updates) != 1 || sent.Updates[0].Commit != head || !bytes.HasPrefix(bundle, []byte("# v2 git bundle\n-"+s.Guest.Branches["trunk"])) {
		t.Errorf("sent %+v, bundle %.80q", sent, bundle)
	}
}

// A sync that fails, on a full disk or because another git holds a lock, leaves the
// repository as it was, and works when it is repeated (seed 004, edge cases).
func TestSyncThatFails(t *testing.T) {
	smalldisk.Run(t, "32m", func(t *testing.T, dir string) {
		w := newSessionWorld(t)
		small := filepath.Join(dir, "user")
		worktest.Git(t, w.user, "clone", "-q", w.user, small)
		worktest.Git(t, small, "remote", "remove", "origin")
		w.user = small
		big := make([]byte, 4<<20)
		_, _ = rand.Read(big)
		w.commit(map[string]string{"big": string(big)})
		s, err := w.open(w.honest)
		if err != nil {
			t.Fatal(err)
		}
		before := w.refs() + worktest.Git(t, small, "--no-optional-locks", "status", "--porcelain")
		fails := func(why string) {
			t.Helper()
			if _, err := fetchSession(t.Context(), w.app, s); err == nil {
				t.Errorf("%s: it succeeded", why)
			}
			if after := w.refs() + worktest.Git(t, small, "--no-optional-locks", "status", "--porcelain"); after != before {
				t.Errorf("%s: refs have changed:\n%s", why, after)
			}
			worktest.Git(t, small, "fsck", "--strict")
		}
		smalldisk.Fill(t, dir, 1<<20)
		fails("full disk")
		if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
			t.Fatal(err)
		}
		lock := filepath.Join(small, ".git/refs/remotes/agentlab/trunk.lock")
		if err := errors.Join(os.MkdirAll(filepath.Dir(lock), 0o755), os.WriteFile(lock, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		fails("lock")
		if err := os.Remove(lock); err != nil {
			t.Fatal(err)
		}
		if got, err := fetchSession(t.Context(), w.app, s); err != nil || len(got.Fetched) != 1 {
			t.Errorf("afterwards: %+v, %v", got, err)
		}
	})
}
