package runner

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

// setupSandbox makes a sandbox for a job on a repository with these commands.
func setupSandbox(t *testing.T, job *guestapi.Job, commands ...string) *sandbox {
	t.Helper()
	var text strings.Builder
	text.WriteString("setup:\n")
	for _, c := range commands {
		fmt.Fprintf(&text, "  - %q\n", c)
	}
	job.RepoURL = newGitServer(t, "").add(t, "repo", newRepo(t, map[string]string{projectFile: text.String(), ".gitignore": "/ignored\n"}))
	return newSandbox(t, guestapi.BootstrapResponse{Job: job, ClaudeSettingsJSON: `{"model":"x"}`}, artifact.Limits{})
}

func TestSetupRunsBeforeTheAgent(t *testing.T) {
	s := setupSandbox(t, shellJob(`echo "agent: $(cat .git/prepared)"`),
		`echo "in $PWD with ${API_KEY-no key} as $AGENTLAB_JOB_ID"; `+untilSeen, `echo first > .git/prepared`, `cat file.txt >> .git/prepared; echo `+secret)
	if rep := s.finishIn("setup"); rep.Status != "COMPLETED" || rep.Result.Commits != 0 {
		t.Errorf("%+v", rep)
	}
	want := fmt.Sprintf("in %s with no key as %s\n", s.cfg.ClonePath, s.JobID)
	log := s.Log()
	if !strings.Contains(log, want) || !strings.Contains(log, "\n[redacted]\nagent: first\nthree\n") || !strings.Contains(log, `[agentlab] setup[1] "echo first`) {
		t.Errorf("log %q", log)
	}
}

func TestSetupEndsTheJob(t *testing.T) {
	for name, c := range map[string]struct {
		command string
		message string
	}{
		"fails":      {"true\nfalse\ntouch ../ran", `setup[1] "true\nfalse\ntouch ../ran" exited with code 1`},
		"pipe fails": {"exit 3 | cat", `setup[1] "exit 3 | cat" exited with code 3`},
		"too long":   {"echo waiting; sleep 600", `setup[1] "echo waiting; sleep 600" was stopped: setup may take half of the job's time, 1h0m0s`},
		"ignores it": {"trap 'exit 0' TERM; echo waiting; sleep 600 & wait", "was stopped: setup may take half of the job's time, 1h0m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			job := shellJob("touch ../ran")
			job.Seconds = 7200
			s := setupSandbox(t, job, "echo one", c.command, "touch ../ran")
			p := s.start()
			if strings.Contains(c.command, "waiting") { // until the next runner finds that the time of setup is over
				s.Wait("setup", func() bool { return strings.Contains(s.Log(), "waiting\n") })
				p.kill()
				s.changeBoot(func(b *boot) { b.At, b.Deadline = b.At-time.Hour, b.Deadline-time.Hour })
				p = s.start()
			}
			p.wait()
			s.wiped()
			rep := s.Final()
			if rep.Status != "FAILED" || !strings.Contains(rep.Message, c.message) || strings.Contains(s.Log(), "setup[2]") {
				t.Errorf("%+v, log %q", rep, s.Log())
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "ran")); err == nil {
				t.Error("the job continued")
			}
			if !strings.Contains(s.Log(), c.message) {
				t.Errorf("log %q", s.Log())
			}
		})
	}
}

func TestNoSetup(t *testing.T) {
	job := shellJob("echo agent")
	job.NoSetup = true
	s := setupSandbox(t, job, "exit 1")
	if rep := s.finish(); rep.Status != "COMPLETED" || s.Log() != "agent\n" {
		t.Errorf("%+v, log %q", rep, s.Log())
	}
}

func TestSetupIsCancelled(t *testing.T) {
	s := setupSandbox(t, shellJob("touch ../ran"), "echo waiting; sleep 600", "touch ../ran")
	p := s.start()
	s.Wait("setup", func() bool { return strings.Contains(s.Log(), "waiting\n") })
	s.Direct("CANCELLED")
	p.wait()
	if rep := s.Final(); rep.Status != "CANCELLED" {
		t.Errorf("%+v", rep)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "ran")); err == nil {
		t.Error("the job continued")
	}
	s.wiped()
}

// A runner that is killed during setup finds the running command again. The
// commands are those of the commit, even if one of them changes the project
// file.
func TestRunnerKilledDuringSetup(t *testing.T) {
	s := setupSandbox(t, shellJob("cat ../runs"),
		`echo one >> ../runs; printf 'setup: ["echo other >> ../runs"]\n' > .agentlab.yaml`,
		`echo two >> ../runs; echo waiting; while [ ! -e ../go ]; do sleep 0.01; done; echo went`, `echo three >> ../runs`)
	p := s.start()
	s.Wait("setup", func() bool { return strings.Contains(s.Log(), "waiting\n") })
	p.kill()
	p = s.start()
	writeFile(t, filepath.Join(filepath.Dir(s.cfg.ClonePath), "go"), "")
	p.wait()
	if rep := s.Final(); rep.Status != "COMPLETED" || !strings.Contains(s.Log(), "went\n") || !strings.HasSuffix(s.Log(), "one\ntwo\nthree\n") {
		t.Errorf("%+v, log %q", rep, s.Log())
	}
	s.wiped()
}

// A sandbox that is only prepared runs setup too, and keeps no file of it.
func TestSetupOfPreparedSandbox(t *testing.T) {
	s := setupSandbox(t, &guestapi.Job{Agent: "none", Mode: "dangerous", Keepalive: true}, "echo yes > .git/prepared")
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	if rep := s.Final(); rep.Status != "COMPLETED" {
		t.Errorf("%+v", rep)
	}
	if p, err := os.ReadFile(filepath.Join(s.cfg.ClonePath, ".git/prepared")); err != nil || string(p) != "yes\n" {
		t.Errorf("%q %v", p, err)
	}
	if left, err := filepath.Glob(filepath.Join(s.cfg.RunDir, "setup*")); err != nil || len(left) > 0 {
		t.Errorf("left: %q %v", left, err)
	}
}
