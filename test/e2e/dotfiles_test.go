package e2e

import (
	"os"
	"path/filepath"
	"testing"
)

// dotfiles is the home directory of a user who has set dotfiles.
type dotfiles string

func newDotfiles(t *testing.T) dotfiles {
	t.Helper()
	d := dotfiles(t.TempDir())
	d.write(t, "gitconfig", "[agentlab]\n\tdotfiles = "+string(d)+"/dot\n")
	d.write(t, "dot/.config/app/settings", "one\n")
	d.write(t, "dot/.netrc", "machine secret\n")
	d.write(t, "secret", "secret\n")
	if err := os.Symlink("../secret", filepath.Join(string(d), "dot", "link")); err != nil {
		t.Fatal(err)
	}
	return d
}

func (d dotfiles) config() string { return filepath.Join(string(d), "gitconfig") }

func (d dotfiles) write(t testing.TB, name, text string) {
	t.Helper()
	path := filepath.Join(string(d), name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
}

// checkDotfiles checks that a running session has the dotfiles, and gets changes at the
// next start. A repository cannot set any.
func (l *lab) checkDotfiles(d dotfiles, repo, session string) {
	l.Helper()
	if got := l.guest(session, "cd; cat .config/app/settings; ls -d .netrc link 2>&1 | grep -c 'No such'"); got != "one\n2" {
		l.Errorf("dotfiles: %q", got)
	}
	git(l, repo, "config", "agentlab.dotfiles", "/etc")
	d.write(l, "dot/.config/app/settings", "two\n")
	d.write(l, "dot/setup/install.sh", "#!/bin/sh\ncat .config/app/settings >~/installed\n")
	d.write(l, "gitconfig", "[agentlab]\n\tdotfiles = "+string(d)+"/dot\n\tdotfilesInstall = setup/install.sh\n")
	l.in(repo, "start", "--agent", "none", "--detach")
	if got := l.guest(session, "cd; cat .config/app/settings installed; pwd -P"); got != "one\ntwo\n/home/agent" {
		l.Errorf("dotfiles with a script: %q", got)
	}
	git(l, repo, "config", "--unset", "agentlab.dotfiles")
}
