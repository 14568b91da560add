package session

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
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
		a := worktest.UI{Out: &out}
		noteUnfinished(a, api.Session{Name: "app"}, c.err)
		if got := out.String(); !strings.Contains(got, c.want) || c.want == "" && got != "" {
			t.Errorf("%v: %q", c.err, got)
		}
	}
}

func TestNoteHost(t *testing.T) {
	var out bytes.Buffer
	a := worktest.UI{Out: &out}
	noteHost(a, []api.Finding{{Name: "disk", Level: "ok", Detail: "enough"}})
	if out.Len() > 0 {
		t.Errorf("a good host: %q", &out)
	}
	noteHost(a, []api.Finding{{Name: "disk", Level: "ok", Detail: "enough"}, {Name: "cpu", Level: "warn", Detail: "emulated"}})
	if want := "note: the check of the host found: cpu: emulated\n  → agentlab status\n"; out.String() != want {
		t.Errorf("%q, want %q", &out, want)
	}
}
