package runner

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

const commitWork = `echo work > work.txt; git add -A; git commit -qm work`

// gitSandbox has a job with a repository.
func gitSandbox(t *testing.T, url, ref string, depth int, script string) *sandbox {
	t.Helper()
	job := shellJob(script)
	job.RepoURL, job.Ref, job.Depth = url, ref, depth
	return newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
}

func TestCloneRefs(t *testing.T) {
	repo := newRepo(t, nil)
	url := newGitServer(t, "").add(t, "repo", repo)
	rev := func(r string) string { return runGit(t, repo, "rev-parse", r+"^{commit}") }
	cases := []struct {
		name, ref string
		depth     int
		want      string
		commits   string // number of commits that the clone has
	}{
		{"default", "", 0, rev("main"), "3"},
		{"branch", "dev", 0, rev("dev"), "4"},
		{"full name", "refs/heads/dev", 0, rev("dev"), "4"},
		{"tag", "v1", 0, rev("v1"), "1"},
		{"tag, full name", "refs/tags/v1", 0, rev("v1"), "1"},
		{"commit", rev("main~1"), 0, rev("main~1"), "2"},
		{"short commit", rev("main~1")[:9], 0, rev("main~1"), "2"},
		{"depth", "", 1, rev("main"), "1"},
		{"branch with depth", "dev", 2, rev("dev"), "2"},
		{"commit with depth", rev("main~1"), 1, rev("main~1"), "1"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := gitSandbox(t, url, c.ref, c.depth, `git rev-list --count HEAD; git status --short; git branch --show-current; `+commitWork)
			rep := s.finish()
			if rep.Status != "COMPLETED" || rep.Result.BaseCommit != c.want || rep.Result.Commits != 1 || rep.Result.Branch != "agentlab/"+s.JobID {
				t.Errorf("%+v %+v", rep, rep.Result)
			}
			if got, want := s.Log(), c.commits+"\nagentlab/"+s.JobID+"\n"; got != want {
				t.Errorf("log %q, want %q", got, want)
			}
			s.fetchable(repo, rep)
		})
	}
}

// fetchable checks that the bundle can be fetched into the repository that
// the job came from, and gives the reported commit.
func (s *sandbox) fetchable(repo string, rep guestapi.Report) {
	s.t.Helper()
	name := filepath.Join(s.t.TempDir(), "result.bundle")
	writeFile(s.t, name, s.File(artBundle))
	runGit(s.t, repo, "fetch", "-q", name, "refs/heads/agentlab/"+s.JobID+":refs/agentlab/"+s.JobID)
	if got := runGit(s.t, repo, "rev-parse", "refs/agentlab/"+s.JobID); got != rep.Result.HeadCommit {
		s.t.Errorf("fetched %s, reported %s", got, rep.Result.HeadCommit)
	}
}

// changesEqualTheWorkTree checks that the commit of uncommitted changes has
// the result as its parent, and that base and diff give the same tree.
func (s *sandbox) changesEqualTheWorkTree(repo string, rep guestapi.Report) {
	s.t.Helper()
	name := filepath.Join(s.t.TempDir(), "result.bundle")
	writeFile(s.t, name, s.File(artBundle))
	runGit(s.t, repo, "fetch", "-q", name, guestapi.RefChanges+":refs/agentlab/"+s.JobID+"-changes")
	changes := "refs/agentlab/" + s.JobID + "-changes"
	if got := runGit(s.t, repo, "rev-parse", changes+"^"); got != rep.Result.HeadCommit {
		s.t.Errorf("the changes stand on %s, the result is %s", got, rep.Result.HeadCommit)
	}
	at, diff := filepath.Join(s.t.TempDir(), "w"), filepath.Join(s.t.TempDir(), "diff")
	runGit(s.t, repo, "worktree", "add", "-q", "--detach", at, rep.Result.BaseCommit)
	writeFile(s.t, diff, s.File(artDiff))
	runGit(s.t, at, "apply", "--index", "--allow-empty", diff)
	if got, want := runGit(s.t, at, "write-tree"), runGit(s.t, repo, "rev-parse", changes+"^{tree}"); got != want {
		s.t.Errorf("the changes differ from the diff:\n%s", runGit(s.t, repo, "diff", got, want))
	}
}

