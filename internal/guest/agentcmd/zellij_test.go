package agentcmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// zellijLab is a terminalLab with Zellij.
type zellijLab struct {
	*terminalLab
	home, work string
}

func newZellijLab(t *testing.T) *zellijLab {
	t.Helper()
	l := &zellijLab{terminalLab: newTerminalLab(t)}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Dir(l.agentlab("open").Path)
	if err := os.Symlink(exe, filepath.Join(bin, "zellij")); err != nil {
		t.Fatal(err)
	}
	l.work = t.TempDir()
	for i, kv := range l.env {
		if strings.HasPrefix(kv, "HOME=") {
			if l.home, err = os.MkdirTemp("", "zj"); err != nil { // sockets need a short path
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(l.home) })
			l.env[i] = "HOME=" + l.home
		}
	}
	l.env = append(l.env, workspaceEnv+"="+l.work)
	t.Cleanup(func() {
		for _, name := range l.sessions() {
			l.zellij("kill-session", name)
		}
		if p, err := os.ReadFile(filepath.Join(l.home, "zj", "web.pid")); err == nil {
			if pid, err := strconv.Atoi(string(p)); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	return l
}

func (l *zellijLab) zellij(args ...string) string {
	cmd := l.agentlab()
	cmd.Path, cmd.Args = filepath.Join(filepath.Dir(cmd.Path), "zellij"), append([]string{"zellij"}, args...)
	out, _ := cmd.CombinedOutput()
	return string(out)
}

func (l *zellijLab) sessions() (names []string) {
	for line := range strings.Lines(l.zellij("list-sessions", "--no-formatting")) {
		if name, _, ok := strings.Cut(line, " [Created"); ok {
			names = append(names, name)
		}
	}
	return names
}

func (l *zellijLab) choose(args ...string) (c guestapi.TerminalChoice) {
	l.Helper()
	cmd := l.agentlab(append([]string{"terminal"}, args...)...)
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, &c)
	}
	if err != nil {
		l.Fatalf("%v: %s", err, out)
	}
	return c
}

// attached is a client of a terminal.
type attached struct {
	*zellijLab
	tty  *os.File
	seen bytes.Buffer
	cmd  *exec.Cmd
}

func (l *zellijLab) attach(args ...string) *attached {
	l.Helper()
	cmd := l.agentlab(append([]string{"open", "--dir", l.dir}, args...)...)
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 50, Cols: 200})
	if err != nil {
		l.Fatal(err)
	}
	return &attached{zellijLab: l, tty: tty, cmd: cmd}
}

// sees reads until a text appears in what came since the last one.
func (a *attached) sees(want string) {
	a.Helper()
	end := time.AfterFunc(guard.Patience, func() { _ = a.cmd.Process.Kill() })
	defer end.Stop()
	for buf := make([]byte, 4096); !strings.Contains(a.seen.String(), want); {
		n, err := a.tty.Read(buf)
		a.seen.Write(buf[:n])
		if err != nil {
			a.Fatalf("%v, no %q in %q", err, want, a.seen.String())
		}
	}
	a.seen.Reset()
}

func (a *attached) types(text string) { _, _ = a.tty.WriteString(text) }

func (a *attached) leaves() {
	_ = a.tty.Close() // as if the connection was lost
	_ = a.cmd.Wait()
}

