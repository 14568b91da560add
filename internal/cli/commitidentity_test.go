package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// The user's name is used if the user says so, which is asked once, on a terminal.
func TestIdentityIsAskedOnce(t *testing.T) {
	for answer, want := range map[string]string{"y\n": "Ada", "n\n": ""} {
		repo, home := worktest.Repo(t), t.TempDir()
		t.Setenv("HOME", home)
		if err := os.WriteFile(filepath.Join(home, ".gitconfig"), []byte("[user]\nname = Ada\nemail = ada@example.com\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		ptmx, tty, err := pty.Open()
		if err != nil {
			t.Fatal(err)
		}
		stderr := answering{when: map[string]string{"Ada <ada@example.com>, instead of \"AgentLab agent\"? [y/N] ": answer}, send: func(s string) { _, _ = ptmx.WriteString(s) }}
		a := App{Stdin: tty, Stdout: &bytes.Buffer{}, Stderr: &stderr}
		ask := func(l session.Link) (o startOptions) {
			if err := a.askIdentity(t.Context(), l, &o); err != nil {
				t.Fatal(err)
			}
			return o
		}
		if o := ask(session.Link{Path: repo, Session: "app"}); o.userName != "" || stderr.buf.Len() > 0 {
			t.Errorf("a session that exists: %+v, %s", o, stderr.buf.String())
		}
		for range 2 {
			if o := ask(session.Link{Path: repo}); o.userName != want || (o.userEmail != "") != (want != "") {
				t.Errorf("%q: %+v", answer, o)
			}
		}
		if n := strings.Count(stderr.buf.String(), "[y/N]"); n != 1 {
			t.Errorf("asked %d times", n)
		}
		_, _ = ptmx.Close(), tty.Close()
	}
}

// Without a terminal nothing is asked or stored, and the agent has an identity of its own.
func TestIdentityWithoutTerminal(t *testing.T) {
	repo := worktest.Repo(t)
	worktest.Git(t, repo, "config", "user.name", "Ada")
	worktest.Git(t, repo, "config", "user.email", "ada@example.com")
	a := App{Stdin: strings.NewReader("y\n"), Stderr: &bytes.Buffer{}}
	for policy, want := range map[string]string{"": "", "agent": "", "user": "Ada"} {
		if policy != "" {
			worktest.Git(t, repo, "config", "agentlab.identity", policy)
		}
		var o startOptions
		if err := a.askIdentity(t.Context(), session.Link{Path: repo}, &o); err != nil || o.userName != want {
			t.Errorf("%q: %+v, %v", policy, o, err)
		}
		if policy != "" {
			worktest.Git(t, repo, "config", "--unset", "agentlab.identity")
		}
	}
	worktest.Git(t, repo, "config", "agentlab.identity", "me")
	if err := a.askIdentity(t.Context(), session.Link{Path: repo}, &startOptions{}); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("an unknown value: %v", err)
	}
}
