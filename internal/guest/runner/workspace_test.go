package runner

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/test/disk"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// workspace is a directory on another file system than the root's, for the jobs of
// several sandboxes.
type workspace struct {
	t    *testing.T
	dir  string
	repo string // the checkout
}

func newWorkspace(t *testing.T) *workspace {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "agentlab-test-*")
	if err != nil {
		t.Skipf("a workspace needs a second file system: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return &workspace{t: t, dir: dir, repo: filepath.Join(dir, workspaceRepo)}
}

// sandbox has a job on the workspace.
func (w *workspace) sandbox(job *guestapi.Job, git *guestapi.Git) *sandbox {
	w.t.Helper()
	s := newSandbox(w.t, guestapi.BootstrapResponse{Job: job, Git: git, Workspace: true}, artifact.Limits{})
	s.cfg.Workspace = w.dir
	return s
}

// job runs a script as a job on a repository, and returns its log.
func (w *workspace) job(url, ref, script string) (s *sandbox, log string) {
	w.t.Helper()
	job := shellJob(script)
	job.RepoURL, job.Ref = url, ref
	s = w.sandbox(job, nil)
	if rep := s.finish(); rep.Status != "COMPLETED" {
		w.t.Fatalf("%+v, log %q", rep, s.Log())
	}
	return s, s.Log()
}

// read returns a file of a commit in the checkout, "" if there is none.
func (w *workspace) read(commit, name string) string {
	w.t.Helper()
	if runGit(w.t, w.repo, "ls-tree", "--name-only", commit, "--", name) == "" {
		return ""
	}
	return runGit(w.t, w.repo, "show", commit+":"+name)
}

// clean checks that the checkout is whole, and nothing temporary is left.
func (w *workspace) clean() {
	w.t.Helper()
	runGit(w.t, w.repo, "fsck", "--full", "--no-dangling")
	left, err := filepath.Glob(filepath.Join(w.dir, "agentlab-*"))
	if err != nil || len(left) > 0 {
		w.t.Errorf("left %q, %v", left, err)
	}
}

// countBytes counts what a server sends.
func countBytes(git *gitServer) *atomic.Int64 {
	var n atomic.Int64
	inner := git.Config.Handler
	git.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { inner.ServeHTTP(countingWriter{w, &n}, r) })
	return &n
}

type countingWriter struct {
	http.ResponseWriter
	n *atomic.Int64
}

func (c countingWriter) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	return c.ResponseWriter.Write(p)
}

// The second job finds ignored files and caches of the first, fetches only what is new,
// and begins with a clean checkout. What the first job had not committed is kept.
func TestCheckoutOnAWorkspace(t *testing.T) {
	w := newWorkspace(t)
	noise := make([]byte, 1<<20)
	f, err := os.Open("/dev/urandom")
	if err == nil {
		_, err = io.ReadFull(f, noise)
	}
	if err != nil {
		t.Fatal(err)
	}
	repo := newRepo(t, map[string]string{".gitignore": "build/\n", "noise": string(noise), "gone.txt": "x\n"})
	git := newGitServer(t, "")
	sent := countBytes(git)
	url := git.add(t, "repo", repo)
	first, _ := w.job(url, "", `git checkout -q -b mine; `+commitWork+`; git checkout -q -; echo done > done.txt; git add -A; git commit -qm done
mkdir build; echo out > build/out; echo changed > file.txt; echo new > new.txt; echo $npm_config_cache $GOMODCACHE; echo x > $(dirname $GOMODCACHE)/x`)
	if want := fmt.Sprintf("%[1]s/.cache/npm %[1]s/.cache/go-mod\n", w.dir); first.Log() != want {
		t.Errorf("the caches are %q, not %q", first.Log(), want)
	}
	if sent.Swap(0) < 1<<20 {
		t.Error("the clone was not counted")
	}

	writeFile(t, filepath.Join(repo, "upstream.txt"), "upstream\n")
	runGit(t, repo, "rm", "-q", "gone.txt")
	runGit(t, repo, "add", "-A")
	runGit(t, repo, "commit", "-q", "-m", "upstream")
	runGit(t, repo, "push", "-q", filepath.Join(git.root, "repo"), "main")
	second, log := w.job(url, "", `cat build/out upstream.txt file.txt $(dirname $GOMODCACHE)/x; ls; git status --short; git branch --show-current; git log --format=%s -1; `+commitWork)
	if n := sent.Load(); n > 1<<19 {
		t.Errorf("%d bytes were fetched again", n)
	}
	saved := branchSaved + second.JobID + "/changes"
	want := "[agentlab] uncommitted work of an earlier job is kept as the branch " + saved +
		"\nout\nupstream\nthree\nx\nbuild\nfile.txt\nnoise\nupstream.txt\nagentlab/" + second.JobID + "\nupstream\n"
	if log != want {
		t.Errorf("log %q, want %q", log, want)
	}
	if rep := second.Final(); rep.Result.Commits != 1 || rep.Result.BaseCommit != runGit(t, repo, "rev-parse", "main") {
		t.Errorf("%+v", rep.Result)
	}
	second.fetchable(repo, second.Final())
	if d := second.File(artDiff); strings.Contains(d, "done") || !strings.Contains(d, "work.txt") {
		t.Errorf("the diff has the changes of another job: %q", d)
	}
	for _, c := range []struct{ commit, file, want string }{
		{saved, "file.txt", "changed"}, {saved, "new.txt", "new"}, {saved, "build/out", ""}, {saved, "done.txt", "done"},
		{"agentlab/" + first.JobID, "done.txt", "done"}, {"mine", "work.txt", "work"}, {"main", "upstream.txt", "upstream"},
	} {
		if got := w.read(c.commit, c.file); got != c.want {
			t.Errorf("%s of %s is %q, not %q", c.file, c.commit, got, c.want)
		}
	}
	w.clean()
}

