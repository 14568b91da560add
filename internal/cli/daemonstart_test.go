package cli

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// If another user may have created the runtime directory, no command connects,
// starts a daemon or writes. Package hostcmd tests 'daemon stop' and 'daemon status'.
func TestRuntimeFolderIsChecked(t *testing.T) {
	home, explicitDaemon := t.TempDir(), t.TempDir()
	t.Setenv("AGENTLAB_HOME", home)
	if err := os.Symlink(explicitDaemon, filepath.Join(home, "run")); err != nil {
		t.Fatal(err)
	}
	a := &App{Stdout: io.Discard, Stderr: io.Discard}
	for name, err := range map[string]error{
		"connect": func() error { _, err := a.Connect(t.Context()); return err }(),
		"start":   a.startDaemon(t.Context()),
	} {
		if agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("%s: got %v, want denied", name, err)
		}
	}
	if left, _ := os.ReadDir(explicitDaemon); len(left) != 0 {
		t.Errorf("written through the link: %v", left)
	}
}

func TestOpenStartLog(t *testing.T) {
	dir := t.TempDir()
	own := filepath.Join(dir, "own")
	if err := os.WriteFile(own, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	link, hard := filepath.Join(dir, "link"), filepath.Join(dir, "hard")
	if err := os.Symlink(own, link); err != nil {
		t.Fatal(err)
	}
	if _, err := openStartLog(link); err == nil {
		t.Error("a link was opened")
	}
	if err := os.Link(own, hard); err != nil {
		t.Fatal(err)
	}
	if _, err := openStartLog(hard); err == nil {
		t.Error("a file with another name was opened")
	}
	if text, err := os.ReadFile(own); err != nil || string(text) != "old" {
		t.Errorf("a refused file holds %q, %v", text, err)
	}
	if err := os.Remove(hard); err != nil {
		t.Fatal(err)
	}
	file, err := openStartLog(own)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if info, err := file.Stat(); err != nil || info.Size() != 0 {
		t.Errorf("the log is not empty: %v, %v", info, err)
	}
}

// What the daemon complained about and what to do about it stand apart.
func TestDaemonError(t *testing.T) {
	for log, want := range map[string]string{
		"": "",
		"noise\nagentlabd: config.yaml: line 2: unknown key\n  did you mean \"api\"?\n": `config.yaml: line 2: unknown key; did you mean "api"?`,
		"agentlabd: first\nsecond of no hint\n  do this\n":                              "first; do this",
		"agentlabd: a\x1b[2Jb\n": "a [2Jb",
	} {
		if got := daemonError(log); got != want {
			t.Errorf("%q: %q, want %q", log, got, want)
		}
	}
}
