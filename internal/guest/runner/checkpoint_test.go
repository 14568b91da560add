package runner

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

// work is a repository that has what the controller has of the agent's work.
type work struct {
	t      *testing.T
	s      *sandbox
	branch string
	dir    string
	seen   string // what restore has taken
	refs   map[string]string
}

// newCheckpointJob starts a job whose agent waits for files ../go1, ../go2, …
// before each step.
func newCheckpointJob(t *testing.T, steps ...string) (*process, *work) {
	t.Helper()
	repo := newRepo(t, nil)
	script := ""
	for i, step := range steps {
		script += "while [ ! -e ../go" + strconv.Itoa(i+1) + " ]; do sleep 0.02; done\n" + step + "\n"
	}
	job := shellJob(script)
	job.RepoURL = newGitServer(t, "").add(t, "repo", repo)
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
	s.cfg.Timing.Commits, s.cfg.Timing.Checkpoint, s.cfg.MinFull = 20*time.Millisecond, 200*time.Millisecond, 100_000
	return s.start(), &work{t: t, s: s, branch: "refs/heads/agentlab/" + s.JobID, dir: repo}
}

func (w *work) step(n int) {
	w.t.Helper()
	writeFile(w.t, filepath.Join(filepath.Dir(w.s.cfg.ClonePath), "go"+strconv.Itoa(n)), "")
}

// restore takes the bundles into the repository as a client does, and returns
// the refs of the last one. Each bundle must be complete.
func (w *work) restore() map[string]string {
	w.t.Helper()
	full, increment := w.s.File(agentlab.ArtifactCheckpoint), w.s.File(agentlab.ArtifactIncrement)
	if w.stored(agentlab.ArtifactIncrement).Before(w.stored(agentlab.ArtifactCheckpoint)) {
		increment = "" // of an earlier full bundle
	}
	if full+increment == w.seen {
		return w.refs
	}
	w.seen, w.refs = full+increment, nil
	for _, text := range []string{full, increment} {
		if text == "" {
			continue
		}
		file := filepath.Join(w.t.TempDir(), "b")
		writeFile(w.t, file, text)
		header, _, _ := strings.Cut(text, "\n\n")
		got := map[string]string{}
		for _, line := range strings.Split(header, "\n")[1:] {
			if id, ref, _ := strings.Cut(line, " "); id[0] != '-' {
				got[ref] = id
			}
		}
		runGit(w.t, w.dir, "bundle", "unbundle", file)
		for _, id := range got {
			runGit(w.t, w.dir, "rev-list", "--objects", "--quiet", id)
		}
		w.refs = got
	}
	return w.refs
}

// stored returns when an artifact was stored.
func (w *work) stored(path string) time.Time {
	a, _ := w.s.Artifact(w.t.Context(), w.s.JobID, path)
	return a.CreatedAt
}

// file returns a file of the checkpoint.
func (w *work) file(ref, name string) string {
	w.t.Helper()
	id := w.restore()[ref]
	if id == "" || runGit(w.t, w.dir, "ls-tree", id, name) == "" {
		return ""
	}
	return runGit(w.t, w.dir, "show", id+":"+name)
}

