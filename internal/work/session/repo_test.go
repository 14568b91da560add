package session

import (
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"net/http"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// Each command for the repository of a session says what it waits for.
func TestSlowCommandsSayWhatTheyWaitFor(t *testing.T) {
	a := worktest.UI{Out: io.Discard}
	var said []string
	ended := 0
	r := Repo{Sandbox: "1", Slow: func(what string) func() {
		said = append(said, what)
		return func() { ended++ }
	}}
	r.C = worktest.CommandClient(t, func(command []string, in []byte) ([]byte, string, int) {
		if verb := command[2]; verb == "receive" {
			return []byte(`{"errors":{}}`), "", 0
		}
		return nil, "", 0
	})
	for verb := range slowWork {
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
	if _, err := r.Push(t.Context(), Pushed{Bundle: bundle}, nil, a.Meter()); err != nil {
		t.Error(err)
	}
	if slices.Sort(said); !slices.Equal(said, slices.Sorted(maps.Values(slowWork))) || ended < len(said) {
		t.Errorf("commands say %q, and %d have ended", said, ended)
	}
}

// 'agentlab sync' and 'diff' do not wait for ever for a guest.
func TestRepositoryOfASilentGuest(t *testing.T) {
	w := newSessionWorld(t)
	lives := func(conn io.Writer) { _ = stream.NewWriter(conn).JSON(stream.Exit, stream.ExitStatus{}) }
	for name, test := range map[string]struct {
		handler http.HandlerFunc
		limits  guestrun.Silence
		want    string
	}{
		"nothing answers":       {worktest.SilentGuest(t, false, nil), guestrun.Silence{Quiet: time.Millisecond, Answer: time.Millisecond, Most: guard.Patience}, "does not answer"},
		"no command answers":    {worktest.SilentGuest(t, true, nil), guestrun.Silence{Quiet: time.Millisecond, Answer: time.Millisecond, Most: guard.Patience}, "does not answer"},
		"only this one is mute": {worktest.SilentGuest(t, true, lives), guestrun.Silence{Quiet: time.Millisecond, Answer: guard.Patience, Most: 20 * time.Millisecond}, "makes no progress"},
	} {
		r := Repo{C: worktest.HandlerClient(t, test.handler), Sandbox: "7", Path: w.user, Silence: test.limits}
		if _, err := r.State(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: state: %v", name, err)
		}
		err := r.Fetch(t.Context(), []string{"trunk"}, true, "", func(*gitsafe.Bundle) error { return nil })
		if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: fetch: %v", name, err)
		}
	}
}
