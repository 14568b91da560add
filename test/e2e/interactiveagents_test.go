package e2e

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/test/fakellm"
)

// onTerminal is a command of the user on a terminal.
type onTerminal struct {
	l   *lab
	cmd *exec.Cmd
	tty *os.File
	// done is closed when the output has ended.
	done chan struct{}
	out  bounded.Tail
}

// terminal starts agentlab on a terminal, in a repository, and drops its output.
func (l *lab) terminal(repo string, args ...string) *onTerminal {
	l.Helper()
	o := l.terminalTo(repo, args...)
	o.drain()
	return o
}

// drain reads and drops the rest of the output.
func (o *onTerminal) drain() {
	go func() {
		defer close(o.done)
		_, _ = io.Copy(&o.out, o.tty) // ends with an error when the other side closes
	}()
}

// terminalTo starts agentlab on a terminal, whose output the caller reads.
func (l *lab) terminalTo(repo string, args ...string) *onTerminal {
	l.Helper()
	// Otherwise a new session asks whose name its commits have.
	_ = exec.Command("git", "-C", repo, "config", "agentlab.identity", "agent").Run() // no repository: nothing is asked
	ctx, cancel := context.WithTimeout(context.Background(), terminalLimit)
	l.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, filepath.Join(l.bin, "agentlab"), args...)
	cmd.Dir, cmd.Env = repo, append(l.env, "TERM=xterm-256color", "COLORTERM=truecolor")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 40, Cols: 120})
	if err != nil {
		l.Fatal(err)
	}
	o := &onTerminal{l: l, cmd: cmd, tty: tty, done: make(chan struct{}), out: bounded.Tail{Max: 4 << 10}}
	l.Cleanup(func() { _ = tty.Close() })
	return o
}

// until reads the output, which nothing drains, until it has a text. It returns what it
// read.
func (o *onTerminal) until(text string) string {
	o.l.Helper()
	var seen bytes.Buffer
	for buf := make([]byte, 32<<10); !bytes.Contains(seen.Bytes(), []byte(text)); {
		n, err := o.tty.Read(buf)
		if err != nil {
			o.l.Fatalf("%v: no %q in %q", o.cmd.Args[1:], text, seen.String())
		}
		seen.Write(buf[:n])
	}
	return seen.String()
}

func (o *onTerminal) keys(text string) {
	o.l.Helper()
	if _, err := o.tty.WriteString(text); err != nil {
		o.l.Fatal(err)
	}
}

// detach leaves the terminal with Ctrl-] and expects success.
func (o *onTerminal) detach() {
	o.l.Helper()
	o.keys("\x1d")
	<-o.done
	if err := o.cmd.Wait(); err != nil {
		o.l.Errorf("%v ended with %v", o.cmd.Args[1:], err)
	}
}

// screen returns what a terminal in a sandbox shows.
func (l *lab) screen(session, terminal string) string {
	l.Helper()
	r := l.run("", "exec", l.sandboxOf(session), "--", "tmux", "-L", "agentlab", "capture-pane", "-p", "-t", "="+terminal+":")
	return r.stdout + r.stderr
}

// dialogs are words of the questions of agents that must not appear.
var dialogs = []string{"trust this folder", "Trust this folder", "Do you trust", "Choose the text style", "Select login method", "Detected a custom API key", "Sign in with", "Yes, I accept", "Make auto mode", "How would you like to authenticate"}

// shows waits until the screen has a text, and fails if it has a question.
func (l *lab) shows(session, terminal, want string) {
	l.Helper()
	var got string
	if !eventually(settleLimit, func() bool {
		got = l.screen(session, terminal)
		return strings.Contains(got, want) || hasDialog(got) != ""
	}) || hasDialog(got) != "" {
		l.Fatalf("no %q on the screen (question: %q):\n%s", want, hasDialog(got), got)
	}
}

func hasDialog(screen string) string {
	for _, d := range dialogs {
		if strings.Contains(screen, d) {
			return d
		}
	}
	return ""
}

