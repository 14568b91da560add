package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// A log stream that breaks while the job runs is resumed where it broke, and
// the log is copied to the job's end.
func TestFollowedLogIsResumed(t *testing.T) {
	const id, first, second = "job-aaaaaaaaaaaaa", "one\n", "two\n"
	var broken, resumed atomic.Bool
	ended := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/jobs/"+id, func(w http.ResponseWriter, _ *http.Request) {
		status := agentlab.JobRunning
		if isClosed(ended) {
			status = agentlab.JobCompleted
		}
		_ = json.NewEncoder(w).Encode(api.Job{ID: id, Status: string(status)})
	})
	mux.HandleFunc("GET /v1/jobs/"+id+"/log", func(w http.ResponseWriter, r *http.Request) {
		if !broken.Swap(true) {
			_, _ = fmt.Fprint(w, first)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		rest := (first + second)[len(first):]
		if r.URL.Query().Get("offset") != fmt.Sprint(len(first)) {
			rest = ""
		}
		if !resumed.Swap(true) {
			_, _ = fmt.Fprint(w, rest)
			close(ended)
		}
	})
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-ended:
			_, _ = fmt.Fprintf(w, "id: 1\nevent: event\ndata: {\"id\":1,\"kind\":%q,\"job_id\":%q}\n\n", agentlab.EventJobStatus, id)
			_ = http.NewResponseController(w).Flush()
		case <-r.Context().Done():
		}
		<-r.Context().Done()
	})
	mux.HandleFunc("GET /v1/egress", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	socket := serveAPI(t, mux)
	var out, errs bytes.Buffer
	a := &App{Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Now: time.Now}
	if code := a.Run(t.Context(), []string{"--socket", socket, "job", "logs", "--follow", id}); code != exitOK || out.String() != first+second {
		t.Errorf("exit code %d, log %q, errors %q", code, out.String(), errs.String())
	}
}

// serveAPI serves an API on a socket, which it returns.
func serveAPI(t *testing.T, h http.Handler) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket) //nolint:noctx // it does not block
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: h}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return socket
}
