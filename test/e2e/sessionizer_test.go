package e2e

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/creack/pty"
)

// tmuxLab is a tmux server of the user, with one client on a terminal.
type tmuxLab struct {
	*lab
	env []string
}

// newTmuxLab starts tmux with a shell in which agentlab can be run.
func newTmuxLab(l *lab) *tmuxLab {
	l.Helper()
	m := &tmuxLab{lab: l, env: append(slices.Clone(l.env), "TMUX_TMPDIR="+l.TempDir(), "HOME="+l.TempDir(), "TERM=xterm-256color", "SHELL=/bin/sh", "ENV=", "PS1=ready$ ", "FZF_DEFAULT_OPTS=")}
	cmd := exec.Command("tmux", "-f", "/dev/null", "-u", "new-session", "-s", "outer", "sh")
	cmd.Env = m.env
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 40, Cols: 120})
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() {
		m.tmux("kill-server")
		_ = tty.Close()
		_ = cmd.Wait()
	})
	go func() { _, _ = io.Copy(io.Discard, tty) }() // ends with the terminal
	m.sees("=outer:", "ready$")
	return m
}

func (m *tmuxLab) tmux(args ...string) string {
	cmd := exec.Command("tmux", args...)
	cmd.Env = m.env
	out, _ := cmd.CombinedOutput()
	return strings.TrimSpace(string(out))
}

func (m *tmuxLab) keys(window string, keys ...string) {
	m.Helper()
	m.tmux(append([]string{"send-keys", "-t", window}, keys...)...)
}

// sees waits until a window shows a text.
func (m *tmuxLab) sees(window, want string) {
	m.Helper()
	var got string
	if !eventually(settleLimit, func() bool {
		got = m.tmux("capture-pane", "-p", "-t", window)
		return strings.Contains(got, want)
	}) {
		m.Fatalf("no %q in %s:\n%s", want, window, got)
	}
}

// client waits until the terminal shows a session.
func (m *tmuxLab) client(want string) {
	m.Helper()
	var got string
	if !eventually(settleLimit, func() bool {
		got = m.tmux("list-clients", "-F", "#{client_session}")
		return got == want
	}) {
		m.Fatalf("the terminal shows %q, not %q:\n%s", got, want, m.tmux("capture-pane", "-p", "-t", "=outer:"))
	}
}

