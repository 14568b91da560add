package cli

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
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
	if err := a.attached().waitReachable(guard.Context(t), c, "1000"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
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
		err := a.attached().awaitSandbox(t.Context(), client.New(a.socket), "1000", newRelay(r))
		if !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", keys, err, want)
		}
		_ = w.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.attached().waitReachable(ctx, client.New(a.socket), "1000"); exitCode(err) != exitInterrupted {
		t.Errorf("cancelled: %v", err)
	}
}

// A terminal that loses its connection, as when its sandbox is suspended to disk or its
// guest reboots, is connected again when the sandbox is back. The connections that a guest
// ends while it reboots are one loss.
func TestTerminalReconnects(t *testing.T) {
	t.Parallel()
	var commands, states int
	mux := http.NewServeMux()
	seen := []agentlab.SandboxState{agentlab.SandboxSuspended, agentlab.SandboxStopped, agentlab.SandboxReady}
	mux.HandleFunc("GET /v1/sandboxes/7", func(w http.ResponseWriter, _ *http.Request) {
		state := seen[min(states, len(seen)-1)]
		states++
		_ = json.NewEncoder(w).Encode(api.Sandbox{VMID: 7, State: string(state), Desired: string(agentlab.DesiredRunning)})
	})
	again := worktest.CommandHandler(t, func([]string, []byte) ([]byte, string, int) { return []byte("again"), "", 0 })
	mux.HandleFunc("POST /v1/sandboxes/7/exec", func(w http.ResponseWriter, r *http.Request) {
		if commands++; commands > 3 {
			again(w, r)
			return
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+guestapi.StreamProtocol+"\r\n\r\n")
		_, _ = stream.NewWriter(conn).Data(stream.Stdout).Write([]byte("first "))
		_ = conn.Close()
	})
	var out, notes strings.Builder
	a := &App{Stdin: strings.NewReader(""), Stdout: &out, Stderr: &notes, Now: time.Now, socket: filepath.Join(t.TempDir(), "none")}
	err := a.attached().openTerminal(t.Context(), worktest.HandlerClient(t, mux), "7", guestapi.ExecRequest{Command: []string{"open"}, TTY: true}, nil)
	if err != nil || out.String() != "first first first again" || states != len(seen)+2 || strings.Count(notes.String(), "connecting again") != 1 {
		t.Errorf("%v, %q after %d states, %s", err, out.String(), states, notes.String())
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
