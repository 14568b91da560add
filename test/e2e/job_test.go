package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// mendTask does what an agent would do: correct the file, run the test,
// commit.
const mendTask = `echo hello > greeting.txt
sh test.sh
git commit -qam "Fix the greeting"
mkdir -p out && echo built > out/result.txt
echo left-over > untracked.txt
echo "the work is done"`

// The golden path: a local repository goes in; log, artifacts and a commit
// come out; nothing is left.
func TestJobLocalRepository(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	repo := sampleRepo(t)
	j, r := l.job("--repo", repo, "--agent", "shell", "--task", mendTask)
	if r.code != 0 || j.Status != "COMPLETED" || j.ExitCode == nil || *j.ExitCode != 0 {
		t.Fatalf("%+v\n%v", j, r)
	}
	if j.Result.Commits != 1 || !j.Result.Dirty || j.Result.Pushed {
		t.Errorf("result is %+v", j.Result)
	}
	if log := l.ok("job", "logs", j.ID); !strings.Contains(log, "PASS") || !strings.Contains(log, "the work is done") {
		t.Errorf("log is %q", log)
	}
	var paths []string
	for _, a := range j.Artifacts {
		paths = append(paths, a.Path)
	}
	for _, want := range []string{"agent.log", "changes.diff", "outputs/out/result.txt", "report.json", "result.bundle"} {
		if !slices.Contains(paths, want) {
			t.Errorf("no artifact %s among %v", want, paths)
		}
	}
	diff := filepath.Join(t.TempDir(), "diff")
	l.ok("job", "artifacts", "download", j.ID, "changes.diff", "--out", diff)
	if text, _ := os.ReadFile(diff); !strings.Contains(string(text), "+hello") || !strings.Contains(string(text), "left-over") {
		t.Errorf("diff is %q", text)
	}
	if r := l.run(repo, "job", "fetch", j.ID); r.code != 0 {
		t.Fatalf("fetch: %v", r)
	}
	ref := "refs/agentlab/" + j.ID
	if got := git(t, repo, "show", ref+":greeting.txt"); got != "hello" {
		t.Errorf("the fetched file holds %q", got)
	}
	if got := git(t, repo, "rev-parse", ref+"^"); got != git(t, repo, "rev-parse", "main") {
		t.Errorf("the commit does not stand on main")
	}
	if j.Result.Uncommitted != 2 {
		t.Errorf("%d files are uncommitted, want out/result.txt and untracked.txt", j.Result.Uncommitted)
	}
	if r := l.run(repo, "job", "diff", j.ID); r.code != 0 || !strings.Contains(r.stdout, "+left-over") || strings.Contains(r.stdout, "+hello") {
		t.Errorf("job diff: %v", r)
	}
	if r := l.run(repo, "job", "apply", j.ID, "untracked.txt"); r.code != 0 {
		t.Errorf("job apply: %v", r)
	}
	if got := git(t, repo, "status", "--porcelain"); got != "?? untracked.txt" {
		t.Errorf("after job apply the work tree has %q", got)
	}
	if r := l.run(repo, "job", "fetch", "--with-changes", j.ID); r.code != 0 || git(t, repo, "rev-parse", ref+"-changes^") != git(t, repo, "rev-parse", ref) {
		t.Errorf("job fetch --with-changes: %v", r)
	}
	l.noSandboxes()
}

// A submodule travels with the repository, and what the agent leaves
// uncommitted is shown and applied.
func TestJobWithSubmodule(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	lib, repo := sampleRepo(t), sampleRepo(t)
	git(t, repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", lib, "libs/greet")
	git(t, repo, "commit", "-q", "-m", "A submodule")
	j, r := l.job("--repo", repo, "--agent", "shell", "--task", `cat libs/greet/greeting.txt
git submodule status
echo hello > greeting.txt
echo more >> libs/greet/greeting.txt`)
	if r.code != 0 || j.Result.Uncommitted != 1 || j.Result.Commits != 0 {
		t.Fatalf("%+v\n%v", j, r)
	}
	commit := git(t, lib, "rev-parse", "HEAD")
	if log := l.ok("job", "logs", j.ID); !strings.HasPrefix(log, "helo\n "+commit+" libs/greet") {
		t.Errorf("log is %q", log)
	}
	if diff := l.ok("job", "artifacts", "download", j.ID, "submodules/libs/greet.diff", "--out", "-"); !strings.Contains(diff, "+more") {
		t.Errorf("the submodule's diff is %q", diff)
	}
	if r := l.run(repo, "job", "diff", "--stat", j.ID); r.code != 0 || !strings.Contains(r.stdout, "greeting.txt | 2 +-") {
		t.Errorf("job diff: %v", r)
	}
	if r := l.run(repo, "job", "apply", j.ID); r.code != 0 || git(t, repo, "diff", "--name-only") != "greeting.txt" {
		t.Errorf("job apply: %v", r)
	}
	l.noSandboxes()
}

// Failure, time-out and cancellation each end with their status, exit code
// and log.
func TestJobEnds(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	tests := []struct {
		name, task string
		args       []string
		status     string
		code       int
		log        string
	}{
		{"no repository", "echo alone; test -z \"$(ls -A)\"", nil, "COMPLETED", 0, "alone"},
		{"failure", "echo before; exit 3", nil, "FAILED", 1, "before"},
		{"time-out", "echo working; sleep 600", []string{"--ttl", "1m"}, "TIMEOUT", 124, "working"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			j, r := l.job(append([]string{"--agent", "shell", "--task", tt.task}, tt.args...)...)
			if j.Status != tt.status || r.code != tt.code {
				t.Errorf("status %s (%s), want %s; %v", j.Status, j.Reason, tt.status, r)
			}
			if log := l.ok("job", "logs", j.ID); !strings.Contains(log, tt.log) {
				t.Errorf("log is %q", log)
			}
		})
	}
	t.Run("cancel", func(t *testing.T) {
		id := l.submit("--agent", "shell", "--task", "echo started; sleep 600")
		if !eventually(commandLimit, func() bool { return strings.Contains(l.run("", "job", "logs", id).stdout, "started") }) {
			t.Fatal("the agent did not start")
		}
		l.ok("job", "cancel", id)
		if j := l.finish(id); j.Status != "CANCELLED" {
			t.Errorf("status is %s (%s)", j.Status, j.Reason)
		}
		if log := l.ok("job", "logs", id); !strings.Contains(log, "started") {
			t.Errorf("log is %q", log)
		}
	})
	l.noSandboxes()
}
