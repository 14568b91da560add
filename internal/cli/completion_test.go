package cli

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
)

// Several builds of an image have the same name, which is completed once.
func TestCompletionOffersEachNameOnce(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(api.List[api.Image]{Items: []api.Image{
			{Name: "base", Digest: "a"}, {Name: "agents", Digest: "b"}, {Name: "base", Digest: "c"},
		}})
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	a := &App{Stdout: io.Discard, Stderr: io.Discard, Socket: socket}
	if got, want := a.Names(t.Context(), "", listImages), []string{"base", "agents"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
