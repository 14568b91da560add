package lfs_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestMain(m *testing.M) { os.Exit(guard.Run(m)) }

// The git of guarded tests reads no configuration of the machine, which may require filters
// that are not installed.
func TestGitHasNoSystemConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "gitconfig")
	if err := os.WriteFile(file, []byte("[filter \"lfs\"]\n\trequired = true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("git", "config", "--get", "filter.lfs.required")
	cmd.Env = append(os.Environ(), "GIT_CONFIG_SYSTEM="+file, "GIT_CONFIG_GLOBAL=/dev/null")
	if out, err := cmd.Output(); err == nil {
		t.Errorf("it reads %q", out)
	}
}