// Work on a branch continues, unless the job names another commit; and a branch of the
// repository's does not replace other commits of an earlier job.
func TestBranchesOnAWorkspace(t *testing.T) {
	w := newWorkspace(t)
	repo := newRepo(t, nil)
	url := newGitServer(t, "").add(t, "repo", repo)
	run := func(ref, script string) (*sandbox, guestapi.Report) {
		job := shellJob(script)
		job.RepoURL, job.Ref, job.Branch = url, ref, "feature"
		s := w.sandbox(job, nil)
		return s, s.finish()
	}
	run("", `echo 1 > one; git add -A; git commit -qm 1; git checkout -q main; echo mine > mine; git add -A; git commit -qm mine`)
	s, rep := run("", `cat one; echo 2 > two; git add -A; git commit -qm 2`)
	if !strings.HasSuffix(s.Log(), "\n1\n") || rep.Result.Commits != 1 || rep.Result.Branch != "feature" {
		t.Errorf("log %q, %+v", s.Log(), rep.Result)
	}
	// The repository lacks the commits of the first job.
	bundle := filepath.Join(t.TempDir(), "result.bundle")
	writeFile(t, bundle, s.File(artBundle))
	runGit(t, repo, "fetch", "-q", bundle, "refs/heads/feature:refs/agentlab/second")
	if got := runGit(t, repo, "log", "--format=%s", "main..refs/agentlab/second"); got != "2\n1" {
		t.Errorf("fetched %q", got)
	}
	third, _ := run("", `echo 3 > two`)
	writeFile(t, bundle, third.File(artBundle))
	fresh := t.TempDir()
	runGit(t, fresh, "clone", "-q", "--no-local", "--single-branch", "--branch", "main", repo, ".")
	runGit(t, fresh, "fetch", "-q", bundle, guestapi.RefChanges+":refs/agentlab/changes")
	if got := w.read(branchSaved+s.JobID+"/main", "mine"); got != "mine" {
		t.Errorf("the commit on main was lost: %q", got)
	}
	s, rep = run("main", `ls; git branch --show-current`)
	if !strings.HasSuffix(s.Log(), "\nfile.txt\nfeature\n") || rep.Result.BaseCommit != runGit(t, repo, "rev-parse", "main") {
		t.Errorf("log %q, %+v", s.Log(), rep.Result)
	}
	if got := w.read(branchSaved+s.JobID+"/feature", "two"); got != "2" {
		t.Errorf("the commits on feature were lost: %q", got)
	}
	w.clean()
}