func TestOpenInZellij(t *testing.T) {
	l := newZellijLab(t)
	if c := l.choose("zellij"); c != (guestapi.TerminalChoice{Name: "zellij"}) {
		t.Fatalf("%+v", c)
	}
	l.open("--agent", "claude", "--detach", "--", "it's", "$HOME", `"\`)
	if got := fmt.Sprint(l.sessions()); got != "[main.claude]" {
		t.Fatalf("sessions %s", got)
	}
	l.open("--agent", "claude", "--detach") // it is running, and stays

	// After a lost connection, the command has no agent.
	a := l.attach("--agent", "claude")
	a.sees(`claude has: --dangerously-skip-permissions it's $HOME "\`)
	a.leaves()
	a = l.attach()
	a.sees("claude has:")
	a.types("\x1a\r") // Ctrl-Z stops nothing
	a.sees("claude ends")
	a.types("echo in the $0\r")
	a.sees("in the bash")

	// The agent takes the place of the shell that follows it, and has the terminal.
	l.open("--agent", "claude", "--detach", "--", "again")
	a.sees("claude has: --dangerously-skip-permissions again")
	a.types("\r")
	a.sees("claude ends")

	// The user closes the pane; the shell beside it keeps the session.
	a.types("exit\r")
	for probe := l.file("main.claude.sock"); exists(probe); {
		time.Sleep(20 * time.Millisecond) // an outside condition
	}
	a.leaves()
	l.open("--agent", "claude", "--detach", "--", "third")
	a = l.attach()
	a.sees("claude has: --dangerously-skip-permissions third")
	a.leaves()

	// Each terminal and agent has a session of its own.
	l.open("--session", "worktree/x", "--run", "echo ran; false", "--detach")
	a = l.attach("--session", "worktree/x")
	a.sees("ran")
	a.leaves()
	other := zellijName("worktree/x")
	if got := fmt.Sprint(l.sessions()); got != "[main.claude "+other+"]" {
		t.Errorf("sessions %s", got)
	}
	if out, err := l.agentlab("close", "--session", "worktree/x").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got := fmt.Sprint(l.sessions()); got != "[main.claude]" {
		t.Errorf("after close: %s", got)
	}
	if out, err := l.agentlab("close", "--session", "worktree/x").CombinedOutput(); err != nil {
		t.Errorf("close again: %v: %s", err, out)
	}
}

func (l *zellijLab) file(name string) string {
	return filepath.Join(l.home, ".cache", "agentlab", "zellij", name)
}

func exists(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}

// The choice is on the workspace, and changes only while no terminal runs.
func TestChooseTerminal(t *testing.T) {
	l := newZellijLab(t)
	for _, step := range []struct {
		do   func()
		args []string
		want guestapi.TerminalChoice
	}{
		{nil, []string{"--default", "tmux"}, guestapi.TerminalChoice{Name: "tmux"}},
		{nil, []string{"zellij"}, guestapi.TerminalChoice{Name: "zellij"}},
		{nil, []string{"--default", "tmux"}, guestapi.TerminalChoice{Name: "zellij"}},
		{func() { l.open("--detach") }, []string{"tmux"}, guestapi.TerminalChoice{Name: "tmux", Running: "zellij"}},
		{nil, []string{"zellij"}, guestapi.TerminalChoice{Name: "zellij"}},
		{func() { l.zellij("kill-session", "main") }, []string{"tmux"}, guestapi.TerminalChoice{Name: "tmux"}},
		{func() { l.open("--detach") }, []string{"zellij"}, guestapi.TerminalChoice{Name: "zellij", Running: "tmux"}},
		{func() { _ = os.Remove(filepath.Join(l.work, stateDir, "terminal")) }, []string{"--default", "zellij"}, guestapi.TerminalChoice{Name: "tmux"}},
		{func() { l.tmux("kill-server"); l.remove("zellij") }, []string{"zellij"}, guestapi.TerminalChoice{Name: "zellij", Missing: true}},
	} {
		if step.do != nil {
			step.do()
		}
		if got := l.choose(step.args...); got != step.want {
			t.Errorf("%v: %+v, want %+v", step.args, got, step.want)
		}
	}
	// An image without the chosen one.
	if err := os.WriteFile(filepath.Join(l.work, stateDir, "terminal"), []byte("zellij\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := l.agentlab("open", "--dir", l.dir, "--detach").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "zellij is not installed in this image") {
		t.Errorf("%v: %s", err, out)
	}
}

func (l *zellijLab) remove(program string) {
	l.Helper()
	if err := os.Remove(filepath.Join(filepath.Dir(l.agentlab().Path), program)); err != nil {
		l.Fatal(err)
	}
}

func TestZellijWeb(t *testing.T) {
	l := newZellijLab(t)
	l.choose("zellij")
	call := func() (w guestapi.TerminalWeb) {
		t.Helper()
		cmd := l.agentlab("open", "--dir", l.dir, "--agent", "claude", "--web")
		var errOut bytes.Buffer
		cmd.Stderr = &errOut
		out, err := cmd.Output()
		if err == nil {
			err = json.Unmarshal(out, &w)
		}
		if err != nil {
			t.Fatalf("%v: %s%s", err, out, errOut.String())
		}
		return w
	}
	first := call()
	if first.Port == 0 || first.Session != "main.claude" || len(first.Token) != 36 {
		t.Errorf("%+v", first)
	}
	second := call()
	if second.Port != first.Port {
		t.Errorf("a second server on port %d", second.Port)
	}
	if list, _ := filepath.Glob(filepath.Join(l.home, "zj", "token_*")); len(list) != 1 {
		t.Errorf("valid tokens: %v", list)
	}
	if out, err := l.agentlab("terminal", "nano").CombinedOutput(); err == nil {
		t.Errorf("chose nano: %s", out)
	}
}

func TestZellijLayout(t *testing.T) {
	for _, o := range []opening{{agent: "claude"}, {}} {
		text := zellijLayout(o, paneCommand("/home/a \"b\"\\\n/x.sock"))
		commands, err := checkLayout(text)
		want := `[[agentlab-agent pane --socket /home/a \"b\"\\\u{a}/x.sock]]`
		if o.agent != "" {
			want = strings.TrimSuffix(want, "]") + " [" + os.Getenv("SHELL") + "]]"
		}
		if got := fmt.Sprint(commands); err != nil || got != want {
			t.Errorf("%s, want %s, %v in\n%s", got, want, err, text)
		}
	}
	if _, err := checkLayout("layout {\n  pane expanded=true\n}\n"); err == nil {
		t.Error("the check of layouts accepts anything")
	}
}

func TestZellijName(t *testing.T) {
	long := strings.Repeat("x", 100)
	seen := map[string]string{}
	for _, terminal := range []string{"main", "worktree/x", "worktree_x", "worktree/ž", "a.b", "..", long, long + "y"} {
		name := zellijName(terminal)
		if len(name) > maxZellijName || notInName.MatchString(name) || seen[name] != "" {
			t.Errorf("%q is %q, as %q", terminal, name, seen[name])
		}
		seen[name] = terminal
	}
}