// Real coding agents work on a terminal without a question (seed 004, user story 1,
// scenario 3, SC-002). Two of them work in two work trees, each with a server for
// development. After everything was killed, both continue with their work and their
// conversation.
func TestInteractiveAgents(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	llm := fakellm.New(agentScript...)
	n.HandleHTTP("llm.example.com", 80, llm)
	for k, v := range map[string]string{
		"env.ANTHROPIC_BASE_URL": "http://llm.example.com", "env.ANTHROPIC_API_KEY": "sk-ant-test-0123456789-0123456789-0123456789",
		"env.OPENAI_BASE_URL": "http://llm.example.com/v1", "env.OPENAI_API_KEY": "sk-test-openai",
	} {
		l.secret(k, v)
	}
	l.workProfile("work", "agents")
	repo := filepath.Join(t.TempDir(), "app")
	if err := os.Rename(sampleRepo(t), repo); err != nil {
		t.Fatal(err)
	}
	const task, second = "Fix the greeting so that its test passes, and commit.", "worktree/second"
	claude := l.terminal(repo, "claude", "--profile", "work")
	claude.sessionUp("app")
	l.shows("app", "main", "bypass permissions on")
	codex := l.terminal(repo, "codex", "--worktree", "second")
	l.shows("app", second, "YOLO mode")
	claude.keys(task)
	l.shows("app", "main", "passes, and commit")
	claude.keys("\r")
	codex.keys(task)
	l.shows("app", second, "passes, and commit")
	codex.keys("\r")
	for _, terminal := range []string{"main", second} {
		l.shows("app", terminal, "I mended the greeting")
	}
	l.serveBoth(t)
	claude.detach()
	codex.detach()
	l.in(repo, "sync")
	if got := git(t, repo, "show", "HEAD:greeting.txt"); got != "hello" {
		t.Errorf("after sync the file is %q", got)
	}
	l.in(repo, "sync", "--worktree", "second", "--into", "second")
	if got := git(t, repo, "show", "second:greeting.txt"); got != "hello" {
		t.Errorf("the file of the work tree is %q", got)
	}

	l.guest("app", "echo unfinished > work.txt; sync") // the kernel would write it within 30 seconds
	l.killAll(t)
	claude = l.terminal(repo, "claude", "--resume")
	claude.sessionUp("app")
	l.shows("app", "main", "Fix the greeting so that")
	codex = l.terminal(repo, "codex", "--worktree", "second", "--resume")
	l.shows("app", second, "Fix the greeting so that")
	if got := l.guest("app", "cat work.txt; cat .worktrees/second/greeting.txt"); got != "unfinished\nhello" {
		t.Errorf("after the end of everything: %q", got)
	}
	l.serveBoth(t)
	claude.detach()
	codex.detach()
	if r := l.run(repo, "rm", "--yes"); r.code == 0 || !strings.Contains(r.stderr, "1 file with uncommitted changes") {
		t.Errorf("unsynced work was deleted: %v", r)
	}
	l.in(repo, "rm", "--yes", "--force")
}

// serveBoth starts a server in each work tree of a session, and opens both by their names.
func (l *lab) serveBoth(t *testing.T) {
	t.Helper()
	sandbox := l.sandboxOf("app")
	l.startDevServer(sandbox, guestapi.RepoDir, 33785, "127.0.0.1", "main")
	l.startDevServer(sandbox, guestapi.RepoDir+"/"+guestapi.WorktreesDir+"/second", 33786, "127.0.0.1", "second")
	for port, host := range map[int]string{33785: "app.sandbox.localhost:", 33786: "second.app.sandbox.localhost:"} {
		p := l.served(port)
		address := strings.TrimSuffix(strings.TrimPrefix(p.URL, "http://"), "/")
		status, body := fetch(t, hostBrowser(t), p.URL)
		if name, at, _ := strings.Cut(body, " at "); status != 200 || at != address || !strings.HasPrefix(at, host) || (name == "second") != (p.Worktree == "second") {
			t.Errorf("%s: %d %q", p.URL, status, body)
		}
	}
}

// A fresh Claude Code with the token of a subscription shows no onboarding, no login and
// no question either, and answers.
func TestInteractiveSubscription(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	llm := fakellm.New(agentScript...)
	n.HandleHTTP("llm.example.com", 80, llm)
	l.secret("env.ANTHROPIC_BASE_URL", "http://llm.example.com")
	const token = "sk-ant-oat01-0123456789-0123456789-0123456789"
	l.secret("env.CLAUDE_CODE_OAUTH_TOKEN", token)
	l.workProfile("work", "agents")
	repo := filepath.Join(t.TempDir(), "app")
	if err := os.Rename(sampleRepo(t), repo); err != nil {
		t.Fatal(err)
	}
	claude := l.terminal(repo, "claude", "--profile", "work")
	claude.sessionUp("app")
	l.shows("app", "main", "bypass permissions on")
	claude.keys("Fix the greeting so that its test passes, and commit.")
	l.shows("app", "main", "passes, and commit")
	claude.keys("\r")
	l.shows("app", "main", "I mended the greeting")
	claude.detach()
	seen := llm.Requests()
	if len(seen) == 0 {
		t.Error("the model was not asked")
	}
	for _, r := range seen {
		if r.Auth != token {
			t.Errorf("the model was asked with %q", r.Auth)
		}
	}
	l.in(repo, "rm", "--yes", "--force")
}

// sessionUp waits until the sandbox of a session is up, which a command starts.
func (o *onTerminal) sessionUp(session string) {
	l := o.l
	l.Helper()
	var r result
	if !eventually(commandLimit, func() bool {
		select {
		case <-o.done:
			l.Fatalf("%v has ended:\n%s", o.cmd.Args[1:], o.out.String())
		default:
		}
		r = l.run("", "--json", "session", "show", session)
		return strings.Contains(r.stdout, `"state": "READY"`)
	}) {
		l.Fatalf("%v\n%s", r, o.out.String())
	}
}
