package project

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// sourceOf returns the SetupSource of HEAD.
func sourceOf(t *testing.T, repo string) (*api.SetupSource, string) {
	t.Helper()
	src, err := gitsafe.FindCommit(t.Context(), repo, "")
	if err != nil {
		t.Fatal(err)
	}
	p, err := at(t.Context(), repo, src.Commit)
	if err != nil {
		t.Fatal(err)
	}
	s, why, err := source(t.Context(), src, p, "")
	if err != nil {
		t.Fatal(err)
	}
	return s, why
}

func TestSetupSource(t *testing.T) {
	t.Parallel()
	repo := filepath.Join(t.TempDir(), "repo")
	commit := func(files map[string]string) {
		t.Helper()
		worktest.Put(t, repo, files)
		run(t, repo, "git", "add", "-A", "-f")
		run(t, repo, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "--allow-empty", "-m", "x")
	}
	if err := os.Mkdir(repo, 0o750); err != nil {
		t.Fatal(err)
	}
	run(t, repo, "git", "init", "-q", "-b", "main")
	commit(map[string]string{"go.mod": "module a", "main.go": "package a"})
	if s, why := sourceOf(t, repo); s != nil || why != "" {
		t.Errorf("without setup: %+v %q", s, why)
	}
	commit(map[string]string{projectfile.Name: "setup: {run: [make], inputs: ['tools/**']}\n"})
	first, _ := sourceOf(t, repo)
	if first.Ref != "main" || first.Default || !strings.HasSuffix(first.Repo, ":"+repo) {
		t.Errorf("%+v", first)
	}
	same := func(want bool, files map[string]string) {
		t.Helper()
		before, _ := sourceOf(t, repo)
		commit(files)
		if after, _ := sourceOf(t, repo); (after.Sum == before.Sum) != want {
			t.Errorf("%v: the sum changed: %v", files, want)
		}
	}
	same(true, map[string]string{"main.go": "package b"})
	same(false, map[string]string{"go.mod": "module b"})
	same(false, map[string]string{"web/package-lock.json": "{}"})
	same(false, map[string]string{"tools/a/b": "x"})
	same(false, map[string]string{projectfile.Name: "setup: {run: [make, sh x/prepare.sh], inputs: ['tools/**']}\nservices: deploy/dev.yaml\n", "x/prepare.sh": "true", "deploy/dev.yaml": "a"})
	same(false, map[string]string{"x/prepare.sh": "false"})
	same(false, map[string]string{"deploy/dev.yaml": "b"})
	same(false, map[string]string{projectfile.Name: "setup: {run: [make all], inputs: ['tools/**']}\n"})

	// The name of a branch does not make it the default branch.
	run(t, repo, "git", "update-ref", "refs/remotes/origin/main", "HEAD")
	run(t, repo, "git", "symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
	if s, _ := sourceOf(t, repo); !s.Default {
		t.Errorf("%+v", s)
	}
	commit(nil)
	if s, _ := sourceOf(t, repo); s.Default {
		t.Errorf("%+v", s)
	}
	run(t, repo, "git", "checkout", "-q", "--detach")
	if s, _ := sourceOf(t, repo); !gitsafe.IsCommit(s.Ref) {
		t.Errorf("%+v", s)
	}
	commit(map[string]string{".devcontainer/go/devcontainer.json": "{}"})
	if s, why := sourceOf(t, repo); s != nil || !strings.Contains(why, "dev container") {
		t.Errorf("%+v %q", s, why)
	}
	run(t, repo, "git", "rm", "-q", "-r", ".devcontainer")
	commit(map[string]string{projectfile.Name: "setup: [make]\nnetwork: {mode: nat}\n"})
	if s, why := sourceOf(t, repo); s != nil || why == "" {
		t.Errorf("%+v %q", s, why)
	}
}

func TestProjectAt(t *testing.T) {
	repo := t.TempDir()
	run(t, repo, "git", "init", "-q", "-b", "main")
	if err := os.Symlink("/etc/passwd", filepath.Join(repo, projectfile.Name)); err != nil {
		t.Fatal(err)
	}
	run(t, repo, "git", "add", "-A")
	run(t, repo, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "x")
	if _, err := at(t.Context(), repo, "HEAD"); err == nil || !strings.Contains(err.Error(), "it is not a file") {
		t.Error(err)
	}
}

func run(t *testing.T, dir, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}
