package agentcmd

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// tmuxConfig is for terminals that a person attaches to from another machine.
// The status line has the name of the VM, which is that of the session, at the left, and the
// branch at the right; at 80 columns, 20 are left for the windows. The file of the user comes
// last.
const tmuxConfig = `set -g mouse on
set -s set-clipboard on
set -gq allow-passthrough on
set -s escape-time 10
set -g history-limit 50000
set -g default-terminal tmux-256color
set -as terminal-features ",*:RGB:clipboard:title"
set -g set-titles on
set -g set-titles-string "#S: #W"
set -g focus-events on
set -g window-size latest
set -g status-left-length 24
set -g status-left "[#{host_short}] "
set -g status-right-length 36
set -g status-right "#(git -C #{q:session_path} symbolic-ref -q --short HEAD || echo detached HEAD)"
set -g base-index 1
source-file -q ~/.tmux.conf
`

// tmux runs the tmux server of this user for AgentLab's terminals.
type tmux struct{ path, config string }

func openTmux(path, dir string) (*tmux, error) {
	t := &tmux{path: path, config: filepath.Join(dir, "tmux.conf")}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if old, err := os.ReadFile(t.config); err == nil && string(old) == tmuxConfig {
		return t, nil // a full disk has no space to write it again
	}
	return t, os.WriteFile(t.config, []byte(tmuxConfig), 0o600)
}

func (t *tmux) args(args ...string) []string {
	return append([]string{"tmux", "-L", "agentlab", "-u", "-f", t.config}, args...)
}

func (t *tmux) run(args ...string) (string, error) {
	cmd := &exec.Cmd{Path: t.path, Args: t.args(args...)}
	out, err := cmd.CombinedOutput()
	text := strings.TrimSpace(string(out))
	if err != nil && text != "" {
		err = fmt.Errorf("tmux %s: %s", args[0], text)
	}
	return text, err
}

// ensure makes the session and its window. A window of an agent that has ended has
// a shell: the agent takes its place.
func (t *tmux) ensure(o opening) error {
	if _, err := t.run("has-session", "-t", "="+o.session); err != nil {
		_, err := t.run(append([]string{"new-session", "-d"}, o.newSession()...)...)
		if err == nil || !strings.Contains(err.Error(), "duplicate session") {
			return err
		}
	}
	if !o.choosesWindow() {
		return nil
	}
	name, command := shellWindow, []string(nil)
	if o.agent != "" {
		name, command = o.agent, []string{o.command()}
	}
	window := "=" + o.session + ":=" + name
	windows, err := t.run("list-windows", "-t", "="+o.session, "-F", "#{window_name}=#{"+optionEnded+"}")
	if err != nil {
		return err
	}
	switch windows := strings.Split(windows, "\n"); {
	case !slices.ContainsFunc(windows, func(w string) bool { return strings.HasPrefix(w, name+"=") }):
		_, err = t.run(append([]string{"new-window", "-t", "=" + o.session + ":", "-n", name, "-c", o.dir}, command...)...)
		return err
	case slices.Contains(windows, name+"=1"):
		if _, err := t.run("set-option", "-w", "-u", "-t", window, optionEnded, ";", "respawn-window", "-k", "-t", window, "-c", o.dir, o.command()); err != nil {
			return err
		}
	case len(o.args) > 0:
		fmt.Fprintf(os.Stderr, "agentlab-agent: %s is running already, so its arguments are not used\n", o.agent)
	}
	_, err = t.run("select-window", "-t", window)
	return err
}

// choosesWindow reports whether an opening means a certain window.
func (o opening) choosesWindow() bool { return o.agent != "" || o.shell }

// shellWindow is the name of the window of a shell.
const shellWindow = "shell"

// optionEnded is the option of a window whose agent has ended.
const optionEnded = "@agentlab_ended"

// newSession is the arguments of tmux for a new session.
func (o opening) newSession() []string {
	args := []string{"-s", o.session, "-c", o.dir, "-n"}
	switch {
	case o.agent != "":
		return append(args, o.agent, o.command())
	case o.first != "":
		return append(args, shellWindow, o.first+"; exec bash --login")
	}
	return append(args, shellWindow)
}

// command is the command of the agent's window, in the syntax of sh. A shell follows
// the agent, so that its last output can be read.
func (o opening) command() string {
	words := o.tui()
	for i, word := range words {
		words[i] = ShellQuote(word)
	}
	return strings.Join(words, " ") + "; tmux set-option -w " + optionEnded + " 1; exec bash --login"
}

// end implements multiplexer.
func (t *tmux) end(terminal string) error {
	if _, err := t.run("has-session", "-t", "="+terminal); err != nil {
		return nil //nolint:nilerr // it does not exist, or there is no server
	}
	_, err := t.run("kill-session", "-t", "="+terminal)
	return err
}

// running implements multiplexer.
func (t *tmux) running() bool {
	_, err := t.run("list-sessions")
	return err == nil
}

// web implements multiplexer: tmux has no web server.
func (t *tmux) web(o opening) (guestapi.TerminalWeb, error) {
	return guestapi.TerminalWeb{}, t.ensure(o)
}

// attach implements multiplexer. A shell needs one process: the user waits for it.
func (t *tmux) attach(o opening) error {
	args := append([]string{"new-session", "-A"}, o.newSession()...)
	if o.choosesWindow() {
		if err := t.ensure(o); err != nil {
			return err
		}
		args = []string{"attach-session", "-t", "=" + o.session}
	}
	env := os.Environ()
	if !knownTerminal(os.Getenv("TERM")) {
		env = append(env, "TERM=xterm-256color")
	}
	return syscall.Exec(t.path, t.args(args...), env)
}

// knownTerminal reports whether this machine has a description of a terminal.
func knownTerminal(name string) bool {
	if name == "" || filepath.Base(name) != name {
		return false
	}
	for _, dir := range []string{"/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo"} {
		if _, err := os.Stat(filepath.Join(dir, name[:1], name)); err == nil {
			return true
		}
	}
	return false
}
