package transfer

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// Dotfiles are sent without secrets and links, and within limits.
func TestDotfiles(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	worktest.Fill(t, outside, map[string]string{"private": "no", "sub/file": "no"})
	worktest.Fill(t, dir, map[string]string{
		".zshrc": "a", ".config/nvim/init.lua": "b", "install.sh": "c", "README.md": "d",
		".ssh/config": "no", ".git/config": "no", ".netrc": "no", ".aws/config": "no", ".config/gh/hosts.yml": "no", ".env.local": "no",
		".config/app/Credentials.json": "no", "keys/id_ed25519": "no", "keys/ID_RSA.pub": "no", "server.PEM": "no", ".zsh_history": "no",
		"my-token.txt": "no", ".npmrc": "no", ".codex/auth.json": "no", ".docker/config.json": "no",
	})
	for name, target := range map[string]string{".vimrc": filepath.Join(outside, "private"), ".config/link": outside, "relative": "../x"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	d, err := readDotfiles(dir, "install.sh")
	if want := []string{".config/nvim/init.lua", ".zshrc", "README.md", "install.sh"}; err != nil || !slices.Equal(d.names, want) {
		t.Errorf("%q, %v, want %q", d.names, err, want)
	}
	if d.left != 15+3 {
		t.Errorf("%d files are left out", d.left)
	}
	worktest.Fill(t, dir, map[string]string{".zshrc": "changed"})
	if other, err := readDotfiles(dir, "install.sh"); err != nil || other.Sum == d.Sum {
		t.Errorf("a change is not noticed: %v", err)
	}
	for _, install := range []string{"../install.sh", "missing", ".ssh/config", "/bin/sh"} {
		if _, err := readDotfiles(dir, install); agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" {
			t.Errorf("the script %q: %v", install, err)
		}
	}
	worktest.Fill(t, dir, map[string]string{"large": string(make([]byte, maxDotfile+1))})
	if more, err := readDotfiles(dir, ""); err != nil || slices.Contains(more.names, "large") {
		t.Errorf("a large file: %v", err)
	}
	for i := range maxDotfileBytes/maxDotfile + 1 {
		worktest.Fill(t, dir, map[string]string{filepath.Join("many", string(rune('a'+i))): string(make([]byte, maxDotfile))})
	}
	if _, err := readDotfiles(dir, ""); agentlab.CodeOf(err) != agentlab.CodeLimit {
		t.Errorf("too many bytes: %v", err)
	}
	t.Setenv("HOME", dir)
	if _, err := readDotfiles(dir, ""); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("the home directory: %v", err)
	}
}

// A repository is cloned; the clone is used while the repository is away.
func TestDotfilesRepository(t *testing.T) {
	home, repo := t.TempDir(), t.TempDir()
	t.Setenv("AGENTLAB_HOME", home)
	worktest.Fill(t, repo, map[string]string{".zshrc": "one"})
	worktest.Git(t, repo, "init", "-q")
	worktest.Git(t, repo, "add", ".")
	worktest.Git(t, repo, "commit", "-qm", "dotfiles")
	a := worktest.UI{Out: os.Stderr}
	source := "file://" + repo
	dir, err := dotfilesDir(t.Context(), a, source)
	if err != nil {
		t.Fatal(err)
	}
	if d, err := readDotfiles(dir, ""); err != nil || !slices.Equal(d.names, []string{".zshrc"}) {
		t.Errorf("%q, %v", d.names, err)
	}
	if err := os.RemoveAll(repo); err != nil {
		t.Fatal(err)
	}
	if err := cloneDotfiles(t.Context(), a, source, dir); err != nil {
		t.Errorf("the repository is away: %v", err)
	}
	if err := cloneDotfiles(t.Context(), a, source, filepath.Join(home, "cache", "other")); agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" {
		t.Errorf("no clone: %v", err)
	}
	for _, bad := range []string{"dotfiles", "-u:x", "ext::sh -c true"} {
		if _, err := dotfilesDir(t.Context(), a, bad); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