func TestCloneFailures(t *testing.T) {
	git := newGitServer(t, "")
	url := git.add(t, "repo", newRepo(t, nil))
	for name, c := range map[string]struct{ url, ref, want string }{
		"no repository": {git.URL + "/nothing", "", "not found"},
		"no branch":     {url, "nosuch", "nosuch"},
		"no commit":     {url, strings.Repeat("1", 40), "1111"},
		"no server":     {"http://127.0.0.1:1/repo", "", "127.0.0.1"},
		"helper":        {"ext::sh -c 'touch ../pwned'", "", "transport"},
		"local file":    {"file://" + t.TempDir(), "", "transport"},
	} {
		t.Run(name, func(t *testing.T) {
			s := gitSandbox(t, c.url, c.ref, 0, "true")
			rep := s.finish()
			if rep.Status != "FAILED" || !strings.Contains(rep.Message, c.want) || rep.ExitCode != nil {
				t.Errorf("%+v", rep)
			}
			if !strings.Contains(s.Log(), c.want) || !slices.Contains(s.Paths(), "agent.log") {
				t.Errorf("log %q, artifacts %q", s.Log(), s.Paths())
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "pwned")); err == nil {
				t.Error("a helper ran")
			}
		})
	}
}

func TestOccupiedClonePath(t *testing.T) {
	s := gitSandbox(t, newGitServer(t, "").add(t, "repo", newRepo(t, nil)), "", 0, "true")
	writeFile(t, filepath.Join(s.cfg.ClonePath, "precious"), "x")
	if rep := s.finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, "not empty") {
		t.Errorf("%+v", rep)
	}
	if _, err := os.Stat(filepath.Join(s.cfg.ClonePath, "precious")); err != nil {
		t.Error("it was removed")
	}
}

// A private repository: the token is used for cloning and pushing, and for
// the agent's own git, but is in no argument, no configuration and no log.
func TestCredential(t *testing.T) {
	const token = "ghp_0123456789abcdef"
	repo := newRepo(t, nil)
	git := newGitServer(t, token)
	job := shellJob(`git config --list --show-origin; cat .git/config; ls -a ~; git ls-remote -q origin main; git fetch -q origin; cat /proc/*/cmdline | tr '\0' ' ' || true
` + commitWork)
	job.RepoURL = git.add(t, "repo", repo)
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job, Git: &guestapi.Git{URL: git.URL, Token: token}}, artifact.Limits{})
	rep := s.finish()
	if rep.Status != "COMPLETED" || !rep.Result.Pushed {
		t.Fatalf("%+v %+v log %q", rep, rep.Result, s.Log())
	}
	if strings.Contains(s.Log(), token) || strings.Contains(s.Log(), "[redacted]") {
		t.Errorf("the token is seen in the log %q", s.Log())
	}
	if got := runGit(t, filepath.Join(git.root, "repo"), "rev-parse", "refs/heads/agentlab/"+s.JobID); got != rep.Result.HeadCommit {
		t.Errorf("pushed %s, reported %+v", got, rep.Result)
	}
	s.fetchable(repo, rep)
}

