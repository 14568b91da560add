package agentcmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab/test/guard"
)

// newTUI returns a start of an agent in a home of its own.
func newTUI(t *testing.T, name string, env ...string) *tui {
	t.Helper()
	return &tui{name: name, home: t.TempDir(), dir: "/work/repo/.worktrees/x", env: append(env, "PATH="+fakeAgents(t, name))}
}

func readJSON(t *testing.T, name string) (doc map[string]any) {
	t.Helper()
	p, err := os.ReadFile(name)
	if err == nil {
		err = json.Unmarshal(p, &doc)
	}
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func TestClaudeSettings(t *testing.T) {
	c := newTUI(t, "claude", "ANTHROPIC_API_KEY=sk-ant-0123456789-abcdefghij")
	file := filepath.Join(c.home, ".claude.json")
	if err := os.WriteFile(file, []byte(`{"theme":"dark","projects":{"/work/repo":{"allowedTools":["x"]}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, argv, _, err := c.command(); err != nil || !slices.Equal(argv, []string{"claude", "--dangerously-skip-permissions"}) {
			t.Fatal(argv, err)
		}
		want := map[string]any{
			"theme": "dark", "hasCompletedOnboarding": true, "hasSeenAutoDefaultNudge": true, "bypassPermissionsModeAccepted": true,
			"projects":              map[string]any{"/work/repo": map[string]any{"allowedTools": []any{"x"}, "hasTrustDialogAccepted": true}},
			"customApiKeyResponses": map[string]any{"approved": []any{"0123456789-abcdefghij"[1:]}, "rejected": []any{}},
		}
		if got := readJSON(t, file); !reflect.DeepEqual(got, want) {
			t.Errorf("%v", got)
		}
	}
	before, _ := os.Stat(file)
	if _, _, _, err := c.command(); err != nil {
		t.Fatal(err)
	}
	if after, _ := os.Stat(file); !os.SameFile(before, after) {
		t.Error("a file without changes was written, in which the agent may write now")
	}
	if err := os.WriteFile(file, []byte("not JSON"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := c.command(); err != nil {
		t.Fatal(err)
	}
	if p, _ := os.ReadFile(file + ".orig"); string(p) != "not JSON" || readJSON(t, file)["hasCompletedOnboarding"] != true {
		t.Errorf("a file that is not JSON became %q", p)
	}
}

func TestOtherSettings(t *testing.T) {
	c := newTUI(t, "codex", "OPENAI_API_KEY=k")
	c.args = []string{"the task"}
	_, argv, _, err := c.command()
	if err != nil || argv[len(argv)-1] != "the task" {
		t.Fatal(argv, err)
	}
	for _, want := range []string{`projects={"/work/repo/.worktrees/x"={trust_level="trusted"}}`, "features.shell_snapshot=false", `model_provider="agentlab"`, "--dangerously-bypass-approvals-and-sandbox"} {
		if !slices.Contains(argv, want) {
			t.Errorf("no %s in %q", want, argv)
		}
	}
	c = newTUI(t, "codex", "OPENAI_API_KEY=k", "OPENAI_BASE_URL=http://h/v1") // Prepare has made a provider
	if _, argv, _, err := c.command(); err != nil || slices.Contains(argv, `model_provider="agentlab"`) {
		t.Error(argv, err)
	}
	g := newTUI(t, "gemini", "GEMINI_API_KEY=k")
	if _, argv, _, err := g.command(); err != nil || !slices.Contains(argv, "--approval-mode=yolo") {
		t.Error(argv, err)
	}
	if auth := readJSON(t, filepath.Join(g.home, ".gemini/settings.json"))["security"]; !reflect.DeepEqual(auth, map[string]any{"auth": map[string]any{"selectedType": "gemini-api-key"}, "folderTrust": map[string]any{"enabled": false}}) {
		t.Errorf("%v", auth)
	}
}

// Conversations are on the workspace, credentials are not, and --resume is used only if
// there is a conversation.
func TestConversations(t *testing.T) {
	state := t.TempDir()
	start := func(resume bool) (*tui, []string) {
		t.Helper()
		c := newTUI(t, "claude")
		c.state, c.resume = state, resume
		_, argv, _, err := c.command()
		if err != nil {
			t.Fatal(err)
		}
		return c, argv
	}
	first, argv := start(true)
	if slices.Contains(argv, "--continue") {
		t.Error("there is nothing to continue")
	}
	for _, name := range []string{".claude/projects/-work-repo/a.jsonl", ".claude/.credentials.json"} {
		file := filepath.Join(first.home, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	second, argv := start(true)
	if !slices.Contains(argv, "--continue") {
		t.Errorf("the conversation is not continued: %q", argv)
	}
	if _, err := os.Stat(filepath.Join(second.home, ".claude/projects/-work-repo/a.jsonl")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(second.home, ".claude/.credentials.json")); err == nil {
		t.Error("a credential was kept")
	}
	if _, argv := start(false); slices.Contains(argv, "--continue") {
		t.Error("continued without --resume")
	}
}

// terminalLab has tmux servers of its own, and an agent that waits for its input.
type terminalLab struct {
	*testing.T
	env []string
	dir string
}

func newTerminalLab(t *testing.T) *terminalLab {
	t.Helper()
	tmux, err := exec.LookPath("tmux")
	if err != nil {
		t.Fatal(err)
	}
	bin, home, sockets := t.TempDir(), t.TempDir(), t.TempDir()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(exe, filepath.Join(bin, "agentlab-agent")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"claude", "codex"} {
		agent := fmt.Sprintf("#!/bin/bash\necho \"%[1]s has: $*\"\nread -r line\necho \"%[1]s ends\"\n", name)
		if err := os.WriteFile(filepath.Join(bin, name), []byte(agent), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	l := &terminalLab{T: t, dir: t.TempDir(), env: []string{
		"PATH=" + bin + ":" + filepath.Dir(tmux) + ":/usr/bin:/bin", "HOME=" + home, "TMUX_TMPDIR=" + sockets, "TERM=xterm-256color", "SHELL=/bin/bash",
	}}
	t.Cleanup(func() { l.tmux("kill-server") })
	return l
}

func (l *terminalLab) tmux(args ...string) string {
	cmd := exec.Command("tmux", append([]string{"-L", "agentlab"}, args...)...)
	cmd.Env = l.env
	out, _ := cmd.CombinedOutput()
	return string(out)
}

func (l *terminalLab) agentlab(args ...string) *exec.Cmd {
	l.Helper()
	cmd := exec.Command("agentlab-agent", args...)
	cmd.Path = filepath.Join(strings.TrimPrefix(strings.Split(l.env[0], ":")[0], "PATH="), "agentlab-agent")
	cmd.Err, cmd.Env, cmd.Dir = nil, l.env, l.dir
	return cmd
}

func (l *terminalLab) open(args ...string) {
	l.Helper()
	if out, err := l.agentlab(append([]string{"open", "--dir", l.dir}, args...)...).CombinedOutput(); err != nil {
		l.Fatalf("%v: %s", err, out)
	}
}

// shows waits until a window shows a text.
func (l *terminalLab) shows(window, want string) {
	l.Helper()
	var got string
	for end := time.Now().Add(guard.Patience); time.Now().Before(end); {
		if got = l.tmux("capture-pane", "-p", "-t", window); strings.Contains(got, want) {
			return
		}
		time.Sleep(20 * time.Millisecond) // an outside condition
	}
	l.Fatalf("no %q in:\n%s", want, got)
}

func TestOpen(t *testing.T) {
	l := newTerminalLab(t)
	l.open("--agent", "claude", "--detach", "--", "it's", "$HOME")
	l.shows("=main:=claude", "claude has: --dangerously-skip-permissions it's $HOME")
	l.open("--agent", "claude", "--detach") // it is running, and stays
	l.tmux("send-keys", "-t", "=main:=claude", "Enter")
	l.shows("=main:=claude", "claude ends")
	for l.tmux("display-message", "-p", "-t", "=main:=claude", "#{"+optionEnded+"}") != "1\n" {
		time.Sleep(20 * time.Millisecond) // an outside condition
	}
	l.open("--agent", "claude", "--detach", "--", "again")
	l.shows("=main:=claude", "again")
	l.open("--session", "worktree/x", "--detach")
	if got := l.tmux("list-windows", "-a", "-F", "#S #W"); got != "main claude\nworktree/x shell\n" {
		t.Errorf("windows: %q", got)
	}

	// On a terminal it attaches, and Ctrl-B D detaches.
	cmd := l.agentlab("open", "--dir", l.dir, "--agent", "claude")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for buf := make([]byte, 4096); !strings.Contains(out.String(), "again"); {
		n, err := tty.Read(buf)
		if err != nil {
			t.Fatalf("%v: %q", err, out.String())
		}
		out.Write(buf[:n])
	}
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, tty)
		close(ended)
	}()
	tick := time.NewTicker(200 * time.Millisecond) // tmux ignores keys while it starts
	defer tick.Stop()
	for detached := false; !detached; {
		_, _ = tty.WriteString("\x02d")
		select {
		case <-ended:
			detached = true
		case <-tick.C:
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if out, err := l.agentlab("close", "--session", "worktree/x").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got := l.tmux("list-sessions", "-F", "#S"); got != "main\n" {
		t.Errorf("after close: %q", got)
	}
	if out, err := l.agentlab("open", "--dir", l.dir, "--agent", "gemini", "--detach").CombinedOutput(); err == nil || !strings.Contains(string(out), "not installed") {
		t.Errorf("%v: %s", err, out)
	}
}

// Each agent has a window of its own, which a further open selects.
func TestOpenSecondAgent(t *testing.T) {
	l := newTerminalLab(t)
	l.open("--agent", "claude", "--detach")
	l.open("--agent", "codex", "--detach")
	l.shows("=main:=codex", "codex has:")
	l.open("--agent", "claude", "--detach")
	if got := l.tmux("list-windows", "-a", "-F", "#W #{window_active}"); got != "claude 1\ncodex 0\n" {
		t.Errorf("windows: %q", got)
	}
	l.open("--detach") // attaches to what is there
	if got := l.tmux("list-windows", "-a", "-F", "#W #{window_active}"); got != "claude 1\ncodex 0\n" {
		t.Errorf("windows: %q", got)
	}
	for range 2 {
		l.open("--shell", "--detach")
		if got := l.tmux("list-windows", "-a", "-F", "#W #{window_active}"); got != "claude 0\ncodex 0\nshell 1\n" {
			t.Errorf("windows: %q", got)
		}
	}
}

// A shell needs one process of tmux, because the user waits for it, whether its terminal
// exists or not.
func TestOpenShell(t *testing.T) {
	l := newTerminalLab(t)
	log := filepath.Join(t.TempDir(), "calls")
	tmux, err := exec.LookPath("tmux")
	if err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\necho call >>" + log + "\nexec " + tmux + ` "$@"` + "\n"
	if err := os.WriteFile(filepath.Join(filepath.Dir(l.agentlab("open").Path), "tmux"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	attach := func(run, want string) {
		cmd := l.agentlab("open", "--dir", l.dir, "--run", run)
		tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		for buf := make([]byte, 4096); !strings.Contains(out.String(), want); {
			n, err := tty.Read(buf)
			if err != nil {
				t.Fatalf("%v: %q", err, out.String())
			}
			out.Write(buf[:n])
		}
		_ = tty.Close() // the connection is lost
		_ = cmd.Wait()  // its code is that of a lost terminal
	}
	attach("echo first-$((40+2))", "first-42")
	attach("echo second-$((40+2))", "first-42")
	if got := l.tmux("list-windows", "-a", "-F", "#S #W"); got != "main shell\n" {
		t.Errorf("windows: %q", got)
	}
	if got := l.tmux("capture-pane", "-p", "-t", "=main:"); strings.Contains(got, "second-42") {
		t.Errorf("a terminal that existed ran a command:\n%s", got)
	}
	if got, err := os.ReadFile(log); err != nil || string(got) != "call\ncall\n" {
		t.Errorf("processes of tmux for two attaches: %q, %v", got, err)
	}
}

// What a program sends to the terminal around tmux arrives there: agents copy text to the
// clipboard in this way.
func TestTmuxPassthrough(t *testing.T) {
	l := newTerminalLab(t)
	cmd := l.agentlab("open", "--dir", l.dir, "--shell")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tty.Close() }()
	if _, err := tty.Read(make([]byte, 1)); err != nil { // it is attached
		t.Fatal(err)
	}
	l.tmux("send-keys", "-t", "=main:=shell", `printf '\033Ptmux;\033\033]52;c;Y29waWVk\a\033\\'`, "Enter")
	var seen bytes.Buffer
	for buf := make([]byte, 4096); !strings.Contains(seen.String(), "\x1b]52;c;Y29waWVk\a"); {
		n, err := tty.Read(buf)
		if seen.Write(buf[:n]); err != nil {
			t.Fatalf("%v: %q", err, seen.String())
		}
	}
	l.tmux("kill-server")
	_ = cmd.Wait()
}

// The status line of a terminal of 80 columns shows the VM, the window and the branch, as
// it is checked out now.
func TestTmuxStatusLine(t *testing.T) {
	l := newTerminalLab(t)
	l.dir = filepath.Join(l.dir, "it's a $(touch x) directory")
	const branch, next = "feature/a-rather-long-branch", "n1ext"
	if out, err := exec.Command("git", "init", "-q", "-b", branch, l.dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	host, _, _ = strings.Cut(host, ".")
	cmd := l.agentlab("open", "--dir", l.dir, "--session", "worktree/"+branch, "--shell")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tty.Close() }()
	defer time.AfterFunc(guard.Patience, func() { _ = tty.Close() }).Stop()
	var seen bytes.Buffer
	sees := func(want string) {
		t.Helper()
		for buf := make([]byte, 4096); !strings.Contains(seen.String(), want); {
			n, err := tty.Read(buf)
			if seen.Write(buf[:n]); err != nil {
				t.Fatalf("%v: no %q in %q", err, want, seen.String())
			}
		}
	}
	sees("[" + host[:min(len(host), 20)])
	sees("1:shell")
	sees(branch)
	l.tmux("send-keys", "-t", "=worktree/"+branch+":", "clear; git checkout -q -b n$((1))ext", "Enter") // not what the shell echoes
	l.tmux("set-option", "-g", "status-interval", "1")
	seen.Reset()
	sees(next)
	l.tmux("kill-server")
	_ = cmd.Wait()
}