func TestShallowCheckoutOnAWorkspace(t *testing.T) {
	w := newWorkspace(t)
	url := newGitServer(t, "").add(t, "repo", newRepo(t, nil))
	for _, c := range []struct {
		depth int
		ref   string
		want  string
	}{{1, "", "1"}, {1, "dev", "1"}, {0, "", "3"}, {2, "dev", "4"}, {0, "v1", "1"}} {
		job := shellJob(`git rev-list --count HEAD`)
		job.RepoURL, job.Ref, job.Depth = url, c.ref, c.depth
		s := w.sandbox(job, nil)
		if rep := s.finish(); rep.Status != "COMPLETED" || s.Log() != c.want+"\n" {
			t.Errorf("depth %d of %q: %+v, log %q, want %q", c.depth, c.ref, rep, s.Log(), c.want)
		}
		w.clean()
	}
}

// Nothing that an earlier job left in the checkout is run before the agent, which no
// longer has the credential of the repository.
func TestArmedWorkspace(t *testing.T) {
	const token = "ghp_0123456789abcdef"
	w := newWorkspace(t)
	git := newGitServer(t, token)
	url := git.add(t, "repo", newRepo(t, nil))
	arm, _, _ := strings.Cut(armScript, "\nrm -f")
	for i, script := range []string{arm, `cat ../trap/sprung .gitattributes || git status --short; git config --list --show-origin`} {
		job := shellJob(script)
		job.RepoURL = url
		s := w.sandbox(job, &guestapi.Git{Token: token})
		if rep := s.finish(); rep.Status != "COMPLETED" || i == 0 && !rep.Result.Dirty {
			t.Fatalf("%+v, log %q", rep, s.Log())
		}
		if log := s.Log(); i == 1 && (!strings.Contains(log, "trap/sprung: No such file") || strings.Contains(log, "evil") || strings.Contains(log, "credential.helper="+w.dir)) {
			t.Errorf("log %q", log)
		}
	}
}

// Whatever an earlier job left, the next one works or says why not, and the workspace
// keeps what it has.
func TestHostileWorkspace(t *testing.T) {
	url := newGitServer(t, "").add(t, "repo", newRepo(t, map[string]string{".gitignore": "*.o\n", "dir/inner": "x\n"}))
	const aside = "exited with code 1"                           // in a new checkout, which does not have the ignored file
	for name, c := range map[string]struct{ left, want string }{ // want: part of the reason of the failure; "": it works
		"a link for the checkout":  {`cd ..; mv repo elsewhere; ln -s elsewhere repo`, "exists and is not empty"},
		"a file for the checkout":  {`cd ..; mv repo elsewhere; echo > repo`, "not a directory"},
		"no repository":            {`rm -rf .git`, aside},
		".git is a file":           {`mv .git ../real; echo "gitdir: ../real" > .git`, ".git is not a directory"},
		".git is a link":           {`mv .git ../real; ln -s ../real .git`, ".git is not a directory"},
		"borrowed objects":         {`git clone -q --bare . ../lender; echo "$PWD/../lender/objects" > .git/objects/info/alternates`, "borrows objects"},
		"HEAD is a pipe":           {`rm .git/HEAD; mkfifo .git/HEAD`, "HEAD is not a file"},
		"HEAD leads out":           {`rm .git/HEAD; ln -s /etc/passwd .git/HEAD`, "escapes"},
		"an unknown branch":        {`echo "ref: refs/heads/../../x" > .git/HEAD`, "HEAD is not a branch"},
		"no objects":               {`rm -rf .git/objects; mkdir .git/objects`, aside},
		"objects lead out":         {`mv .git/objects ../objects; ln -s ../../objects .git/objects`, ""},
		"packs lead out":           {`git gc -q; mv .git/objects/pack ../pack; ln -s ../../../pack .git/objects/pack`, aside},
		"index is garbage":         {`head -c 5000 /dev/urandom > .git/index`, ""},
		"index hides a change":     {`sed -i s/three/THREE/ file.txt; touch -r .git/HEAD file.txt; git update-index --assume-unchanged file.txt`, ""},
		"a link in the tree":       {`rm -rf dir; ln -s ../../.. dir`, ""},
		"a tracked file is a pipe": {`rm file.txt; mkfifo file.txt`, "cannot be read"},
		"another repository":       {`git init -q dir/other; echo x > dir/other/x`, ""},
		"locks":                    {`touch .git/index.lock .git/HEAD.lock .git/packed-refs.lock .git/shallow.lock`, ""},
		"caches lead out":          {`rm -rf ../.cache; ln -s /tmp ../.cache`, "symbolic link"},
		"caches are a file":        {`rm -rf ../.cache; echo > ../.cache`, "not a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorkspace(t)
			w.job(url, "", "echo x > x.o; "+c.left)
			job := shellJob(`git status --short; cat file.txt dir/inner; test -f x.o`)
			job.RepoURL = url
			s := w.sandbox(job, nil)
			rep := s.finish()
			switch {
			case c.want == "" && (rep.Status != "COMPLETED" || !strings.Contains(s.Log(), "three\nx\n") || strings.Contains(s.Log(), " file.txt")):
				t.Errorf("%+v, log %q", rep, s.Log())
			case c.want != "" && (rep.Status != "FAILED" || !strings.Contains(rep.Message, c.want)):
				t.Errorf("%+v", rep)
			case c.want == aside && !strings.Contains(s.Log(), "of an earlier job is kept in "):
				t.Errorf("log %q", s.Log())
			}
			at := "*"
			if c.want == aside {
				at = filepath.Join(guestapi.SavedDir, s.JobID, "repo")
			}
			if left, _ := filepath.Glob(filepath.Join(w.dir, at, "x.o")); len(left) == 0 {
				t.Errorf("the ignored file is lost: %q", left)
			}
		})
	}
}