// The sessionizer of seed 003, in a real tmux with real fzf: list, select, start, switch,
// stop, destroy.
func TestSessionizer(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.workProfile("work", "base")
	app, two := sampleRepo(t), sampleRepo(t)
	dir := filepath.Join(l.home, "config", "sessionizer")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"repos.txt":             "me/app " + app + "\nme/two " + two + "\n",
		"resources.yaml":        "defaults: {cpus: 1, memory: 1GiB, disk: 20GiB, profile: work}\noverrides: {me/two: {cpus: 2}}\nmax_concurrent: 2\n",
		"network-allowlist.txt": "preset:github\nexample.com\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := newTmuxLab(l)
	m.keys("=outer:", "agentlab sessionizer --agent none", "Enter")
	m.sees("=outer:", "me/two")
	m.pick("app")
	session := m.sessionOf("me/app")
	m.client(session)
	if got := m.tmux("list-windows", "-t", "="+session, "-F", "#W"); got != "vim\nserver\nagent\ngit\nscratch" {
		t.Errorf("windows: %q", got)
	}
	m.sees("="+session+":=agent", "agent@")
	m.keys("="+session+":=scratch", "echo in-$(hostname)-$((40+2))", "Enter")
	m.sees("="+session+":=scratch", "in-"+l.sandboxOf(session)+"-42")
	m.sees("="+session+":=git", "On branch main")
	if got := l.ok("--json", "sandbox", "show", l.sandboxOf(session)); !strings.Contains(got, `"cores": 1`) || !strings.Contains(got, `"network_mode": "allowlist"`) {
		t.Errorf("the sandbox: %s", got)
	}

	// Another one, from the same terminal, and back: the first one runs already.
	m.tmux("switch-client", "-t", "=outer")
	m.keys("=outer:", "clear; agentlab sessionizer me/two --agent none", "Enter")
	second := m.sessionOf("me/two")
	m.client(second)
	m.tmux("switch-client", "-t", "=outer")
	m.keys("=outer:", "clear; agentlab sessionizer --agent none", "Enter")
	m.sees("=outer:", "[RUNNING] me/app")
	m.pick("app")
	m.client(session)

	m.worktrees(app, session)

	m.tmux("switch-client", "-t", "=outer")
	if r := l.run("", "sessionizer", "--no-input", "other/repo"); r.code == 0 || !strings.Contains(r.stderr, "max_concurrent") {
		t.Errorf("a third VM was started: %v", r)
	}
	m.in("sessionizer", "--stop", "me/app")
	if got := l.ok("sessionizer", "--list"); !strings.Contains(got, "STOPPED") || !strings.Contains(got, "READY") {
		t.Errorf("after stop:\n%s", got)
	}
	m.in("sessionizer", "--destroy", "me/two", "--yes")
	if got := l.ok("sessionizer", "--list") + l.ok("profile", "list"); strings.Contains(got, "me/two") || strings.Contains(got, second) {
		t.Errorf("after destroy:\n%s", got)
	}
	if got := m.tmux("list-sessions", "-F", "#S"); got != "outer" {
		t.Errorf("sessions of tmux: %q", got)
	}
	// A profile that the user has changed is the user's.
	profile := filepath.Join(l.home, "config", "profiles", session+".yaml")
	text, err := os.ReadFile(profile)
	if err == nil {
		err = os.WriteFile(profile, append(text, "# mine\n"...), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.in("sessionizer", "--destroy", "me/app", "--yes")
	if got := l.ok("profile", "show", session); !strings.Contains(got, "# mine") {
		t.Errorf("the changed profile: %s", got)
	}
}

// pick selects the only entry with a text in fzf. fzf searches in the background: an
// Enter before the end of the search selects what was first.
func (m *tmuxLab) pick(text string) {
	m.Helper()
	m.keys("=outer:", text)
	m.sees("=outer:", " 1/")
	m.keys("=outer:", "Enter")
}

// worktrees checks that the work trees of a running session are in the list, and that a
// window shows the one that is selected. The guest chooses the names of branches.
func (m *tmuxLab) worktrees(repo, session string) {
	m.Helper()
	ran := filepath.Join(m.TempDir(), "ran")
	hostile := "odd#(touch${IFS}" + ran + ");"
	m.lab.in(repo, "worktree", "add", "fix/12")
	m.lab.in(repo, "worktree", "add", hostile)
	if got := m.ok("sessionizer", "--list"); !strings.Contains(got, "me/app/fix/12 ") || !strings.Contains(got, "me/app/"+hostile) {
		m.Errorf("work trees in the list:\n%s", got)
	}
	m.tmux("switch-client", "-t", "=outer")
	m.keys("=outer:", "clear; agentlab sessionizer --agent none", "Enter")
	m.sees("=outer:", "[RUNNING] me/app/fix/12")
	m.pick("fix/12")
	m.client(session)
	window := "=" + session + ":=worktree/fix/12"
	if got := m.tmux("display-message", "-p", "-t", "="+session+":", "#W"); got != "worktree/fix/12" {
		m.Errorf("the window %q is selected", got)
	}
	m.sees(window, "agent@")
	m.keys(window, "echo $(pwd)-$((40+2))", "Enter")
	m.sees(window, "/.worktrees/fix/12-42")

	m.in("sessionizer", "--detach", "me/app/"+hostile)
	if got := m.tmux("list-windows", "-t", "="+session, "-F", "#W"); !strings.Contains(got, "worktree/odd__touch") {
		m.Errorf("no window of the branch %s: %q", hostile, got)
	}
	if _, err := os.Stat(ran); err == nil {
		m.Errorf("tmux ran the name of a branch")
	}
	cmd := exec.Command(filepath.Join(m.bin, "agentlab"), "sessionizer", "--detach", "me/app/none")
	cmd.Env = m.env
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "has no work tree of branch none") {
		m.Errorf("a work tree that does not exist: %v\n%s", err, out)
	}
}

// in runs agentlab with the user's tmux.
func (m *tmuxLab) in(args ...string) {
	m.Helper()
	cmd := exec.Command(filepath.Join(m.bin, "agentlab"), args...)
	cmd.Env = m.env
	if out, err := cmd.CombinedOutput(); err != nil {
		m.Errorf("agentlab %v: %v\n%s", args, err, out)
	}
}

// sessionOf waits until the session of a repository is up, and returns its name.
func (m *tmuxLab) sessionOf(repo string) (name string) {
	m.Helper()
	if !eventually(settleLimit, func() bool {
		for line := range strings.Lines(m.ok("sessionizer", "--list")) {
			if f := strings.Fields(line); len(f) == 4 && f[0] == repo && f[3] == "READY" {
				name = f[1]
			}
		}
		return name != ""
	}) {
		m.Fatalf("%s does not run:\n%s%s", repo, m.ok("sessionizer", "--list"), m.tmux("capture-pane", "-p", "-t", "=outer:"))
	}
	return name
}
