package jobcmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
	"github.com/agentlab-vm/agentlab/test/guard"
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
	socket := worktest.ServeAPI(t, mux)
	var out, errs bytes.Buffer
	a := &cli.App{Commands: Commands(), Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Now: time.Now}
	if code := a.Run(t.Context(), []string{"--socket", socket, "job", "logs", "--follow", id}); code != cli.ExitOK || out.String() != first+second {
		t.Errorf("exit code %d, log %q, errors %q", code, out.String(), errs.String())
	}
}

// followed runs 'job logs --follow' of a job that ends when the first request for
// its log arrives, which log answers, and returns the exit code and what is on
// standard error. Without events, those and the denials are refused.
func followed(t *testing.T, out io.Writer, idle time.Duration, events bool, log http.HandlerFunc) (int, string) {
	t.Helper()
	const id = "job-aaaaaaaaaaaaa"
	var ended atomic.Bool
	changeRequest := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/jobs/"+id, func(w http.ResponseWriter, _ *http.Request) {
		status := agentlab.JobRunning
		if ended.Load() {
			status = agentlab.JobCompleted
		}
		_ = json.NewEncoder(w).Encode(api.Job{ID: id, Status: string(status)})
	})
	mux.HandleFunc("GET /v1/jobs/"+id+"/log", func(w http.ResponseWriter, r *http.Request) {
		if !ended.Swap(true) {
			close(changeRequest)
		}
		log(w, r)
	})
	stream := func(w http.ResponseWriter, r *http.Request) {
		if !events {
			worktest.Refuse(w, agentlab.CodeDenied, http.StatusForbidden)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_ = http.NewResponseController(w).Flush()
		if r.URL.Path == "/v1/events" {
			select {
			case <-changeRequest:
				_, _ = fmt.Fprintf(w, "id: 1\nevent: event\ndata: {\"id\":1,\"kind\":%q,\"job_id\":%q}\n\n", agentlab.EventJobStatus, id)
				_ = http.NewResponseController(w).Flush()
			case <-r.Context().Done():
			}
		}
		<-r.Context().Done()
	}
	mux.HandleFunc("GET /v1/events", stream)
	mux.HandleFunc("GET /v1/egress", stream)
	ctx := guard.Context(t)
	var errs bytes.Buffer
	a := &cli.App{Commands: Commands(), Stdin: strings.NewReader(""), Stdout: out, Stderr: &errs, Now: time.Now, LogIdle: idle}
	code := a.Run(ctx, []string{"--socket", worktest.ServeAPI(t, mux), "job", "logs", "--follow", id})
	return code, errs.String()
}

// After the job's end, a log is read on for as long as bytes arrive.
func TestSlowLogIsReadToItsEnd(t *testing.T) {
	t.Parallel()
	const lines, pause, idle = 110, 100 * time.Millisecond, 10 * time.Second
	var out bytes.Buffer
	code, errs := followed(t, &out, idle, true, func(w http.ResponseWriter, r *http.Request) {
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for range lines {
			select {
			case <-tick.C:
			case <-r.Context().Done():
				return
			}
			_, _ = fmt.Fprintln(w, "line")
			_ = http.NewResponseController(w).Flush()
		}
	})
	if got := strings.Count(out.String(), "line\n"); code != cli.ExitOK || got != lines {
		t.Errorf("exit code %d, %d lines of %d, errors %q", code, got, lines, errs)
	}
}

// The rest of a log that does not arrive is an error.
func TestLostLogIsAnError(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	code, errs := followed(t, &out, 5*time.Second, true, func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintln(w, "one")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	if code != cli.ExitFailure || out.String() != "one\n" || !strings.Contains(errs, "the log was cut off: the job has ended") || !strings.Contains(errs, "→ agentlab job logs job-") {
		t.Errorf("exit code %d, log %q, errors %q", code, out.String(), errs)
	}
}

// A log that cannot be written, and one that the daemon refuses, are errors at
// once.
func TestFollowedLogFails(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = full.Close() }()
	for _, tt := range []struct {
		name string
		out  io.Writer
		log  http.HandlerFunc
		want string
	}{
		{"full disk", full, func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "one") }, "no space left on device"},
		{"refused", io.Discard, func(w http.ResponseWriter, _ *http.Request) {
			worktest.Refuse(w, agentlab.CodeNotFound, http.StatusNotFound)
		}, "the log was cut off: refused"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var calls atomic.Int64
			code, errs := followed(t, tt.out, 0, true, func(w http.ResponseWriter, r *http.Request) {
				calls.Add(1)
				tt.log(w, r)
			})
			if code != cli.ExitFailure || calls.Load() != 1 || !strings.Contains(errs, tt.want) {
				t.Errorf("exit code %d after %d requests, errors %q", code, calls.Load(), errs)
			}
		})
	}
}

// A caller that may read the job, but neither events nor denials, follows its
// log to the end.
func TestLogIsFollowedWithoutEvents(t *testing.T) {
	var out bytes.Buffer
	code, errs := followed(t, &out, 0, false, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("offset") == "" {
			_, _ = fmt.Fprintln(w, "one")
		}
	})
	if code != cli.ExitOK || out.String() != "one\n" || errs != "job job-aaaaaaaaaaaaa COMPLETED\n" {
		t.Errorf("exit code %d, log %q, errors %q", code, out.String(), errs)
	}
}

// The last event of a job is shown although the job had ended before the first
// one was read.
func TestLastEventOfJobIsShown(t *testing.T) {
	const id = "job-aaaaaaaaaaaaa"
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/jobs/"+id, func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(api.Job{ID: id, Status: string(agentlab.JobCompleted)})
	})
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i, status := range []agentlab.JobStatus{agentlab.JobRunning, agentlab.JobCompleted} {
			_, _ = fmt.Fprintf(w, "id: %[1]d\nevent: event\ndata: {\"id\":%[1]d,\"kind\":%[2]q,\"job_id\":%[3]q,\"data\":{\"status\":%[4]q}}\n\n",
				i+1, agentlab.EventJobStatus, id, status)
		}
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	ctx := guard.Context(t)
	a := &cli.App{Commands: Commands(), Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard, Now: time.Now}
	var shown []int64
	j, err := FollowJob(ctx, a, client.New(worktest.ServeAPI(t, mux)), client.EventQuery{JobID: id}, func(e api.Event) { shown = append(shown, e.ID) })
	if err != nil || j.Status != string(agentlab.JobCompleted) || !slices.Equal(shown, []int64{1, 2}) {
		t.Errorf("%+v, %v; shown: %v", j, err, shown)
	}
}
