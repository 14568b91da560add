package hostcmd

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// 'daemon stop' waits for the process that it asked to end, also when another
// daemon answers on the socket by then, and reports that one.
func TestDaemonStopWaitsForTheProcessItAsked(t *testing.T) {
	first := exec.Command("sleep", "300")
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	t.Cleanup(func() { _ = first.Process.Kill(); <-gone })
	go func() { _ = first.Wait(); close(gone) }()
	var pid atomic.Int64
	pid.Store(int64(first.Process.Pid))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(api.Status{PID: int(pid.Load())})
	})
	mux.HandleFunc("POST /v1/daemon/stop", func(w http.ResponseWriter, _ *http.Request) {
		pid.Store(int64(os.Getpid())) // from here on, the other daemon answers
		w.WriteHeader(http.StatusNoContent)
		go func() { _ = first.Process.Kill() }()
	})
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })

	ctx := guard.Context(t)
	var said bytes.Buffer
	a := &cli.App{Stdout: io.Discard, Stderr: &said, Socket: socket}
	if err := daemonStop(ctx, a, false); err != nil {
		t.Fatal(err)
	}
	select {
	case <-gone:
	case <-ctx.Done():
		t.Error("the process still runs")
	}
	if !strings.Contains(said.String(), "another one has been started since") {
		t.Errorf("said %q", said.String())
	}
}

// If another user may have created the runtime directory, no daemon is looked for there.
func TestRuntimeFolderIsCheckedBeforeStop(t *testing.T) {
	home, other := t.TempDir(), t.TempDir()
	t.Setenv("AGENTLAB_HOME", home)
	if err := os.Symlink(other, filepath.Join(home, "run")); err != nil {
		t.Fatal(err)
	}
	a := &cli.App{Stdout: io.Discard, Stderr: io.Discard}
	for name, err := range map[string]error{
		"stop":   daemonStop(t.Context(), a, false),
		"status": daemonStatus(t.Context(), a),
	} {
		if agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("%s: got %v, want denied", name, err)
		}
	}
	if left, _ := os.ReadDir(other); len(left) != 0 {
		t.Errorf("written through the link: %v", left)
	}
}