// Commits and uncommitted changes are with the controller while the agent works,
// also after the runner was killed and started again, in increments.
func TestCheckpoints(t *testing.T) {
	p, w := newCheckpointJob(t,
		`echo 1 > a; git add a; git commit -qm 1; echo 2 > b; git add b; git commit -qm 2; echo 3 > c; git add c; git commit -qm 3`,
		`echo draft > new.txt`,
		`echo final > new.txt; git checkout -q -b other; git add -A; git commit -qm other; git checkout -q -; echo 4 >> a`,
		`git add -A; git commit -qm 4`,
		`echo stashed >> a; git stash -q`,
		`exit 3`)
	w.step(1)
	w.s.Wait("commits", func() bool { return w.file(w.branch, "c") == "3" })
	if n := runGit(t, w.dir, "rev-list", "--count", "main.."+w.restore()[w.branch]); n != "3" {
		t.Errorf("%s commits, want 3", n)
	}
	w.step(2)
	w.s.Wait("a new file", func() bool { return w.file(guestapi.RefChanges, "new.txt") == "draft" })
	p.kill()
	p = w.s.start()
	w.step(3)
	w.s.Wait("a branch and a change", func() bool {
		return w.file("refs/heads/other", "new.txt") == "final" && w.file(guestapi.RefChanges, "a") == "1\n4"
	})
	w.step(4)
	w.s.Wait("no uncommitted change", func() bool {
		refs := w.restore()
		return w.file(w.branch, "a") == "1\n4" && refs[guestapi.RefChanges] == "" && refs["refs/heads/other"] != ""
	})
	if w.s.File(agentlab.ArtifactIncrement) == "" {
		t.Error("there was no increment")
	}
	w.step(5)
	w.s.Wait("stashed changes", func() bool { return w.file("refs/heads/"+stashBranch, "a") == "1\n4\nstashed" })
	w.step(6)
	p.wait()
	if rep := w.s.Final(); rep.Status != "FAILED" || rep.Result.Commits != 4 || w.s.File(agentlab.ArtifactResult) == "" {
		t.Errorf("%+v", rep)
	}
	w.s.wiped()
	if left, _ := filepath.Glob(filepath.Join(w.s.cfg.TmpDir, "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A large increment becomes a new full bundle, so that the next ones are small.
func TestLargeIncrementIsCompacted(t *testing.T) {
	const large = `head -c 200000 /dev/urandom > large`
	p, w := newCheckpointJob(t, `echo x > x; git add x; git commit -qm x`, large, `echo y > y`, `exit 0`)
	w.step(1)
	w.s.Wait("a commit", func() bool { return w.file(w.branch, "x") == "x" })
	w.step(2)
	w.s.Wait("the large file", func() bool { return len(w.s.File(agentlab.ArtifactCheckpoint)) > 200000 })
	w.step(3)
	w.s.Wait("an increment", func() bool { return w.file(guestapi.RefChanges, "y") == "y" })
	if n := len(w.s.File(agentlab.ArtifactIncrement)); n > 10000 {
		t.Errorf("the increment has %d bytes", n)
	}
	w.step(4)
	p.wait()
}

// A checkpoint that cannot be stored changes nothing about the one before, and
// the next one has its content.
func TestCheckpointAfterAFailure(t *testing.T) {
	p, w := newCheckpointJob(t, `echo 1 > a; git add a; git commit -qm 1`, `echo 2 > b; git add b; git commit -qm 2`, `exit 0`)
	w.step(1)
	w.s.Wait("a commit", func() bool { return w.file(w.branch, "a") == "1" })
	w.s.Stop()
	w.step(2)
	clone := w.s.cfg.ClonePath
	w.s.Wait("a commit in the guest", func() bool { return strings.Contains(runGit(t, clone, "log", "--oneline"), " 2") })
	if got := w.file(w.branch, "a"); got != "1" {
		t.Errorf("%q", got)
	}
	w.s.Start()
	w.s.Wait("the next checkpoint", func() bool { return w.file(w.branch, "b") == "2" })
	w.step(3)
	p.wait()
}

// The agent's repository runs nothing for a checkpoint, and a checkpoint has a low
// priority.
func TestCheckpointOfAnArmedRepository(t *testing.T) {
	bin := t.TempDir()
	gitProgram := runGit(t, bin, "--exec-path") + "/git"
	nice := filepath.Join(bin, "nice")
	writeFile(t, filepath.Join(bin, "git"), "#!/bin/sh\n[ \"$1\" = pack-objects ] && ps -o ni= -p $$ >> "+nice+"\nexec "+gitProgram+" \"$@\"\n")
	if err := os.Chmod(filepath.Join(bin, "git"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	p, w := newCheckpointJob(t, `proof=$PWD/../proof; mkdir -p .git/hooks
git config core.fsmonitor "touch $proof"; git config core.hooksPath .; git config filter.x.clean "touch $proof; cat"
git config diff.external "touch $proof"; git config core.sshCommand "touch $proof"; git config core.pager "touch $proof"
git config uploadpack.packObjectsHook "touch $proof"
printf '#!/bin/sh\ntouch %s\n' "$proof" > .git/hooks/reference-transaction; chmod +x .git/hooks/reference-transaction
cp .git/hooks/reference-transaction .git/hooks/post-index-change
echo '* filter=x' > .gitattributes; echo secret > armed.txt`, `exit 0`)
	w.step(1)
	w.s.Wait("a checkpoint", func() bool { return w.file(guestapi.RefChanges, "armed.txt") == "secret" })
	if _, err := os.Stat(filepath.Join(filepath.Dir(w.s.cfg.ClonePath), "proof")); err == nil {
		t.Error("the checkpoint ran a program of the repository")
	}
	own, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(nice); len(strings.Fields(string(got))) == 0 || strings.Fields(string(got))[0] != strconv.Itoa(max(10, 20-own)) {
		t.Errorf("git ran with the priorities %q", got)
	}
	w.step(2)
	p.wait()
}

// A job without a repository, and one that uploads nothing, has no checkpoint.
func TestNoCheckpoint(t *testing.T) {
	for name, change := range map[string]func(*guestapi.Job){
		"no repository": func(j *guestapi.Job) { j.RepoURL = "" },
		"no upload":     func(j *guestapi.Job) { j.Upload = false },
	} {
		t.Run(name, func(t *testing.T) {
			job := shellJob("echo 1 > a; sleep 0.6; exit 3")
			job.RepoURL = newGitServer(t, "").add(t, "repo", newRepo(t, nil))
			change(job)
			s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
			s.cfg.Timing.Commits, s.cfg.Timing.Checkpoint = 20*time.Millisecond, 100*time.Millisecond
			s.finish()
			if s.File(agentlab.ArtifactCheckpoint) != "" {
				t.Error("there is a checkpoint")
			}
		})
	}
}

// A checkpoint is at most a minute old if taking one is possible in that time,
// and takes at most half of the time.
func TestPace(t *testing.T) {
	const least = 30 * time.Second
	for took, want := range map[time.Duration]time.Duration{
		0: least, time.Second: least, 8 * time.Second: 40 * time.Second, 12 * time.Second: 36 * time.Second,
		20 * time.Second: 40 * time.Second, time.Minute: 2 * time.Minute,
	} {
		if got := pace(least, took); got != want {
			t.Errorf("%v: %v, want %v", took, got, want)
		}
		if took <= 20*time.Second && pace(least, took)+took > maxAge {
			t.Errorf("%v: too old", took)
		}
	}
}

// After an absence of the controller, the next checkpoint is not later than after
// another one; other failures delay it.
func TestPauseAfterAFailedCheckpoint(t *testing.T) {
	timing := Timing{}.withDefaults()
	for _, c := range []struct {
		err  error
		want time.Duration
	}{
		{&sendError{&callError{status: http.StatusServiceUnavailable}}, timing.Checkpoint},
		{&sendError{io.EOF}, timing.Checkpoint},
		{&sendError{&callError{status: http.StatusRequestEntityTooLarge}}, maxPause},
		{errLargeCheckpoint, maxPause},
	} {
		if got := retryPause(timing, 100, time.Second, c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}

// If the controller has stored a full bundle and its answer is lost, the next
// checkpoint does not continue the full bundle that was replaced.
func TestCheckpointAfterALostAnswer(t *testing.T) {
	dir, stored, lose := newRepo(t, nil), map[string]string{}, func() {}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		name := path.Base(r.URL.Path)
		if stored[name] = string(p); name == agentlab.ArtifactCheckpoint {
			delete(stored, agentlab.ArtifactIncrement) // it is older
		}
		lose()
		_ = json.NewEncoder(w).Encode(guestapi.UploadAck{Size: int64(len(p))})
	}))
	defer srv.Close()
	g, err := newGit("", &guestapi.Job{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	base := runGit(t, dir, "rev-parse", "HEAD")
	r := &Runner{cfg: Config{MinFull: 100_000, Timing: quick.withDefaults()}, git: g, job: &guestapi.Job{ID: "job"}, api: newAPI(srv.URL, quick)}
	r.resp.Artifact = &guestapi.ArtifactTarget{Endpoint: srv.URL}
	c := &checkpointer{r: r, tmp: t.TempDir(), rp: repo{Path: dir, Base: base, Branch: "work", Heads: map[string]string{"main": base}}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	take := func(name, content string) error {
		writeFile(t, filepath.Join(dir, name), content)
		_, err := c.take(ctx)
		return err
	}
	if err := take("draft", "1"); err != nil {
		t.Fatal(err)
	}
	large := make([]byte, 200_000)
	_, _ = rand.Read(large)
	lose = func() {
		cancel()
		panic(http.ErrAbortHandler)
	}
	if err := take("large", string(large)); err == nil || len(stored[agentlab.ArtifactCheckpoint]) < len(large) {
		t.Fatalf("%v, %d bytes", err, len(stored[agentlab.ArtifactCheckpoint]))
	}
	lose, ctx = func() {}, t.Context()
	if err := take("large", "no longer"); err != nil {
		t.Fatal(err)
	}
	client := t.TempDir()
	runGit(t, client, "clone", "-q", dir, ".")
	for _, name := range []string{agentlab.ArtifactCheckpoint, agentlab.ArtifactIncrement} {
		if stored[name] == "" {
			continue
		}
		file := filepath.Join(t.TempDir(), name)
		writeFile(t, file, stored[name])
		runGit(t, client, "fetch", "-q", file, "+"+guestapi.RefChanges+":changes")
	}
	if got := runGit(t, client, "show", "changes:large"); got != "no longer" {
		t.Errorf("the checkpoint has a file of %d bytes", len(got))
	}
}