// An update never overwrites a file that no commit has.
func TestUpdateKeepsIgnoredFiles(t *testing.T) {
	w := newWorkspace(t)
	repo := newRepo(t, map[string]string{".gitignore": ".env\n"})
	git := newGitServer(t, "")
	url := git.add(t, "repo", repo)
	w.job(url, "", `echo mine > .env`)
	writeFile(t, filepath.Join(repo, ".env"), "theirs\n")
	runGit(t, repo, "add", "-f", ".env")
	runGit(t, repo, "commit", "-q", "-m", "env")
	runGit(t, repo, "push", "-q", filepath.Join(git.root, "repo"), "main")
	for range 2 { // the reason is the same when the job is tried again
		job := shellJob("true")
		job.RepoURL = url
		s := w.sandbox(job, nil)
		if rep := s.finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, ".env") {
			t.Errorf("%+v", rep)
		}
		if p, err := os.ReadFile(filepath.Join(w.repo, ".env")); err != nil || string(p) != "mine\n" {
			t.Errorf(".env is %q, %v", p, err)
		}
	}
}

func TestModulesOnAWorkspace(t *testing.T) {
	w := newWorkspace(t)
	repo, a, b := withModules(t)
	bundle := moduleBundle(t, repo, a, b)
	for i, script := range []string{
		`git -C lib/a config core.fsmonitor 'touch ../../pwned'; echo mine > lib/a/mine; cat lib/a/deep/b/file.txt`,
		`git status --short; cat lib/a/file.txt lib/a/deep/b/file.txt; ls lib/a/mine ../pwned`,
	} {
		f, err := os.Open(bundle)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		job := shellJob(script)
		job.Bundled = true
		s := w.sandbox(job, nil)
		s.GiveBundle(f)
		if rep := s.finish(); i == 0 && rep.Status != "COMPLETED" {
			t.Fatalf("%+v, log %q", rep, s.Log())
		}
		if i == 0 {
			continue
		}
		if log := s.Log(); !strings.Contains(log, "\nthree\nthree\n") || strings.Count(log, "No such file") != 2 {
			t.Errorf("log %q", log)
		}
		if p, err := os.ReadFile(filepath.Join(w.dir, guestapi.SavedDir, s.JobID, "lib/a/mine")); err != nil || string(p) != "mine\n" {
			t.Errorf("the earlier submodule: %q, %v", p, err)
		}
	}
}

// A checkout whose newest commit was lost with its VM does not block later jobs, and is
// kept. Commits of later jobs are synced to the disk.
func TestDamagedCheckoutOnAWorkspace(t *testing.T) {
	for name, damage := range map[string]string{
		"commit": `f=$(git rev-parse HEAD); : > .git/objects/$(printf %.2s $f)/${f#??}`,
		"tree":   `f=$(git rev-parse HEAD^{tree}); : > .git/objects/$(printf %.2s $f)/${f#??}`,
		"HEAD":   `: > .git/HEAD`,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorkspace(t)
			url := newGitServer(t, "").add(t, "repo", newRepo(t, nil))
			w.job(url, "", "echo mine > mine; git add mine; git commit -qm mine")
			runShell(t, w.repo, "chmod -R u+w .git; "+damage)
			s, log := w.job(url, "", `test ! -e mine && git config core.fsync && git commit --allow-empty -qm next`)
			if !strings.Contains(log, "the damaged checkout of an earlier job is kept in") || !strings.Contains(log, "\nall\n") {
				t.Fatalf("log %q", log)
			}
			if p, err := os.ReadFile(filepath.Join(w.dir, guestapi.SavedDir, s.JobID, "repo/mine")); err != nil || string(p) != "mine\n" {
				t.Errorf("the earlier checkout: %q, %v", p, err)
			}
		})
	}
}

