package cli

import (
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// Each command for the repository of a session says what it waits for.
func TestSlowCommandsSayWhatTheyWaitFor(t *testing.T) {
	a := &App{Stderr: io.Discard}
	var said []string
	ended := 0
	r := session.Repo{Sandbox: "1", Slow: func(what string) func() {
		said = append(said, what)
		return func() { ended++ }
	}}
	r.C = worktest.CommandClient(t, func(command []string, in []byte) ([]byte, string, int) {
		if verb := command[2]; verb == "receive" {
			return []byte(`{"errors":{}}`), "", 0
		}
		return nil, "", 0
	})
	for verb := range session.SlowWork {
		if verb != "receive" {
			if err := r.Call(t.Context(), nil, io.Discard, verb); err != nil {
				t.Error(verb, err)
			}
		}
	}
	bundle, err := os.Create(filepath.Join(t.TempDir(), "bundle"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bundle.Close() }()
	if _, err := r.Push(t.Context(), session.Pushed{Bundle: bundle}, nil, a.Meter()); err != nil {
		t.Error(err)
	}
	if slices.Sort(said); !slices.Equal(said, slices.Sorted(maps.Values(session.SlowWork))) || ended < len(said) {
		t.Errorf("commands say %q, and %d have ended", said, ended)
	}
}
