package runner

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

// prepared runs a job with Prepare, and returns its sandbox and the commit.
func prepared(t *testing.T, commands ...string) (s *sandbox, base string) {
	t.Helper()
	s = setupSandbox(t, &guestapi.Job{Agent: "none", Mode: "dangerous", Branch: "agentlab/job-parent", Prepare: true}, commands...)
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	s.wiped()
	rep := s.Final()
	if rep.Status != "COMPLETED" || !isCommit(rep.Result.BaseCommit) {
		t.Fatalf("%+v %+v", rep, rep.Result)
	}
	return s, rep.Result.BaseCommit
}

// attempt returns the sandbox of an attempt, which continues the guest of from.
// It has no repository to clone.
func attempt(t *testing.T, from *sandbox, script, base string) *sandbox {
	t.Helper()
	job := shellJob(script)
	job.RepoURL, job.Branch, job.Prepared, job.NoPush = "http://127.0.0.1:1/gone", "agentlab/job-parent", base, true
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
	s.cfg.ClonePath, s.cfg.Home = from.cfg.ClonePath, from.cfg.Home
	return s
}

func TestAttemptInAPreparedSandbox(t *testing.T) {
	s, base := prepared(t, "echo once >> ../setups; mkdir node_modules; echo dep > .git/dep")
	s = attempt(t, s, "cat .git/dep ../setups; git branch --show-current; echo new > n; git add n; git commit -qm work", base)
	rep := s.finish()
	if rep.Status != "COMPLETED" || rep.Result.Commits != 1 || rep.Result.BaseCommit != base || rep.Result.Branch != "agentlab/job-parent" {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	if got := s.Log(); got != "dep\nonce\nagentlab/job-parent\n" {
		t.Errorf("log %q", got)
	}
	if _, err := os.Stat(s.cfg.ClonePath); err == nil {
		t.Error("the checkout is left")
	}
}

// When the controller has the final report it may copy the sandbox: the checkout
// is described then, and the Git credential is gone. The setup commands have it.
func TestPreparedBeforeTheFinalReport(t *testing.T) {
	const token = "git-token-123456"
	srv := newGitServer(t, token)
	url := srv.add(t, "repo", newRepo(t, map[string]string{projectFile: "setup:\n  - git fetch -q origin dev && echo fetched; echo new > untracked\n"}))
	job := &guestapi.Job{Agent: "none", Mode: "dangerous", Branch: "agentlab/job-parent", Prepare: true, NoPush: true, Upload: true, RepoURL: url}
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job, Git: &guestapi.Git{URL: url, Token: token}}, artifact.Limits{})
	final := 0
	s.OnReport = func(r guestapi.Report) {
		if r.Status == "RUNNING" {
			return
		}
		final++
		if _, err := os.Stat(filepath.Join(s.cfg.ClonePath, ".git", checkoutFact)); err != nil {
			t.Error(err)
		}
		for _, dir := range []string{s.cfg.RunDir, s.cfg.Home, s.cfg.TmpDir, filepath.Dir(s.cfg.ClonePath)} {
			_ = filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
				if err == nil && e.Type().IsRegular() {
					if b, _ := os.ReadFile(p); strings.Contains(string(b), token) {
						t.Errorf("the Git credential is in %s", p)
					}
				}
				return nil
			})
		}
	}
	rep := s.finish()
	if rep.Status != "COMPLETED" || final == 0 || !strings.Contains(s.Log(), "fetched\n") || rep.Result.Commits != 0 || rep.Result.Uncommitted != 0 {
		t.Errorf("%+v %+v, log %q", rep, rep.Result, s.Log())
	}
	if files, err := s.Service.List(t.Context(), s.JobID); err != nil || slices.ContainsFunc(files, func(a agentlab.Artifact) bool { return strings.HasPrefix(a.Path, "changes") }) {
		t.Errorf("%+v %v", files, err)
	}
}

func TestHostilePreparedCheckout(t *testing.T) {
	for name, c := range map[string]struct {
		change string // a command of setup, or after it in the checkout
		want   string
	}{
		"another commit": {"git commit -q --allow-empty -m other", "is not at commit"},
		"another branch": {"git checkout -q -b other", "its branch is not agentlab/job-parent"},
		"moved branch":   {"git branch -f main HEAD~1", "has moved"},
		"no fact":        {"rm .git/agentlab-checkout.json", "no such file"},
		"a link":         {"mv .git/agentlab-checkout.json ..; ln -s ../../agentlab-checkout.json .git/", "cannot be used"},
		"a pipe":         {"rm .git/agentlab-checkout.json; mkfifo .git/agentlab-checkout.json", "is not a file"},
		"garbage":        {"echo '{' > .git/agentlab-checkout.json", "is damaged"},
		"another path":   {`sed -i 's/"Path": *"/&x/' .git/agentlab-checkout.json`, "belongs to another job"},
		"no checkout":    {`rm -rf "$PWD"`, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			s, base := prepared(t, "true")
			runShell(t, s.cfg.ClonePath, c.change)
			s = attempt(t, s, "touch ../ran", base)
			if rep := s.finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, c.want) {
				t.Errorf("%+v", rep)
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "ran")); err == nil {
				t.Error("the agent ran")
			}
		})
	}
}

func TestPrepareFails(t *testing.T) {
	s := setupSandbox(t, &guestapi.Job{Agent: "none", Mode: "dangerous", Prepare: true}, "exit 3")
	if rep := s.finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, "exited with code 3") {
		t.Errorf("%+v", rep)
	}
	s = newSandbox(t, guestapi.BootstrapResponse{Job: &guestapi.Job{Agent: "none", Mode: "dangerous", Prepare: true}}, artifact.Limits{})
	if rep := s.finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, "no repository to prepare") {
		t.Errorf("%+v", rep)
	}
}

func runShell(t *testing.T, dir, script string) {
	t.Helper()
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@t", "GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@t", "GIT_CONFIG_GLOBAL=/dev/null")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}
