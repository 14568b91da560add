package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
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
		text, _ := os.ReadFile(filepath.Join(home, "state", "agentlabd.lock"))
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
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
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if err := a.waitReachable(ctx, c, "1000"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("%v; the daemon does not answer that there is no such sandbox", err)
	}
}

// Keys end the wait for a sandbox at once.
func TestKeysEndTheWait(t *testing.T) {
	a := &App{Stderr: io.Discard, socket: filepath.Join(t.TempDir(), "none")}
	for keys, want := range map[string]error{"x\x03": context.Canceled, "\x1d": errDetached} {
		r, w := io.Pipe()
		a.Stdin = r
		go func() { _, _ = io.WriteString(w, keys) }()
		err := a.awaitSandbox(t.Context(), client.New(a.socket), "1000", newRelay(r))
		if !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", keys, err, want)
		}
		_ = w.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.waitReachable(ctx, client.New(a.socket), "1000"); exitCode(err) != exitInterrupted {
		t.Errorf("cancelled: %v", err)
	}
}

func TestReopen(t *testing.T) {
	command := []string{"agentlab-agent", "open", "--dir", "/x", "--agent", "claude", "--", "do it"}
	if got := reopen(slices.Clone(command), false); !slices.Equal(got, command[:4]) {
		t.Errorf("%q", got)
	}
	if got, want := reopen(slices.Clone(command), true), append(slices.Clone(command[:6]), "--resume"); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := reopen(command[:4], true); !slices.Equal(got, command[:4]) {
		t.Errorf("%q", got)
	}
}
