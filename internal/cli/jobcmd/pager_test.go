package jobcmd

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/source"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// agentsBundle checks a bundle of worktest.AgentLeft.
func agentsBundle(t *testing.T, user, bundle string) *gitsafe.Bundle {
	t.Helper()
	b, err := gitsafe.OpenBundle(t.Context(), t.TempDir(), bundle, user, "refs/heads/agentlab/j", guestapi.RefChanges)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// shownDiff is what the user sees of changes on a terminal.
func shownDiff(t *testing.T, files map[string]string, stat bool) string {
	t.Helper()
	user, bundle := worktest.AgentLeft(t, files)
	b := agentsBundle(t, user, bundle)
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ptmx.Close() }()
	done := make(chan error, 1)
	go func() {
		done <- ShowChanges(t.Context(), &cli.App{Stdout: tty, Stderr: io.Discard}, b, source.OfJob(api.Job{ID: "j"}, b), stat)
		_ = tty.Close()
	}()
	out, _ := io.ReadAll(ptmx) // ends with an error when the other side is closed
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(out), "\r\n", "\n")
}

// On a terminal, diff has the colours and the pager of git, and no control characters of
// the guest.
func TestDiffOnTerminal(t *testing.T) {
	files := map[string]string{"new.txt": "a\x1b]52;c;?\a\n++ no header\n", "image": "\x00\x01"}
	t.Setenv("GIT_PAGER", "sed 's/^/paged:/'")
	got := shownDiff(t, files, false)
	for _, want := range []string{
		"paged:\x1b[1mdiff --git a/new.txt b/new.txt\x1b[m\n", "paged:\x1b[36m@@ -0,0 +1,2 @@\x1b[m\n", "paged:\x1b[32m+a.]52;c;?.\x1b[m\n",
		"paged:\x1b[32m+++ no header\x1b[m\n", "Binary files /dev/null and b/image differ",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
	if got := shownDiff(t, files, true); !strings.Contains(got, "paged: new.txt") || strings.Contains(got, "\x1b") {
		t.Errorf("stat: %q", got)
	}
	t.Setenv("GIT_PAGER", "cat")
	t.Setenv("NO_COLOR", "1")
	if got := shownDiff(t, files, false); strings.Contains(got, "\x1b") || strings.Contains(got, "paged:") || !strings.Contains(got, "\n+a.]52;c;?.\n") {
		t.Errorf("without pager and colours: %q", got)
	}
	t.Setenv("GIT_PAGER", "true") // as a pager that the user ends at once
	shownDiff(t, map[string]string{"big": strings.Repeat("line\n", 1<<19)}, false)
}

// A reader such as head ends early; that is no error, and the command can clean up.
func TestDiffIntoClosedPipe(t *testing.T) {
	t.Parallel()
	user, bundle := worktest.AgentLeft(t, map[string]string{"big": strings.Repeat("line\n", 1<<19)})
	b := agentsBundle(t, user, bundle)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- ShowChanges(t.Context(), &cli.App{Stdout: w, Stderr: io.Discard}, b, source.OfJob(api.Job{ID: "j"}, b), false)
	}()
	if _, err := io.ReadFull(r, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
	_ = w.Close()
	full := &cli.ShownOutput{W: &bytes.Buffer{}}
	if err := full.Ended(agentlab.Errorf(agentlab.CodeConflict, "git failed")); err == nil {
		t.Error("an error of git was lost")
	}
}
