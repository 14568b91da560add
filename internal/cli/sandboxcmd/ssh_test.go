package sandboxcmd

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// Directories of expired keys are removed, and nothing else.
func TestSweepSSHKeys(t *testing.T) {
	tmp, explicitDaemon := t.TempDir(), t.TempDir()
	now := time.Now()
	keep := filepath.Join(explicitDaemon, "key")
	if err := os.WriteFile(keep, []byte("k"), 0o600); err != nil {
		t.Fatal(err)
	}
	folder := func(name string, age time.Duration) {
		dir := filepath.Join(tmp, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "key"), []byte("k"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(dir, now.Add(-age), now.Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	folder("agentlab-ssh-new", 0)
	folder("agentlab-ssh-valid", sshKeySeconds*time.Second)
	folder("agentlab-ssh-old", sshKeySeconds*time.Second+2*time.Minute)
	folder("agentlab-ssh-ancient", 100*24*time.Hour)
	folder("other-old", time.Hour)
	if err := os.Symlink(explicitDaemon, filepath.Join(tmp, "agentlab-ssh-link")); err != nil {
		t.Fatal(err)
	}
	want := []string{"agentlab-ssh-link", "agentlab-ssh-new", "agentlab-ssh-valid", "other-old"}
	if os.Geteuid() == 0 {
		folder("agentlab-ssh-of-another-user", time.Hour)
		if err := os.Lchown(filepath.Join(tmp, "agentlab-ssh-of-another-user"), 12345, 12345); err != nil {
			t.Fatal(err)
		}
		want = append(want, "agentlab-ssh-of-another-user")
	}
	sweepSSHKeys(tmp, now)
	entries, err := os.ReadDir(tmp)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("left %q, want %q", got, want)
	}
	if _, err := os.Stat(keep); err != nil {
		t.Error(err)
	}
}
