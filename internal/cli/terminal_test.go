package cli

import (
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// A terminal that waits for a killed daemon starts it again.
func TestReconnectStartsTheDaemon(t *testing.T) {
	bin, home := t.TempDir(), t.TempDir()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(exe, filepath.Join(bin, "agentlabd")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(home, "config"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, "config", "config.yaml"), []byte("backend: fake\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AGENTLAB_HOME", home)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Cleanup(func() {
		pid, _ := lock.Holder(filepath.Join(home, "state", "agentlabd.lock"))
		if pid == 0 {
			t.Error("no daemon was started")
			return
		}
		_ = syscall.Kill(pid, syscall.SIGTERM)
		for guard.Alive(pid) {
			time.Sleep(5 * time.Millisecond) // an outside condition
		}
	})
	a := &App{Stderr: io.Discard, Stdout: io.Discard, Now: time.Now}
	c, err := a.dial()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Attached().WaitReachable(guard.Context(t), c, "1000"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("%v; the daemon does not answer that there is no such sandbox", err)
	}
}
