package jobcmd

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/source"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
	"github.com/agentlab-vm/agentlab/test/fakelfs"
)

// An apply names the files of Git LFS of which it writes the pointers.
func TestApplyNamesPointers(t *testing.T) {
	fakelfs.Install(t)
	user, guest := worktest.NewAgent(t)
	_, text := fakelfs.Pointer("object of the guest")
	bundle := worktest.Leave(t, guest, map[string]string{"new.bin": text, "other": "1\n", "run.sh": text})
	dir := t.TempDir()
	b, err := gitsafe.OpenBundle(t.Context(), dir, bundle, user, "refs/heads/agentlab/j", guestapi.RefChanges)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	var notes bytes.Buffer
	a := &cli.App{Stdout: io.Discard, Stderr: &notes, Stdin: strings.NewReader("")}
	if err := ApplyChanges(t.Context(), a, b, source.OfJob(api.Job{ID: "j"}, b), dir, source.Options{}); err != nil {
		t.Fatal(err)
	}
	if want := "note: only the pointers of 2 Git LFS files (new.bin, run.sh) are written; to get the content, commit them, then:\n  → git lfs checkout\n"; !strings.Contains(notes.String(), want) {
		t.Errorf("%q lacks %q", &notes, want)
	}
}
