package session

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/sessioncmd"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// realGuest is a guest that runs 'agentlab-agent session' with the repository of a world.
type realGuest struct {
	w       *sessionWorld
	guest   sessioncmd.Guest
	calls   []string
	applies func(guestapi.SessionApply) // sees each; may be nil
	repo    guestFunc                   // answers 'agentlab-agent repo'
}

func (w *sessionWorld) realGuest() *realGuest {
	return &realGuest{w: w, repo: w.real, guest: sessioncmd.Guest{Repo: w.guest, Home: w.TempDir()}}
}

// Repo returns the repository of the session.
func (g *realGuest) Repo() Repo {
	c := worktest.CommandClient(g.w.T, func(command []string, in []byte) ([]byte, string, int) {
		g.calls = append(g.calls, strings.Join(command[1:3], " "))
		if command[1] != "session" {
			return g.repo(command[2], in)
		}
		if line, _, _ := bytes.Cut(in, []byte("\n")); command[2] == "apply" && g.applies != nil {
			var a guestapi.SessionApply
			if err := json.Unmarshal(line, &a); err != nil {
				g.w.Error(err)
			}
			g.applies(a)
		}
		var out, errOut bytes.Buffer
		if err := g.guest.Run(command[2:], bytes.NewReader(in), &out, &errOut); err != nil {
			return out.Bytes(), errOut.String() + "agentlab-agent: " + err.Error(), 1
		}
		return out.Bytes(), errOut.String(), 0
	})
	return Repo{C: c, Sandbox: "1", Path: g.w.user}
}

// send is the part of a start after the sandbox runs.
func (g *realGuest) send(src gitsafe.LocalCommit, o StartOptions, out *outgoing) error {
	ctx, r := g.w.Context(), g.Repo()
	l := Link{Path: g.w.user, Remote: remoteName}
	init, err := repoInit(ctx, r.Path, src, o)
	if err != nil {
		return err
	}
	has, _, err := r.prepare(ctx, guestapi.SessionPrepare{Init: init})
	if err != nil {
		return err
	}
	head := startHead{LocalCommit: src}
	if len(has.State.Branches) == 0 {
		done, err := packFirst(ctx, g.w.app, l, &head)
		if err != nil {
			return err
		}
		defer done()
	}
	if out.envDir, err = out.addWorktree(ctx, r.Path, has.State, o.Worktree, src); err != nil {
		return err
	}
	_, err = sendCode(ctx, g.w.app, r, l, head, has.State, o, out)
	return err
}

// A first start brings commits, uncommitted changes, a work tree, dotfiles and environment
// files, in two calls, or three with changes; a start with nothing new needs one.
func TestStartInFewCalls(t *testing.T) {
	t.Parallel()
	for _, changes := range []bool{false, true} {
		w := newSessionWorld(t)
		w.guest = filepath.Join(t.TempDir(), "new")
		worktest.Put(t, w.user, map[string]string{"app/.env": "A=1", transfer.IgnoreFile: transfer.IgnoreFile + "\n"})
		if changes {
			worktest.Put(t, w.user, map[string]string{"a.txt": "changed"})
		}
		g := w.realGuest()
		g.guest.Environment = func(e guestapi.SessionEnvironment) (guestapi.Environment, error) {
			return guestapi.Environment{Contained: e.Devcontainer == "on"}, nil
		}
		g.guest.SetUp = func(_ guestapi.SetupRun, out io.Writer) error {
			_, err := io.WriteString(out, "a compile error\n")
			return errors.Join(err, errors.New("make failed"))
		}
		names, env, err := transfer.PackEnvFiles(t.Context(), w.user)
		if err != nil {
			t.Fatal(err)
		}
		src, err := gitsafe.FindCommit(t.Context(), w.user, "")
		if err != nil {
			t.Fatal(err)
		}
		out := &outgoing{envNames: names, env: env, environment: &guestapi.SessionEnvironment{Devcontainer: "on"}, setup: &guestapi.SetupRun{Commands: []string{"make"}}}
		o := StartOptions{WithChanges: changes, Worktree: "fix"}
		if err := g.send(src, o, out); err != nil {
			t.Fatal(err)
		}
		want := "session prepare, session apply"
		if changes {
			want += ", session apply"
		}
		if got := strings.Join(g.calls, ", "); got != want {
			t.Errorf("changes %t: calls %s, not %s", changes, got, want)
		}
		for name, text := range map[string]string{"app/.env": "", ".worktrees/fix/app/.env": "A=1", ".worktrees/fix/a.txt": "one\n"} {
			if got, _ := os.ReadFile(filepath.Join(w.guest, name)); string(got) != text {
				t.Errorf("%s is %q", name, got)
			}
		}
		for _, note := range []string{"sent 1 environment file: app/.env\n", "starting the environment", "agents run in the dev container", "a compile error\n", "setup in .agentlab.yaml failed: make failed"} {
			if !strings.Contains(w.notes.String(), note) {
				t.Errorf("no %q in %s", note, &w.notes)
			}
		}
		if got := worktest.Git(t, w.guest, "rev-parse", "refs/heads/fix"); got != src.Commit {
			t.Errorf("the new branch is at %s", got)
		}
		g.calls = nil
		if err := g.send(src, StartOptions{Worktree: "fix"}, &outgoing{}); err != nil || len(g.calls) != 1 {
			t.Errorf("a second start: %v, calls %q", err, g.calls)
		}
	}
}

