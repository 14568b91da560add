package runner

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// A runner that is killed in the middle of the agent's work, twice, is started
// again: the agent never notices, the log has no gap and no repetition, and
// the one-time token is used once.
func TestRunnerKilledWhileTheAgentWorks(t *testing.T) {
	repo := newRepo(t, nil)
	job := shellJob(`for i in $(seq 1 80); do echo "line $i $API_KEY"; sleep 0.02; done
echo new > new.txt; git add -A; git commit -qm work; echo "ran once" >> ../runs`)
	job.RepoURL = newGitServer(t, "").add(t, "repo", repo)
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
	p := s.start()
	for _, at := range []string{"line 5 ", "line 40 "} {
		s.Wait(at, func() bool { return strings.Contains(s.Log(), at) })
		p.kill()
		p = s.start()
	}
	p.wait()
	rep := s.Final()
	if rep.Status != "COMPLETED" || rep.Result.Commits != 1 || s.Fetches() != 1 {
		t.Errorf("%+v %+v, %d fetches", rep, rep.Result, s.Fetches())
	}
	var want strings.Builder
	for i := range 80 {
		fmt.Fprintf(&want, "line %d [redacted]\n", i+1)
	}
	if got := s.Log(); got != want.String() {
		t.Errorf("log %q", got)
	}
	if runs, _ := os.ReadFile(filepath.Join(filepath.Dir(s.cfg.ClonePath), "runs")); string(runs) != "ran once\n" {
		t.Errorf("runs %q", runs)
	}
	s.wiped()
}

// The agent ends, and the time runs out, while no runner lives.
func TestRunnerUnreachableAtEnd(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		late   bool // the time runs out
		status string
	}{
		"agent ended":  {"echo started; sleep 0.3; echo ended; touch ../ended", false, "COMPLETED"},
		"agent failed": {"echo started; sleep 0.3; touch ../ended; exit 200", true, "FAILED"},
		"time ran out": {"echo started; touch ../ended; sleep 600", true, "TIMEOUT"},
	} {
		t.Run(name, func(t *testing.T) {
			job := shellJob(c.script)
			job.Seconds = 3600
			s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
			p := s.start()
			s.Wait("start", func() bool { return strings.Contains(s.Log(), "started") })
			p.kill()
			s.Wait("end", func() bool {
				_, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "ended"))
				return err == nil
			})
			if c.late { // noted before the runner was killed, or by the next one
				s.changeBoot(func(b *boot) { b.Deadline = b.At + 1 })
				if err := dir(s.cfg.RunDir).save(fileStop, stopRequest{Status: "TIMEOUT"}); err != nil {
					t.Fatal(err)
				}
			}
			s.start().wait()
			if rep := s.Final(); rep.Status != c.status {
				t.Errorf("%+v", rep)
			}
			s.wiped()
		})
	}
}

// Whatever a killed runner had noted, the next one finishes the job, and
// nothing is done twice that must not be.
func TestRunnerKilledAtEachStage(t *testing.T) {
	for _, stage := range []string{fileResponse, fileWorkdirLock, fileRepo, agentcmd.PlanFile, agentcmd.StartedFile, agentcmd.ExitFile, fileOutcome, fileFinal} {
		t.Run(stage, func(t *testing.T) {
			repo := newRepo(t, nil)
			job := shellJob(`echo run >> ../runs; echo new > new.txt; git add -A; git commit -qm work`)
			job.RepoURL = newGitServer(t, "").add(t, "repo", repo)
			s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
			p := s.start()
			deadline := time.Now().Add(guard.Patience)
			for {
				if _, err := os.Lstat(filepath.Join(s.cfg.RunDir, stage)); err == nil {
					break
				}
				select {
				case <-p.end: // it was quicker than we looked
					p.end <- nil
				default:
				}
				if len(p.end) > 0 || time.Now().After(deadline) {
					break
				}
			}
			p.kill()
			s.start().wait()
			rep := s.Final()
			if rep.Status != "COMPLETED" || rep.Result.Commits != 1 || s.Fetches() != 1 {
				t.Errorf("%+v %+v, %d fetches", rep, rep.Result, s.Fetches())
			}
			if runs, _ := os.ReadFile(filepath.Join(filepath.Dir(s.cfg.ClonePath), "runs")); string(runs) != "run\n" {
				t.Errorf("runs %q", runs)
			}
			if !slices.Contains(s.Paths(), artBundle) {
				t.Errorf("artifacts %q", s.Paths())
			}
			s.wiped()
		})
	}
}

// Without its supervisor the agent ends, and the job fails with the reason.
func TestSupervisorKilled(t *testing.T) {
	s := newShellSandbox(t, `echo started; sleep 600`)
	done := make(chan error, 1)
	go func() { done <- s.run() }()
	s.Wait("start", func() bool { return strings.Contains(s.Log(), "started") })
	var st agentcmd.Started
	s.Wait("note of the supervisor", func() bool { // which it writes when the agent runs already
		p, err := os.ReadFile(filepath.Join(s.cfg.RunDir, agentcmd.StartedFile))
		return err == nil && json.Unmarshal(p, &st) == nil
	})
	if err := syscall.Kill(st.Supervisor, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if rep := s.Final(); rep.Status != "FAILED" || !strings.Contains(rep.Message, "supervisor was killed") {
		t.Errorf("%+v", rep)
	}
	s.Wait("end of the agent", func() bool {
		start, err := hostos.ProcStart(st.PID)
		return err != nil || start != st.StartTime
	})
}

// A runner that gets a stop signal, for example from a service manager, leaves
// everything for the next one.
func TestRunnerStoppedBySignal(t *testing.T) {
	s := newShellSandbox(t, `echo started; sleep 0.5; echo ended`)
	p := s.start()
	s.Wait("start", func() bool { return strings.Contains(s.Log(), "started") })
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	if err := <-p.end; err == nil {
		t.Error("it says that nothing is left to do")
	}
	s.start().wait()
	if rep := s.Final(); rep.Status != "COMPLETED" || s.Log() != "started\nended\n" {
		t.Errorf("%+v %q", rep, s.Log())
	}
}

// The final report is repeated until the controller takes it.
func TestFinalReportIsRepeated(t *testing.T) {
	s := newShellSandbox(t, `echo started; sleep 0.3`)
	p := s.start()
	s.Wait("start", func() bool { return strings.Contains(s.Log(), "started") })
	s.Fail(agentlab.Errorf(agentlab.CodeUnavailable, "the store is locked"))
	s.Wait("final report on file", func() bool {
		_, err := os.Stat(filepath.Join(s.cfg.RunDir, fileFinal))
		return err == nil
	})
	p.kill()
	p = s.start()
	s.Fail(nil)
	p.wait()
	if rep := s.Final(); rep.Status != "COMPLETED" {
		t.Errorf("%+v", rep)
	}
	s.wiped()
}
