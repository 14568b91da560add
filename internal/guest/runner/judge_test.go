package runner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

func judgeSandbox(t *testing.T, script, judge string) *sandbox {
	t.Helper()
	job := shellJob(script)
	job.Judge = judge
	return newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
}

func TestJudge(t *testing.T) {
	number := func(n float64) *float64 { return &n }
	for name, c := range map[string]struct {
		judge string
		exit  int
		score *float64
	}{
		"passes":           {`test "$(cat made)" = work; test -z "${API_KEY-}"`, 0, nil},
		"fails":            {"echo 12; exit 3", 3, number(12)},
		"number":           {"echo 7; echo -1.5e2", 0, number(-150)},
		"spaces":           {"printf '\\n  42 \\r\\n\\n'", 0, number(42)},
		"no newline":       {"printf 3", 0, number(3)},
		"not the last":     {"echo 3; echo done", 0, nil},
		"not of the agent": {"true", 0, nil},
		"not a number":     {"echo NaN", 0, nil},
		"infinite":         {"echo 1e999", 0, nil},
		"hexadecimal":      {"echo 0x10", 0, nil},
		"long line":        {"printf '%0400d\\n' 1", 0, nil},
		"long output":      {"seq 1 20000", 0, number(20000)},
	} {
		t.Run(name, func(t *testing.T) {
			s := judgeSandbox(t, "echo work > made; echo 99", c.judge)
			rep := s.finish()
			if rep.Status != "COMPLETED" || rep.Result.JudgeExit == nil || *rep.Result.JudgeExit != c.exit {
				t.Errorf("%+v %+v, log %.500q", rep, rep.Result, s.Log())
			}
			got := rep.Result.Score
			if (got == nil) != (c.score == nil) || got != nil && *got != *c.score {
				t.Errorf("score %v, want %v", got, c.score)
			}
		})
	}
}

func TestJudgeIsAPhase(t *testing.T) {
	if rep := judgeSandbox(t, "true", untilSeen).finishIn("judge"); rep.Status != "COMPLETED" {
		t.Errorf("%+v", rep)
	}
}

func TestNoJudgeOfAFailedAgent(t *testing.T) {
	s := judgeSandbox(t, "exit 4", "touch ../judged")
	if rep := s.finish(); rep.Status != "FAILED" || *rep.ExitCode != 4 || rep.Result.JudgeExit != nil {
		t.Errorf("%+v", rep)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "judged")); err == nil {
		t.Error("it was judged")
	}
}

// A log that the agent filled has space for the judge.
func TestJudgeAfterAFullLog(t *testing.T) {
	s := judgeSandbox(t, "head -c 40000000 /dev/zero | tr '\\0' x", "echo; echo 5")
	if rep := s.finish(); rep.Status != "COMPLETED" || rep.Result.Score == nil || *rep.Result.Score != 5 {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
}

func TestJudgeIsStopped(t *testing.T) {
	s := judgeSandbox(t, "echo agent", "echo judging; sleep 600")
	p := s.start()
	s.Wait("judge", func() bool { return strings.Contains(s.Log(), "judging\n") })
	s.Direct("CANCELLED")
	p.wait()
	if rep := s.Final(); rep.Status != "CANCELLED" || rep.Result.JudgeExit != nil {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	s.wiped()
}

func TestRunnerKilledWhileJudging(t *testing.T) {
	s := judgeSandbox(t, "echo once >> ../runs; echo 3", "echo judging; while [ ! -e ../go ]; do sleep 0.01; done; echo once >> ../judged; echo 8")
	p := s.start()
	s.Wait("judge", func() bool { return strings.Contains(s.Log(), "judging\n") })
	p.kill()
	p = s.start()
	writeFile(t, filepath.Join(filepath.Dir(s.cfg.ClonePath), "go"), "")
	p.wait()
	if rep := s.Final(); rep.Status != "COMPLETED" || rep.Result.Score == nil || *rep.Result.Score != 8 {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	for _, name := range []string{"runs", "judged"} {
		if got, err := os.ReadFile(filepath.Join(filepath.Dir(s.cfg.ClonePath), name)); string(got) != "once\n" {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
	s.wiped()
}

// The agent of an attempt finds no Git credential, nothing is pushed, and its
// branch is that of the job.
func TestAttemptCannotPush(t *testing.T) {
	const token = "git-token-123456"
	srv := newGitServer(t, token)
	url := srv.add(t, "repo", newRepo(t, map[string]string{projectFile: "setup:\n  - git fetch -q origin dev && echo fetched\n"}))
	job := shellJob(`git branch --show-current; git push -q origin HEAD && echo pushed
grep -rl ` + token[:3] + `"` + token[3:] + `" "$RUN" ~ . && echo found; echo new > n; git add n; git commit -qm work`)
	job.RepoURL, job.Branch, job.NoPush = url, "agentlab/job-parent", true
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job, Git: &guestapi.Git{URL: url, Token: token}, Env: map[string]string{"RUN": "replaced"}}, artifact.Limits{})
	env := s.Response().Env
	env["RUN"] = s.cfg.RunDir
	job.Task = "set +e\n" + job.Task
	rep := s.finish()
	log := s.Log()
	if rep.Status != "COMPLETED" || rep.Result.Pushed || rep.Result.Commits != 1 || rep.Result.Branch != "agentlab/job-parent" {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	if !strings.Contains(log, "fetched\n") || !strings.Contains(log, "agentlab/job-parent\n") || strings.Contains(log, "pushed\n") || strings.Contains(log, "found\n") {
		t.Errorf("log %q", log)
	}
	if out := runGit(t, filepath.Join(srv.root, "repo"), "branch", "--list", "agentlab/*"); out != "" {
		t.Errorf("pushed %q", out)
	}
}
