package runner

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

// servicesSandbox makes a sandbox for a job on a repository with these files, whose
// image does not have Docker.
func servicesSandbox(t *testing.T, job *guestapi.Job, files map[string]string) *sandbox {
	t.Helper()
	bin := t.TempDir()
	for _, name := range []string{"bash", "git", "echo", "cat"} {
		at, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(at, filepath.Join(bin, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	job.RepoURL = newGitServer(t, "").add(t, "repo", newRepo(t, files))
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
	t.Setenv("PATH", bin)
	return s
}

// Services that cannot start end the job before its agent, with the reason.
func TestServicesEndTheJob(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  string
	}{
		"no Docker": {map[string]string{projectFile: "setup: [echo prepared]\nservices: compose.yaml\n", "compose.yaml": "services: {}\n"},
			`services "compose.yaml": this image does not have Docker (use an image with Docker`},
		"no file": {map[string]string{projectFile: "setup: [echo prepared]\nservices: other.yaml\n"},
			`services "other.yaml": the repository has no file "other.yaml" (correct services in .agentlab.yaml)`},
	} {
		t.Run(name, func(t *testing.T) {
			s := servicesSandbox(t, shellJob("echo agent"), c.files)
			rep := s.finish()
			if rep.Status != "FAILED" || !strings.Contains(rep.Message, c.want) {
				t.Errorf("%+v", rep)
			}
			if log := s.Log(); !strings.Contains(log, "prepared\n") || !strings.Contains(log, c.want) || strings.Contains(log, "\nagent\n") {
				t.Errorf("log %q", log)
			}
		})
	}
}

// The containers of a repository are outside of the inner sandbox that a profile asks
// for, and could act as the runner.
func TestNoServicesBesideAnInnerSandbox(t *testing.T) {
	job := shellJob("echo agent")
	job.Inner = &guestapi.InnerSandbox{Kind: "bubblewrap"}
	s := servicesSandbox(t, job, map[string]string{projectFile: "services: compose.yaml\n", "compose.yaml": "services: {}\n"})
	if rep := s.finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, "behavior.inner_sandbox") || !strings.Contains(rep.Message, "--no-setup") {
		t.Errorf("%+v, log %q", rep, s.Log())
	}
}

// With no_setup, no services start.
func TestNoSetupStartsNoServices(t *testing.T) {
	job := shellJob("echo agent")
	job.NoSetup = true
	s := servicesSandbox(t, job, map[string]string{projectFile: "services: compose.yaml\n", "compose.yaml": "services: {}\n"})
	if rep := s.finish(); rep.Status != "COMPLETED" || s.Log() != "agent\n" {
		t.Errorf("%+v, log %q", rep, s.Log())
	}
}
