package agentcmd

import (
	"errors"
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
// The file of the user comes last.
const tmuxConfig = `set -g mouse on
set -s set-clipboard on
set -s escape-time 10
set -g history-limit 50000
set -g default-terminal tmux-256color
set -as terminal-features ",*:RGB:clipboard:title"
set -g set-titles on
set -g set-titles-string "#S: #W"
set -g focus-events on
set -g window-size latest
set -g status-right ""
set -g base-index 1
source-file -q ~/.tmux.conf
`

// opening is what openMain was asked for.
type opening struct {
	session string // of tmux
	dir     string
	agent   string // "" opens a shell
	first   string // command of a shell in a new session, in the syntax of sh
	resume  bool
	detach  bool
	args    []string
}

// openMain attaches to a tmux session, and starts it, the agent's window or the agent
// if they are missing.
func openMain(args []string) int {
	var o opening
	f := flags("open")
	f.StringVar(&o.session, "session", "main", "")
	f.StringVar(&o.dir, "dir", guestapi.RepoDir, "")
	f.StringVar(&o.agent, "agent", "", "")
	f.StringVar(&o.first, "run", "", "")
	f.BoolVar(&o.resume, "resume", false, "")
	f.BoolVar(&o.detach, "detach", false, "")
	if f.Parse(args) != nil {
		return 2
	}
	o.args = f.Args()
	if err := o.run(); err != nil {
		return reportError(os.Stderr, err)
	}
	return 0
}

// tuiMain runs an agent in a window of tmux.
func tuiMain(args []string) int {
	f := flags("tui")
	name := f.String("agent", "", "")
	resume := f.Bool("resume", false, "")
	if f.Parse(args) != nil {
		return 2
	}
	return reportError(os.Stderr, runTUI(*name, *resume, f.Args()))
}

// closeMain ends a tmux session with its programs, if it exists.
func closeMain(args []string) int {
	f := flags("close")
	session := f.String("session", "", "")
	if f.Parse(args) != nil || *session == "" {
		return 2
	}
	if lookPath("tmux", os.Getenv("PATH")) == "" {
		return 0
	}
	t, err := openTmux()
	if err != nil {
		return reportError(os.Stderr, err)
	}
	if _, err := t.run("has-session", "-t", "="+*session); err != nil {
		return 0 // it does not exist, or there is no server
	}
	if _, err := t.run("kill-session", "-t", "="+*session); err != nil {
		return reportError(os.Stderr, err)
	}
	return 0
}

func (o opening) run() error {
	if o.agent != "" {
		a, err := find(o.agent)
		if err != nil {
			return err
		}
		if lookPath(a.program, os.Getenv("PATH")) == "" {
			return notInstalled{a}
		}
	}
	if _, err := os.Stat(guestapi.WorkspaceDir); err == nil { // for conversations
		if err := os.MkdirAll(filepath.Join(guestapi.WorkspaceDir, stateDir), 0o700); err != nil {
			return err
		}
	}
	if err := os.Chdir(o.dir); err != nil {
		return err
	}
	if lookPath("tmux", os.Getenv("PATH")) == "" {
		return o.withoutTmux()
	}
	t, err := openTmux()
	if err != nil {
		return err
	}
	if err := t.ensure(o); err != nil || o.detach {
		return err
	}
	return t.attach(o)
}

// withoutTmux runs the program directly. It ends with the connection.
func (o opening) withoutTmux() error {
	if o.detach {
		return errors.New("tmux is not installed in this image, so nothing can run in the background")
	}
	fmt.Fprintln(os.Stderr, "agentlab-agent: tmux is not installed in this image, so this terminal ends with the connection")
	if o.agent != "" {
		return runTUI(o.agent, o.resume, o.args)
	}
	return syscall.Exec("/bin/bash", []string{"bash", "--login"}, os.Environ())
}

// tmux runs the tmux server of this user for AgentLab's terminals.
type tmux struct{ path, config string }

func openTmux() (*tmux, error) {
	dir := filepath.Join(os.Getenv("HOME"), ".cache", "agentlab")
	t := &tmux{path: lookPath("tmux", os.Getenv("PATH")), config: filepath.Join(dir, "tmux.conf")}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
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
	name, command := "shell", ""
	if o.first != "" {
		command = o.first + "; exec bash --login"
	}
	if o.agent != "" {
		name, command = o.agent, o.command()
	}
	if _, err := t.run("has-session", "-t", "="+o.session); err != nil {
		_, err := t.run(withCommand([]string{"new-session", "-d", "-s", o.session, "-n", name, "-c", o.dir}, command)...)
		if err == nil || !strings.Contains(err.Error(), "duplicate session") {
			return err
		}
	}
	if o.agent == "" {
		return nil
	}
	window := "=" + o.session + ":=" + name
	windows, err := t.run("list-windows", "-t", "="+o.session, "-F", "#{window_name}=#{"+optionEnded+"}")
	if err != nil {
		return err
	}
	switch windows := strings.Split(windows, "\n"); {
	case !slices.ContainsFunc(windows, func(w string) bool { return strings.HasPrefix(w, name+"=") }):
		_, err = t.run(withCommand([]string{"new-window", "-t", "=" + o.session + ":", "-n", name, "-c", o.dir}, command)...)
		return err
	case slices.Contains(windows, name+"=1"):
		if _, err := t.run("set-option", "-w", "-u", "-t", window, optionEnded, ";", "respawn-window", "-k", "-t", window, "-c", o.dir, command); err != nil {
			return err
		}
	case len(o.args) > 0:
		fmt.Fprintf(os.Stderr, "agentlab-agent: %s is running already, so its arguments are not used\n", o.agent)
	}
	_, err = t.run("select-window", "-t", window)
	return err
}

// optionEnded is the option of a window whose agent has ended.
const optionEnded = "@agentlab_ended"

func withCommand(args []string, command string) []string {
	if command == "" {
		return args
	}
	return append(args, command)
}

// command is the command of the agent's window, in the syntax of sh. A shell follows
// the agent, so that its last output can be read.
func (o opening) command() string {
	words := []string{"agentlab-agent", "tui", "--agent", o.agent}
	if o.resume {
		words = append(words, "--resume")
	}
	words = append(words, "--")
	for _, arg := range o.args {
		words = append(words, ShellQuote(arg))
	}
	return strings.Join(words, " ") + "; tmux set-option -w " + optionEnded + " 1; exec bash --login"
}

// ShellQuote quotes a word for sh.
func ShellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// attach replaces this process by a client of tmux.
func (t *tmux) attach(o opening) error {
	env := os.Environ()
	if !knownTerminal(os.Getenv("TERM")) {
		env = append(env, "TERM=xterm-256color")
	}
	return syscall.Exec(t.path, t.args("attach-session", "-t", "="+o.session), env) //nolint:gosec // tmux of the image
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