// What a guest answers to 'agentlab-agent session apply' is checked as the answers to the
// commands for the repository are.
func TestHostileApply(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	src, err := gitsafe.FindCommit(t.Context(), w.user, "")
	if err != nil {
		t.Fatal(err)
	}
	begin, received, done := `{"begin":"receive"}`+"\n", `{"received":{"errors":{}}}`+"\n", `{"done":true}`+"\n"
	setup := `{"begin":"setup"}` + "\n"
	for name, answer := range map[string]string{
		"no end":             begin + received + setup,
		"after the end":      begin + received + setup + done + done,
		"nothing done":       done,
		"a step left out":    begin + received + done,
		"nothing received":   begin + setup + done,
		"received twice":     begin + received + received + setup + done,
		"a step twice":       begin + received + begin + setup + done,
		"a step too much":    begin + received + `{"begin":"env"}` + "\n" + setup + done,
		"a result elsewhere": begin + received + setup + received + done,
		"failed twice":       begin + received + setup + strings.Repeat(`{"setup_failed":"x"}`+"\n", 2) + done,
		"no JSON":            "x\n",
		"bad branch":         begin + `{"received":{"errors":{}},"state":{"branches":{"a..b":"` + src.Commit + `"},"worktrees":[{"dir":""}]}}` + "\n" + setup + done,
		"bad work tree":      begin + `{"received":{"errors":{}},"state":{"branches":{},"worktrees":[{"dir":""},{"dir":"../x"}]}}` + "\n" + setup + done,
		"endless line":       strings.Repeat("x", guestapi.MaxRepoState+1),
		"":                   begin + received + setup + `{"setup_failed":"\u001b]0;x\u0007` + strings.Repeat("y", 10000) + `"}` + "\n" + done,
	} {
		w.notes.Reset()
		c := worktest.CommandClient(t, func([]string, []byte) ([]byte, string, int) { return []byte(answer), "", 0 })
		r := Repo{C: c, Sandbox: "1", Path: w.user}
		got, err := r.apply(t.Context(), w.app, &outgoing{push: Pushed{Checkout: "trunk"}, setup: &guestapi.SetupRun{Commands: []string{"make"}}})
		switch {
		case name != "" && agentlab.CodeOf(err) != agentlab.CodeDenied:
			t.Errorf("%s: %v", name, err)
		case name == "" && (err != nil || strings.Contains(w.notes.String(), "\x1b") || len(got.setupFailed) > maxSetupReason+len("…")):
			t.Errorf("a setup that failed: %v, %q", err, &w.notes)
		}
	}
}

// Without its work tree a start fails and names the branch that stands in the way.
func TestWorktreeThatCannotBePushed(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	worktest.Git(t, w.guest, "checkout", "-q", "-b", "fix/more")
	src, err := gitsafe.FindCommit(t.Context(), w.user, "")
	if err != nil {
		t.Fatal(err)
	}
	err = w.realGuest().send(src, StartOptions{Worktree: "fix"}, &outgoing{})
	if agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.HasPrefix(err.Error(), "branch fix cannot be pushed to the session: ") {
		t.Error(err)
	}
	if strings.Contains(w.notes.String(), "is not updated") {
		t.Errorf("said twice: %s", &w.notes)
	}
}

// Uncommitted changes that a session has got are recorded as carried, also if a later step
// fails: the next start does not deny them.
func TestCarriedAlthoughALaterStepFails(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	w.guest = filepath.Join(t.TempDir(), "new")
	worktest.Put(t, w.user, map[string]string{"a.txt": "changed"})
	src, err := gitsafe.FindCommit(t.Context(), w.user, "")
	if err != nil {
		t.Fatal(err)
	}
	g := w.realGuest()
	g.guest.Environment = func(guestapi.SessionEnvironment) (guestapi.Environment, error) {
		return guestapi.Environment{}, errors.New("no Docker")
	}
	out := &outgoing{environment: &guestapi.SessionEnvironment{}}
	if err := g.send(src, StartOptions{WithChanges: true}, out); err == nil || !strings.Contains(err.Error(), "no Docker") {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(filepath.Join(w.guest, "a.txt")); string(got) != "changed" {
		t.Errorf("a.txt is %q", got)
	}
	w.notes.Reset()
	if _, err := carriedChanges(t.Context(), w.app, &Link{Path: w.user, Remote: remoteName}, StartOptions{}); err != nil || w.notes.Len() > 0 {
		t.Errorf("%v, %s", err, &w.notes)
	}
}
