package runner

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

// later returns the sandbox of a later job on the repository of from, which continues
// the guest of that one.
func later(t *testing.T, from *sandbox, script string) *sandbox {
	t.Helper()
	job := shellJob(script)
	job.RepoURL, job.Reuse = from.Response().Job.RepoURL, true
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
	s.cfg.ClonePath, s.cfg.Home = from.cfg.ClonePath, from.cfg.Home
	return s
}

func TestReuseOfASetUpCheckout(t *testing.T) {
	s, base := prepared(t, "mkdir -p .git/hooks; echo once >> ../setups; echo dep > ignored; git config setup.key yes; mkdir .git/own; echo x > .git/own/x; echo old > .git/hooks/pre-commit")
	if rep := s.Final(); rep.Result.Dirty {
		t.Errorf("%+v", rep.Result)
	}
	s = later(t, s, "cat ignored ../setups .git/own/x .git/hooks/pre-commit; git config setup.key; git branch --show-current; git status --short; echo new > n; git add n; git commit --no-verify -qm work")
	rep := s.finish()
	if rep.Status != "COMPLETED" || rep.Result.Commits != 1 || rep.Result.BaseCommit != base || rep.Result.Branch != "agentlab/"+s.JobID {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	if _, log, _ := strings.Cut(s.Log(), "\n"); log != "dep\nonce\nx\nold\nyes\nagentlab/"+s.JobID+"\n" {
		t.Errorf("log %q", s.Log())
	}
}

// A tracked file replaces what setup has left in its place.
func TestReuseOverwritesIgnoredFiles(t *testing.T) {
	s, _ := prepared(t, "echo of setup > ignored")
	repo := filepath.Join(t.TempDir(), "repo")
	runShell(t, ".", "git clone -q "+s.Response().Job.RepoURL+" "+repo)
	runShell(t, repo, "echo tracked > ignored; git add -f ignored; git commit -qm late; git push -q origin HEAD")
	s = later(t, s, "cat ignored")
	if rep := s.finish(); rep.Status != "COMPLETED" || !strings.HasSuffix(s.Log(), "\ntracked\n") {
		t.Errorf("%+v, log %q", rep, s.Log())
	}
}

func TestDirtySetup(t *testing.T) {
	for _, c := range []string{"echo x > untracked", "echo x >> file.txt", "rm file.txt", "git commit -q --allow-empty -m x", "echo x > n; git add n"} {
		if s, _ := prepared(t, c); !s.Final().Result.Dirty {
			t.Errorf("%s: not dirty", c)
		}
	}
}

// What setup has left cannot be used: the job clones and runs setup itself.
func TestReuseOfADamagedCheckout(t *testing.T) {
	for name, damage := range map[string]string{"missing": `rm -r "$PWD"`, "no repository": "rm -r .git", "no head": "rm .git/HEAD", "no objects": "rm -r .git/objects"} {
		t.Run(name, func(t *testing.T) {
			s, base := prepared(t, "echo once >> ../setups; touch ignored")
			runShell(t, s.cfg.ClonePath, damage)
			s = later(t, s, "cat ../setups; ls ignored; git log --format=%H -1")
			if rep := s.finish(); rep.Status != "COMPLETED" || rep.Result.BaseCommit != base || !strings.HasSuffix(s.Log(), "\nonce\nonce\nignored\n"+base+"\n") {
				t.Errorf("%+v, log %q", rep, s.Log())
			}
		})
	}
}