// Only the credential's own host gets it, also when the server asks for it or
// redirects.
func TestCredentialStaysAtItsHost(t *testing.T) {
	const token = "ghp_0123456789abcdef"
	var leaked atomic.Int32
	thief := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			leaked.Add(1)
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="give me"`)
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer thief.Close()
	redirect := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, thief.URL+r.URL.String(), http.StatusFound)
	}))
	defer redirect.Close()
	for name, c := range map[string]struct{ repo, cred string }{
		"another host": {thief.URL + "/repo", "https://github.com"},
		"redirect":     {redirect.URL + "/repo", redirect.URL},
	} {
		t.Run(name, func(t *testing.T) {
			job := shellJob("true")
			job.RepoURL = c.repo
			s := newSandbox(t, guestapi.BootstrapResponse{Job: job, Git: &guestapi.Git{URL: c.cred, Token: token}}, artifact.Limits{})
			if rep := s.finish(); rep.Status != "FAILED" {
				t.Errorf("%+v", rep)
			}
			if leaked.Load() != 0 {
				t.Error("the token went to another host")
			}
		})
	}
}

// A push that fails loses nothing.
func TestPushRefused(t *testing.T) {
	const token = "ghp_0123456789abcdef"
	repo := newRepo(t, nil)
	git := newGitServer(t, token)
	job := shellJob(commitWork)
	job.RepoURL = git.add(t, "repo", repo)
	writeFile(t, filepath.Join(git.root, "repo/hooks/pre-receive"), "#!/bin/sh\necho protected branch >&2\nexit 1\n")
	if err := os.Chmod(filepath.Join(git.root, "repo/hooks/pre-receive"), 0o755); err != nil {
		t.Fatal(err)
	}
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job, Git: &guestapi.Git{Token: token}}, artifact.Limits{})
	rep := s.finish()
	if rep.Status != "COMPLETED" || rep.Result.Pushed || !strings.Contains(rep.Message, "could not be pushed") {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	s.fetchable(repo, rep)
}

func TestBundledRepo(t *testing.T) {
	repo := newRepo(t, nil)
	for name, c := range map[string]struct {
		refs []string
		ref  string
		want string
	}{
		"HEAD":         {[]string{"HEAD", "main"}, "", "main"},
		"branch":       {[]string{"HEAD", "main", "dev"}, "dev", "dev"},
		"packer chose": {[]string{"HEAD", "main"}, "some/ref", "main"},
		"revision":     {[]string{"HEAD", "main"}, "HEAD^{/a b}~1", "main"},
		"hex tag":      {[]string{"HEAD", "main"}, "refs/tags/deadbeef00", "main"},
		"commit":       {[]string{"HEAD", "--all"}, runGit(t, repo, "rev-parse", "main~2"), "main~2"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "bundle")
			runGit(t, repo, append([]string{"bundle", "create", "-q", file}, c.refs...)...)
			job := shellJob(`git remote; cat .git/config; ` + commitWork)
			job.Bundled, job.Ref = true, c.ref
			s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
			f, err := os.Open(file)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }()
			s.GiveBundle(f)
			rep := s.finish()
			if rep.Status != "COMPLETED" || rep.Result.BaseCommit != runGit(t, repo, "rev-parse", c.want) || rep.Result.Commits != 1 {
				t.Errorf("%+v %+v", rep, rep.Result)
			}
			if strings.Contains(s.Log(), "origin") {
				t.Errorf("a remote that is not there: %q", s.Log())
			}
			s.fetchable(repo, rep)
		})
	}
}

func TestEmptyRepo(t *testing.T) {
	repo := t.TempDir()
	runGit(t, repo, "init", "-q", "-b", "main")
	url := newGitServer(t, "").add(t, "repo", repo)
	s := gitSandbox(t, url, "", 0, commitWork+"; echo more > more.txt")
	rep := s.finish()
	if rep.Status != "COMPLETED" || rep.Result.BaseCommit != "" || rep.Result.Commits != 1 || !rep.Result.Dirty {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	s.fetchable(repo, rep)
	if d := s.File(artDiff); !strings.Contains(d, "more.txt") || !strings.Contains(d, "work.txt") {
		t.Errorf("diff %q", d)
	}
}

// What is committed, changed, new, removed and ignored.
func TestDiff(t *testing.T) {
	repo := newRepo(t, map[string]string{"gone.txt": "gone\n", ".gitignore": "ignored\n", "bin": "\x00\x01", "run.sh": "true\n", "d/a": "a\n"})
	url := newGitServer(t, "").add(t, "repo", repo)
	cases := map[string]struct {
		script         string
		commits        int
		dirty          bool
		in, out        []string
		bundle, noDiff bool
		uncommitted    int
	}{
		"nothing":     {script: "touch file.txt; echo x > ignored", noDiff: true},
		"committed":   {script: commitWork, commits: 1, bundle: true, in: []string{"work.txt"}},
		"uncommitted": {bundle: true, uncommitted: 5, script: "echo changed > file.txt; rm gone.txt; echo new > 'new file'; printf '\\0\\2' > bin; chmod +x run.sh; echo x > ignored", dirty: true, in: []string{"+changed", "gone.txt", "new file", "GIT binary patch", "new mode 100755"}, out: []string{"ignored"}},
		"both":        {uncommitted: 1, script: commitWork + "; echo more > more.txt", commits: 1, dirty: true, bundle: true, in: []string{"work.txt", "more.txt"}},
		"staged":      {script: "echo more > more.txt; git add more.txt", bundle: true, uncommitted: 1, dirty: true, in: []string{"more.txt"}},
		"odd names":   {script: `printf x > "$(printf 'a b\nc')"; echo y > -rf; git add -N -- -rf`, bundle: true, uncommitted: 2, dirty: true, in: []string{"-rf"}},
		"conflict": {uncommitted: 1, commits: 1, dirty: true, bundle: true, in: []string{"<<<<<<<"}, script: `git checkout -q -b x; echo a > file.txt; git commit -qam a; git checkout -q -; echo b > file.txt; git commit -qam b
git merge -q x || test -s .git/MERGE_HEAD`},
		"folder to link":         {uncommitted: 3, dirty: true, bundle: true, in: []string{"120000"}, script: "mv d d2; ln -s d2 d"},
		"folder to link outside": {uncommitted: 2, dirty: true, bundle: true, in: []string{"120000"}, script: "rm -r d; ln -s /etc d"},
		"folder to file":         {uncommitted: 2, dirty: true, bundle: true, in: []string{"+x"}, script: "rm -r d; echo x > d"},
		"file to folder":         {uncommitted: 2, dirty: true, bundle: true, in: []string{"run.sh/x"}, script: "rm run.sh; mkdir run.sh; echo x > run.sh/x"},
		"conflict of a removed file": {uncommitted: 1, commits: 1, dirty: true, bundle: true, in: []string{"deleted file"}, script: `git checkout -q -b x; echo a > file.txt; git commit -qam a; git checkout -q -; echo b > file.txt; git commit -qam b
git merge -q x || rm file.txt`},
		"other branch": {script: "git checkout -q -b mine; " + commitWork, commits: 1, bundle: true, in: []string{"work.txt"}},
		"left branch":  {uncommitted: 1, script: "git checkout -q -b mine; " + commitWork + "; git checkout -q -", commits: 1, bundle: true, dirty: true},
		"detached":     {script: "git checkout -q --detach; " + commitWork, commits: 1, bundle: true, in: []string{"work.txt"}},
		"went back":    {script: "git reset -q --hard HEAD~1", in: []string{"-three"}},
		"amended":      {script: "echo more > more.txt; git add -A; git commit -q --amend --no-edit", commits: 1, bundle: true, in: []string{"more.txt"}},
		"repacked":     {script: commitWork + "; git pack-refs --all; git gc -q", commits: 1, bundle: true, in: []string{"work.txt"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			s := gitSandbox(t, url, "", 0, c.script)
			rep := s.finish()
			if rep.Status != "COMPLETED" || rep.Result.Commits != c.commits || rep.Result.Dirty != c.dirty || rep.Result.Uncommitted != c.uncommitted || rep.Message != "" {
				t.Errorf("%+v %+v log %q", rep, rep.Result, s.Log())
			}
			diff := s.File(artDiff)
			for _, want := range c.in {
				if !strings.Contains(diff, want) {
					t.Errorf("%q is not in the diff %q", want, diff)
				}
			}
			for _, not := range c.out {
				if strings.Contains(diff, not) {
					t.Errorf("%q is in the diff %q", not, diff)
				}
			}
			if got := slices.Contains(s.Paths(), artBundle); got != c.bundle {
				t.Errorf("artifacts %q", s.Paths())
			}
			if got := !slices.Contains(s.Paths(), artDiff); got != (c.noDiff || diff == "") {
				t.Errorf("artifacts %q", s.Paths())
			}
			if c.commits > 0 {
				s.fetchable(repo, rep)
			}
			if c.uncommitted > 0 {
				s.changesEqualTheWorkTree(repo, rep)
			}
			if diff != "" {
				check := filepath.Join(t.TempDir(), "check")
				runGit(t, repo, "worktree", "add", "-q", "--detach", check, "main")
				writeFile(t, check+".diff", diff)
				runGit(t, check, "apply", "--check", check+".diff")
			}
		})
	}
}

// A file that changed in the second in which it was checked out, and kept its
// size, has changed.
func TestDiffOfAQuickAgent(t *testing.T) {
	url := newGitServer(t, "").add(t, "repo", newRepo(t, map[string]string{"n": "1\n"}))
	// Both get the same old time, so that it does not matter how quick this
	// machine is; git also sees the inode's time, in seconds.
	s := gitSandbox(t, url, "", 0, `then=$(( $(date +%s) - 10 )); while [ "$(date +%N | cut -c1)" -gt 1 ]; do sleep 0.02; done
touch -d "@$then" n; git update-index --refresh; touch -d "@$then" .git/index; echo 2 > n; touch -d "@$then" n`)
	if rep := s.finish(); !rep.Result.Dirty || !strings.Contains(s.File(artDiff), "+2") {
		t.Errorf("%+v %+v %q", rep, rep.Result, s.File(artDiff))
	}
}

func TestLargeDiffIsCut(t *testing.T) {
	url := newGitServer(t, "").add(t, "repo", newRepo(t, nil))
	s := gitSandbox(t, url, "", 0, `echo small > a-small; { yes 0123456789 || true; } | head -c 20000000 > b-large; echo late > z-late`)
	rep := s.finish()
	if rep.Status != "COMPLETED" || !strings.Contains(rep.Message, "is cut") || !rep.Result.Dirty {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	if d := s.File(artDiff); !strings.Contains(d, "a-small") || strings.Contains(d, "b-large") || len(d) > maxDiff {
		t.Errorf("%d bytes of diff", len(d))
	}
}

// A conflict that cannot be taken leaves the other changes as they are.
func TestUncommittedConflicts(t *testing.T) {
	url := newGitServer(t, "").add(t, "repo", newRepo(t, nil))
	for name, script := range map[string]string{
		"of a submodule": `git init -q sub; for n in 1 2 3; do git -C sub commit -q --allow-empty -m $n; done
for n in 1 2 3; do printf '160000 %s %s\tsub\n' $(git -C sub rev-parse HEAD~$((3 - n))) $n; done | git update-index --index-info`,
		"in a large file": `git checkout -q -b x; echo a > file.txt; git commit -qam a; git checkout -q -; echo b > file.txt; git commit -qam b
git merge -q x || truncate -s 65M file.txt`,
	} {
		t.Run(name, func(t *testing.T) {
			s := gitSandbox(t, url, "", 0, script+"; echo new > new.txt")
			rep := s.finish()
			if rep.Status != "COMPLETED" || rep.Result.Uncommitted != 1 || !rep.Result.Dirty || !strings.Contains(rep.Message, "1 uncommitted file(s) are not sent") ||
				!strings.Contains(s.File(artDiff), "new.txt") || !slices.Contains(s.Paths(), artBundle) {
				t.Errorf("%+v %+v log %q diff %q", rep, rep.Result, s.Log(), s.File(artDiff))
			}
		})
	}
}

// What the agent has stashed is in a branch of the bundle.
func TestStashedChangesAreSent(t *testing.T) {
	const stash = "echo stashed > file.txt; echo new > new.txt; git stash -q -u"
	for name, c := range map[string]struct {
		script  string
		commits int
	}{
		"only":          {stash, 0},
		"packed":        {stash + "; git pack-refs --all", 0},
		"and a commit":  {stash + "; git commit -q --allow-empty -m work", 1},
		"and a change":  {stash + "; echo draft > draft.txt", 0},
		"on the commit": {"git commit -q --allow-empty -m work; " + stash, 1},
	} {
		t.Run(name, func(t *testing.T) {
			repo := newRepo(t, nil)
			s := gitSandbox(t, newGitServer(t, "").add(t, "repo", repo), "", 0, c.script)
			rep := s.finish()
			if rep.Status != "COMPLETED" || rep.Result.Commits != c.commits || !strings.Contains(rep.Message, stashBranch) {
				t.Errorf("%+v %+v", rep, rep.Result)
			}
			name := filepath.Join(t.TempDir(), "result.bundle")
			writeFile(t, name, s.File(artBundle))
			runGit(t, repo, "fetch", "-q", name, stashBranch+":stashed")
			runGit(t, repo, "stash", "apply", "-q", "stashed")
			for file, want := range map[string]string{"file.txt": "stashed\n", "new.txt": "new\n"} {
				if got, err := os.ReadFile(filepath.Join(repo, file)); err != nil || string(got) != want {
					t.Errorf("%s: %q, %v", file, got, err)
				}
			}
		})
	}
}

// Stashed changes that are damaged do not keep the commits from the bundle.
func TestDamagedStash(t *testing.T) {
	repo := newRepo(t, nil)
	s := gitSandbox(t, newGitServer(t, "").add(t, "repo", repo), "", 0,
		"git commit -q --allow-empty -m work; echo "+strings.Repeat("1", 40)+" > .git/refs/stash")
	rep := s.finish()
	if rep.Status != "COMPLETED" || rep.Result.Commits != 1 || !strings.Contains(rep.Message, "stashed changes cannot be packed") {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	s.fetchable(repo, rep)
}

// What is too large or is no file stays behind, with a warning, and the rest
// is sent. What the agent hides in the index does not matter.
func TestUncommittedIsBounded(t *testing.T) {
	repo := newRepo(t, nil)
	url := newGitServer(t, "").add(t, "repo", repo)
	s := gitSandbox(t, url, "", 0, `truncate -s 70M huge; mkfifo pipe; git init -q nested; (cd nested; echo n > n; git add n; git commit -qm n)
echo changed > file.txt; ln -s /etc/passwd link; echo garbage > .git/index`)
	rep := s.finish()
	if rep.Status != "COMPLETED" || rep.Result.Uncommitted != 2 || !strings.Contains(rep.Message, "2 uncommitted file(s) are not sent") || !strings.Contains(rep.Message, "huge") || !strings.Contains(rep.Message, "limits of 64 MiB each and 256 MiB together") {
		t.Fatalf("%+v %+v", rep, rep.Result)
	}
	name := filepath.Join(t.TempDir(), "result.bundle")
	writeFile(t, name, s.File(artBundle))
	runGit(t, repo, "fetch", "-q", name, guestapi.RefChanges+":refs/agentlab/x")
	if got := runGit(t, repo, "diff", "--name-status", "--no-renames", "main", "refs/agentlab/x"); got != "M\tfile.txt\nA\tlink" {
		t.Errorf("the changes are %q", got)
	}
}

// Cancelling while the clone hangs.
func TestCancelDuringClone(t *testing.T) {
	hang := make(chan struct{})
	reached := make(chan struct{}, 10)
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		reached <- struct{}{}
		<-hang
	}))
	defer srv.Close()
	defer close(hang)
	s := gitSandbox(t, srv.URL+"/repo", "", 0, "true")
	done := make(chan error, 1)
	go func() { done <- s.run() }()
	select {
	case <-reached:
	case err := <-done:
		t.Fatalf("the clone ended: %v", err)
	}
	s.Direct("CANCELLED")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if rep := s.Final(); rep.Status != "CANCELLED" {
		t.Errorf("%+v", rep)
	}
}

func TestCredentialScopes(t *testing.T) {
	for _, c := range []struct {
		repo, cred string
		push       bool
	}{
		{"https://github.com/a/b", "", true},
		{"https://github.com/a/b", "https://github.com", true},
		{"https://GitHub.com/a/b", "https://github.com/x", true},
		{"https://github.com/a/b", "https://gitlab.com", false},
		{"http://github.com/a/b", "https://github.com", false},
		{"https://github.com:444/a", "https://github.com", false},
		{"https://github.com.evil.org/a", "https://github.com", false},
		{"git@github.com:a/b", "https://github.com", false},
	} {
		job := &guestapi.Job{RepoURL: c.repo}
		if got := mayPush(job, &guestapi.Git{URL: c.cred, Token: "t"}); got != c.push {
			t.Errorf("%+v: %v", c, got)
		}
	}
	ssh := &guestapi.Git{SSHPrivateKey: "k"}
	for url, want := range map[string]bool{"git@github.com:a/b": true, "ssh://git@github.com/a/b": true, "https://github.com/a/b": false, "": false} {
		if got := mayPush(&guestapi.Job{RepoURL: url}, ssh); got != want {
			t.Errorf("%s: %v", url, got)
		}
	}
	ssh.URL = "ssh://git@github.com"
	for url, want := range map[string]bool{"git@github.com:a/b": true, "git@evil.org:a/b": false} {
		if got := mayPush(&guestapi.Job{RepoURL: url}, ssh); got != want {
			t.Errorf("%s: %v", url, got)
		}
	}
	if fmt.Sprint(hostOf("user@host:path")) == "" {
		t.Error("no host")
	}
}
