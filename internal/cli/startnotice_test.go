package cli

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// A start that was interrupted, or that lost its daemon, says what remains.
func TestUnfinishedStart(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{context.Canceled, "→ stop it: agentlab stop app"},
		{agentlab.Errorf(agentlab.CodeUnavailable, "no daemon is running"), "→ continue: agentlab start"},
		{agentlab.Errorf(agentlab.CodeInvalid, "x"), ""},
	} {
		var out bytes.Buffer
		a := &App{Stderr: &out}
		a.noteUnfinished(api.Session{Name: "app"}, c.err)
		if got := out.String(); !strings.Contains(got, c.want) || c.want == "" && got != "" {
			t.Errorf("%v: %q", c.err, got)
		}
	}
}

func TestNoteHost(t *testing.T) {
	var out bytes.Buffer
	a := &App{Stderr: &out}
	a.noteHost([]api.Finding{{Name: "disk", Level: levelOK, Detail: "enough"}})
	if out.Len() > 0 {
		t.Errorf("a good host: %q", &out)
	}
	a.noteHost([]api.Finding{{Name: "disk", Level: levelOK, Detail: "enough"}, {Name: "cpu", Level: "warn", Detail: "emulated"}})
	if want := "note: the check of the host found: cpu: emulated\n  → agentlab status\n"; out.String() != want {
		t.Errorf("%q, want %q", &out, want)
	}
}
