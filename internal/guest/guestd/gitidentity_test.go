//go:build linux

package guestd

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A pipe in place of a file of the system does not block the guest.
func TestPipeInPlaceOfAFile(t *testing.T) {
	s := &Server{cfg: Config{Root: t.TempDir()}}
	for _, name := range []string{gitConfigFile, hostsFile, uidFile} {
		at := filepath.Join(s.cfg.Root, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mkfifo(at, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.setGitIdentity(); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("%v", err)
	}
	if got := s.line(uidFile); got != "" {
		t.Errorf("%q", got)
	}
	if err := s.overwriteFile(hostsFile, []byte("x\n"), 0o644); err != nil {
		t.Error(err)
	}
	if got := s.line(hostsFile); got != "x" {
		t.Errorf("%q", got)
	}
}

// Git has an identity for commits, of the lowest precedence, and what the image
// configures stays.
func TestGitIdentity(t *testing.T) {
	const identity = "[user]\n\tname = AgentLab agent\n\temail = agent@agentlab.invalid\n"
	lfs := "[filter \"lfs\"]\n\trequired = true\n"
	for name, c := range map[string]struct{ old, want string }{
		"none":                      {"", identity},
		"Git LFS":                   {lfs, lfs + identity},
		"of the image":              {"[user]\n\tname = I\n", "[user]\n\tname = I\n"},
		"without a last line break": {"[core]\n\tpager = less", "[core]\n\tpager = less\n" + identity},
		"a second start":            {lfs + identity, lfs + identity},
	} {
		root := t.TempDir()
		file := filepath.Join(root, gitConfigFile)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if c.old != "" {
			if err := os.WriteFile(file, []byte(c.old), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if err := (&Server{cfg: Config{Root: root}}).setGitIdentity(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != c.want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
