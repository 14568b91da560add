package attach

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// elsewhere is a daemon that is started elsewhere.
type elsewhere struct{}

func (elsewhere) StoppedByUser() bool { return false }

func (elsewhere) Restart(context.Context) (*client.Client, error) { return nil, nil }

// Keys end the wait for a sandbox at once.
func TestKeysEndTheWait(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	for keys, want := range map[string]error{"x\x03": context.Canceled, "\x1d": errDetached} {
		r, w := io.Pipe()
		a := Terminal{In: r, Err: io.Discard, UI: worktest.UI{Out: io.Discard}, Daemon: elsewhere{}}
		go func() { _, _ = io.WriteString(w, keys) }()
		err := a.awaitSandbox(t.Context(), client.New(none), "1000", newRelay(r))
		if !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", keys, err, want)
		}
		_ = w.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (Terminal{Daemon: elsewhere{}}).WaitReachable(ctx, client.New(none), "1000"); !errors.Is(err, context.Canceled) {
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
	a := Terminal{In: strings.NewReader(""), Out: &out, Err: &notes, UI: worktest.UI{Out: &notes}, Daemon: elsewhere{}, Now: time.Now}
	err := a.Open(t.Context(), worktest.HandlerClient(t, mux), "7", guestapi.ExecRequest{Command: []string{"open"}, TTY: true}, nil)
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
