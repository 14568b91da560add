package session

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// slowGit replaces git by a script that, for the commands verb, runs code first.
func slowGit(t *testing.T, verb, code string) {
	t.Helper()
	git, err := exec.LookPath("git")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	script := "#!/bin/sh\nfor a; do if [ \"$a\" = " + verb + " ]; then\n" + code + "\nfi; done\nexec " + git + " \"$@\"\n"
	if err := os.WriteFile(filepath.Join(dir, "git"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// fifo makes a named pipe.
func fifo(t *testing.T, name string) string {
	t.Helper()
	name = filepath.Join(t.TempDir(), name)
	if err := syscall.Mkfifo(name, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// cancelAt returns a context that ends when something is written to a pipe, and calls then.
func cancelAt(t *testing.T, pipe string, then func()) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = os.ReadFile(pipe)
		cancel()
		then()
	}()
	t.Cleanup(func() {
		if w, err := os.OpenFile(pipe, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil { // it was never written to
			_ = w.Close()
		}
		<-done
	})
	return ctx
}

// An interrupt, such as the end of a terminal with --sync, does not leave a merge half
// done: files of the new commit in the work tree, and a lock.
func TestMergeIsNotInterrupted(t *testing.T) {
	w := newSessionWorld(t)
	head := w.commit(map[string]string{"new": "1"})
	s := w.fetched()
	j, err := gitsafe.JudgeCommit(t.Context(), w.user, w.user, true, "HEAD", s.Link.Ref("trunk"))
	if err != nil {
		t.Fatal(err)
	}
	started, resume := fifo(t, "started"), fifo(t, "resume")
	slowGit(t, "merge", "echo > "+started+"; read _ < "+resume)
	ctx := cancelAt(t, started, func() {
		if p, err := os.OpenFile(resume, os.O_RDWR, 0); err == nil { // it does not wait for a reader
			_, _ = p.WriteString("\n")
			t.Cleanup(func() { _ = p.Close() })
		}
	})
	_, _ = mergeRef(ctx, w.app, w.user, "trunk", s.Link.Ref("trunk"), j)
	if got := worktest.Git(t, w.user, "rev-parse", "HEAD"); got != head {
		t.Errorf("HEAD is %s, want %s", got, head)
	}
	if got := worktest.Git(t, w.user, "status", "--porcelain"); got != "" {
		t.Errorf("the work tree has changes: %q", got)
	}
}

// Git can remove its locks when it is interrupted.
func TestGitIsNotKilled(t *testing.T) {
	dir, started := t.TempDir(), fifo(t, "started")
	ended := filepath.Join(dir, "ended")
	slowGit(t, "status", "trap 'touch "+ended+"; exit 1' TERM\necho > "+started+"\nwhile :; do :; done")
	if _, err := gitsafe.Git(cancelAt(t, started, func() {}), dir, "status"); err == nil {
		t.Error("it succeeded")
	}
	if _, err := os.Lstat(ended); err != nil {
		t.Errorf("git had no time to remove its locks: %v", err)
	}
}