// What a job without a repository leaves does not block later jobs, and is kept.
func TestJobWithoutARepositoryOnAWorkspace(t *testing.T) {
	for name, left := range map[string]string{"nothing": "true", "a file": "echo mine > mine"} {
		t.Run(name, func(t *testing.T) {
			w := newWorkspace(t)
			w.job("", "", left)
			url := newGitServer(t, "").add(t, "repo", newRepo(t, nil))
			s, log := w.job(url, "", "test ! -e mine && git commit --allow-empty -qm next")
			kept, err := os.ReadFile(filepath.Join(w.dir, guestapi.SavedDir, s.JobID, "repo/mine"))
			if want := name != "nothing"; (err == nil && string(kept) == "mine\n") != want || strings.Contains(log, "the directory without a repository of an earlier job is kept in") != want {
				t.Errorf("kept %q, %v; log %q", kept, err, log)
			}
			w.job("", "", "test -d .git") // works in the checkout
		})
	}
}

// A job fails before it writes anything if its workspace is not mounted.
func TestUnmountedWorkspace(t *testing.T) {
	job := shellJob("true")
	job.RepoURL = newGitServer(t, "").add(t, "repo", newRepo(t, nil))
	w := &workspace{t: t, dir: disk.Dir(t)}
	var root, dir unix.Stat_t
	if err := errors.Join(unix.Stat("/", &root), unix.Stat(w.dir, &dir)); err != nil || root.Dev != dir.Dev {
		t.Skipf("%s is not on the file system of the root: %v", w.dir, err)
	}
	s := w.sandbox(job, nil)
	if rep := s.finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, "not mounted") {
		t.Errorf("%+v", rep)
	}
	if left, err := os.ReadDir(w.dir); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// A runner that is killed during an update loses nothing.
func TestRunnerKilledDuringAnUpdate(t *testing.T) {
	repo := newRepo(t, nil)
	url := newGitServer(t, "").add(t, "repo", repo)
	for _, stage := range []string{
		"agentlab-clone-*/old/HEAD", "agentlab-clone-*/old/refs/agentlab/changes", "agentlab-clone-*/repo/.git/HEAD",
		"agentlab-clone-*/repo/.git/index", "repo/.git/refs/heads/agentlab/saved/*/changes", "repo/dev.txt",
	} {
		t.Run(stage, func(t *testing.T) {
			w := newWorkspace(t)
			first, _ := w.job(url, "", `echo 1 > one; git add -A; git commit -qm 1; echo changed > file.txt`)
			job := shellJob(`git status --short; cat file.txt dev.txt; test ! -e one`)
			job.RepoURL, job.Ref = url, "dev"
			s := w.sandbox(job, nil)
			p := s.start()
			for end := time.Now().Add(guard.Patience); len(p.end) == 0 && time.Now().Before(end); {
				if found, _ := filepath.Glob(filepath.Join(w.dir, stage)); len(found) > 0 {
					break
				}
			}
			p.kill()
			s.start().wait()
			if rep := s.Final(); rep.Status != "COMPLETED" || !strings.HasSuffix(s.Log(), "three\ndev\n") {
				t.Errorf("%+v, log %q", rep, s.Log())
			}
			branches := strings.Fields(runGit(t, w.repo, "branch", "--format=%(refname:short)"))
			if !slices.ContainsFunc(branches, func(b string) bool {
				return strings.HasPrefix(b, branchSaved) && w.read(b, "file.txt") == "changed"
			}) {
				t.Errorf("the uncommitted change is lost: %q", branches)
			}
			if got := w.read("agentlab/"+first.JobID, "one"); got != "1" {
				t.Errorf("the commit is lost: %q", got)
			}
			w.clean()
		})
	}
}
