package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/version"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// A command whose daemon has ended, because another command's daemon has the lock, waits
// for that one, and starts another daemon when that one has ended.
func TestStartWaitsForTheOtherDaemon(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := config.Paths{State: dir, Run: dir}
	wait := func(ctx context.Context, code int) error {
		exited := make(chan int, 1)
		exited <- code
		return awaitDaemon(ctx, p, exited, strings.NewReader("agentlabd: it failed"))
	}
	if err := wait(guard.Context(t), 1); err == nil || !strings.Contains(err.Error(), "it failed") {
		t.Errorf("without another daemon: %v", err)
	}
	if err := wait(guard.Context(t), config.ExitLocked); !errors.Is(err, errDaemonFreed) {
		t.Errorf("after the end of another daemon: %v", err)
	}
	l, err := p.TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Unlock() }()
	ctx, cancel := context.WithTimeout(t.Context(), daemonEndLimit+time.Second)
	defer cancel()
	if err := wait(ctx, config.ExitLocked); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while another daemon starts: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- wait(guard.Context(t), config.ExitLocked) }()
	if err := l.Unlock(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, errDaemonFreed) {
		t.Errorf("when the other daemon ends: %v", err)
	}
}

// A command says that the daemon which it has used is older than the program.
func TestOldDaemonIsNoted(t *testing.T) {
	t.Setenv("AGENTLAB_HOME", t.TempDir())
	own := version.Get().Version
	for _, c := range []struct {
		header string // "-": none
		json   bool
		noted  bool
	}{{own, false, false}, {"-", false, true}, {"-", true, false}} {
		socket := filepath.Join(t.TempDir(), "s")
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if c.header != "-" {
				w.Header().Set(api.VersionHeader, c.header)
			}
			_ = json.NewEncoder(w).Encode(api.Status{})
		})}
		go func() { _ = srv.Serve(l) }()
		t.Cleanup(func() { _ = srv.Close() })
		var said bytes.Buffer
		status := func(a *App) *cobra.Command {
			return Query(a, "status", "", ExactArgs(), All((*client.Client).Status), func(api.Status) error { return nil })
		}
		a := &App{Commands: []Command{{New: status}}, Stdout: io.Discard, Stderr: &said, Now: time.Now}
		args := []string{"--socket", socket, "status"}
		if c.json {
			args = append(args, "--json")
		}
		a.Run(guard.Context(t), args)
		if noted := strings.Contains(said.String(), "restart it, VMs keep running: agentlab daemon restart"); noted != c.noted {
			t.Errorf("%+v: said %q", c, said.String())
		}
	}
	for _, v := range []struct {
		daemon, own string
		older       bool
	}{{"0.3.0", "0.4.0", true}, {"0.4.0", "0.4.0", false}, {"0.4.0-rc1", "0.4.0", true}, {"0.5.0", "0.4.0", false}, {"dev", "0.4.0", false}, {"0.4.0", "dev", false}} {
		if olderVersion(v.daemon, v.own) != v.older {
			t.Errorf("%+v", v)
		}
	}
}
