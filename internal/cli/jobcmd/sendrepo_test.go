package jobcmd

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
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
	srv := &http.Server{Handler: mux}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	var notes bytes.Buffer
	a := &cli.App{Stdout: io.Discard, Stderr: &notes}
	f := &RunFlags{Repo: worktest.Repo(t), Req: api.JobCreate{Task: "x", Agent: "shell"}}
	if err := jobRun(ctx, a, client.New(socket), f); err == nil {
		t.Fatal("the interrupted command succeeded")
	}
	mu.Lock()
	defer mu.Unlock()
	want := []string{"POST /v1/jobs/validate", "POST /v1/bundles", "POST /v1/jobs", "DELETE /v1/bundles/bundle-x"}
	if !slices.Equal(calls, want) {
		t.Errorf("calls are %q, want %q; %s", calls, want, notes.String())
	}
}

// A job has the revision that the user asked for as its ref, unless a guest
// would take that for another commit.
func TestShownRef(t *testing.T) {
	t.Parallel()
	repo := worktest.Repo(t)
	first := worktest.Git(t, repo, "rev-parse", "HEAD")
	worktest.Git(t, repo, "commit", "-q", "--allow-empty", "-m", "second")
	worktest.Git(t, repo, "tag", "deadbeef00", first)
	worktest.Git(t, repo, "branch", "cafe0000", first)
	worktest.Git(t, repo, "tag", "-a", "-m", "annotated", "v1", first)
	annotated := worktest.Git(t, repo, "rev-parse", "v1")
	for ref, want := range map[string]string{
		"": "trunk", "HEAD~1": "HEAD~1", "trunk": "trunk", "v1": "v1", "HEAD^{/sec}": "HEAD^{/sec}", first: first, first[:9]: first[:9],
		"deadbeef00": "refs/tags/deadbeef00", "cafe0000": "refs/heads/cafe0000", annotated: first, "HEAD" + strings.Repeat("~0", 150) + "~1": first,
	} {
		src, err := gitsafe.FindCommit(t.Context(), repo, ref)
		if err != nil {
			t.Errorf("%s: %v", ref, err)
			continue
		}
		if got := src.Shown(t.Context(), ref); got != want || agentlab.ValidateRevision(got) != nil {
			t.Errorf("%q is shown as %q, want %q", ref, got, want)
		}
	}
}
