package session

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// The user's name is used if the user says so, which is asked once, on a terminal.
func TestIdentityIsAskedOnce(t *testing.T) {
	for answer, want := range map[string]string{"y": "Ada", "n": ""} {
		repo, home := worktest.Repo(t), t.TempDir()
		t.Setenv("HOME", home)
		if err := os.WriteFile(filepath.Join(home, ".gitconfig"), []byte("[user]\nname = Ada\nemail = ada@example.com\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		a := worktest.Asking{UI: worktest.UI{Out: &out}, Answer: func(question string) string {
			if !strings.HasSuffix(question, "Ada <ada@example.com>, instead of \"AgentLab agent\"? [y/N] ") {
				t.Errorf("asked %q", question)
			}
			return answer
		}}
		ask := func(l Link) (o StartOptions) {
			if err := askIdentity(t.Context(), a, l, &o); err != nil {
				t.Fatal(err)
			}
			return o
		}
		if o := ask(Link{Path: repo, Session: "app"}); o.userName != "" || out.Len() > 0 {
			t.Errorf("a session that exists: %+v, %s", o, out.String())
		}
		for range 2 {
			if o := ask(Link{Path: repo}); o.userName != want || (o.userEmail != "") != (want != "") {
				t.Errorf("%q: %+v", answer, o)
			}
		}
		if n := strings.Count(out.String(), "[y/N]"); n != 1 {
			t.Errorf("asked %d times", n)
		}
	}
}

// Without a terminal nothing is asked or stored, and the agent has an identity of its own.
func TestIdentityWithoutTerminal(t *testing.T) {
	repo := worktest.Repo(t)
	worktest.Git(t, repo, "config", "user.name", "Ada")
	worktest.Git(t, repo, "config", "user.email", "ada@example.com")
	a := worktest.UI{Out: io.Discard}
	for policy, want := range map[string]string{"": "", "agent": "", "user": "Ada"} {
		if policy != "" {
			worktest.Git(t, repo, "config", "agentlab.identity", policy)
		}
		var o StartOptions
		if err := askIdentity(t.Context(), a, Link{Path: repo}, &o); err != nil || o.userName != want {
			t.Errorf("%q: %+v, %v", policy, o, err)
		}
		if policy != "" {
			worktest.Git(t, repo, "config", "--unset", "agentlab.identity")
		}
	}
	worktest.Git(t, repo, "config", "agentlab.identity", "me")
	if err := askIdentity(t.Context(), a, Link{Path: repo}, &StartOptions{}); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("an unknown value: %v", err)
	}
}
