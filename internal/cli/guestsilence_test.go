package cli

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
	"github.com/agentlab-vm/agentlab/test/guard"
)

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
		r := session.Repo{C: worktest.HandlerClient(t, test.handler), Sandbox: "7", Path: w.user, Silence: test.limits}
		if _, err := r.State(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: state: %v", name, err)
		}
		err := r.Fetch(t.Context(), []string{"trunk"}, true, "", func(*gitsafe.Bundle) error { return nil })
		if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: fetch: %v", name, err)
		}
	}
}
