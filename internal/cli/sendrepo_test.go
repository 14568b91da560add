package cli

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// A user who interrupts the command while the job is being asked for leaves
// no bundle at the daemon.
func TestInterruptedRunDeletesItsBundle(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	var mu sync.Mutex
	var calls []string
	mux := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		calls = append(calls, r.Method+" "+r.URL.Path)
		mu.Unlock()
		switch r.URL.Path {
		case "/v1/bundles":
			_, _ = io.Copy(io.Discard, r.Body)
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, `{"bundle_id":"bundle-x","size":1,"sha256":""}`)
		case "/v1/jobs":
			interrupt()
			<-r.Context().Done()
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	})
	socket := filepath.Join(t.TempDir(), "s")
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: mux} //nolint:gosec // a test
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	var notes bytes.Buffer
	a := &App{Stdout: io.Discard, Stderr: &notes}
	f := &jobRunFlags{repo: sampleRepo(t), req: api.JobCreate{Task: "x", Agent: "shell"}}
	if err := a.jobRun(ctx, client.New(socket), f); err == nil {
		t.Fatal("the interrupted command succeeded")
	}
	mu.Lock()
	defer mu.Unlock()
	want := []string{"POST /v1/jobs/validate", "POST /v1/bundles", "POST /v1/jobs", "DELETE /v1/bundles/bundle-x"}
	if !slices.Equal(calls, want) {
		t.Errorf("calls are %q, want %q; %s", calls, want, notes.String())
	}
}
