package sessionizer

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// tmux is the name of the local tmux session.
func (e Entry) tmux() string {
	if e.other {
		return "agent-session-" + e.Session
	}
	return e.repo.sessionName()
}

// otherSession is the entry of a session that is listed by its own name.
func otherSession(s api.Session) Entry {
	return Entry{
		Repo: s.Name, Session: s.Name, Sandbox: s.Sandbox, State: s.State, Running: s.Sandbox != "" && work.IsUp(api.Sandbox{State: s.State}),
		other: true, dir: os.Getenv("HOME"), at: s,
	}
}

// tmuxWindow is a window of the local tmux session of a repository.
type tmuxWindow struct {
	name    string
	command []string
}

// guestPrograms are the windows and their programs; "" is a shell. That of the agent is
// the main terminal of the session.
var guestPrograms = [][2]string{
	{"vim", "command -v vim >/dev/null && vim ."},
	{"server", ""},
	{agentWindow, ""},
	{"git", "if command -v lazygit >/dev/null; then lazygit; else git status; fi"},
	{"scratch", ""},
}

const agentWindow = "agent"

// holdOnFailure runs a command and keeps its window open if it fails.
const holdOnFailure = `"$@" || { printf '\n[%s: exit code %s; press Enter to close]' "$0" "$?"; read -r _; }`

// tmuxWindows plans the windows of a session, and that of the work tree of a branch,
// unless it is "". program is the command line that runs agentlab.
func tmuxWindows(program []string, session, branch string) (windows []tmuxWindow) {
	add := func(name string, command ...string) {
		windows = append(windows, tmuxWindow{name, slices.Concat([]string{"sh", "-c", holdOnFailure, name}, program, command)})
	}
	for _, p := range guestPrograms {
		if p[0] == agentWindow {
			add(p[0], "attach", session)
		} else {
			add(p[0], "attach", session, "--session", p[0], "--run", p[1])
		}
	}
	if branch != "" {
		add(worktreeWindow(branch), "attach", session+"/"+branch)
	}
	return windows
}

// worktreeWindow is the name of the window of a work tree. A guest chooses names of
// branches, and tmux expands a name: #(COMMAND) would run here. A name that is changed
// gets a hash, so that another branch does not have it.
func worktreeWindow(branch string) string {
	safe := strings.Map(func(r rune) rune {
		if strings.ContainsRune("-_/", r) || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '_'
	}, branch)
	if safe != branch {
		safe += "-" + session.ShortHash(branch)
	}
	return "worktree/" + safe
}

// tmuxCommands plans the commands that create the windows that are missing. exists is
// whether there is the session, have the names of its windows.
func tmuxCommands(name, dir string, exists bool, have []string, windows []tmuxWindow) (cmds [][]string) {
	dir = strings.ReplaceAll(dir, "#", "##") // tmux expands it, and runs what is in #()
	for _, w := range windows {
		switch {
		case !exists:
			cmds = append(cmds, slices.Concat([]string{"new-session", "-d", "-s", name, "-n", w.name, "-c", dir}, w.command))
			exists = true
		case !slices.Contains(have, w.name):
			cmds = append(cmds, slices.Concat([]string{"new-window", "-d", "-t", "=" + name + ":", "-n", w.name, "-c", dir}, w.command))
		}
	}
	return cmds
}

// localTmux runs the user's own tmux with one command: a semicolon at the end of an
// argument does not begin another one.
func localTmux(ctx context.Context, args ...string) (string, error) {
	args = slices.Clone(args)
	for i, arg := range args {
		if rest, ok := strings.CutSuffix(arg, ";"); ok {
			args[i] = rest + `\;`
		}
	}
	path, err := gitsafe.NeedProgram("tmux", "has the windows of a session")
	if err != nil {
		return "", err
	}
	var errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "tmux %s failed: %s: %w", args[0], agentlab.WithoutControls(strings.TrimSpace(errOut.String())), err)
	}
	return string(out), err
}

// hasTmux reports whether there is a local tmux session.
func hasTmux(ctx context.Context, name string) bool {
	_, err := localTmux(ctx, "has-session", "-t", "="+name)
	return err == nil
}

// ensureTmux creates the local tmux session of a repository, and windows that it lacks.
// With the branch of a work tree, the window of that is selected.
func (s *Sessionizer) ensureTmux(ctx context.Context, e Entry, branch string) error {
	exists := hasTmux(ctx, e.tmux())
	var have []string
	if exists {
		out, err := localTmux(ctx, "list-windows", "-t", "="+e.tmux()+":", "-F", "#{window_name}")
		if err != nil {
			return err
		}
		have = strings.Fields(out)
	}
	windows := tmuxWindows(s.Program, e.Session, branch)
	for _, args := range tmuxCommands(e.tmux(), e.dir, exists, have, windows) {
		if _, err := localTmux(ctx, args...); err != nil {
			return err
		}
	}
	for _, w := range windows { // the names stay, whatever runs in the windows
		if exists && slices.Contains(have, w.name) {
			continue
		}
		for _, option := range []string{"automatic-rename", "allow-rename"} {
			if _, err := localTmux(ctx, "set-option", "-w", "-t", "="+e.tmux()+":="+w.name, option, "off"); err != nil {
				return err
			}
		}
	}
	selected := agentWindow
	switch {
	case branch != "":
		selected = worktreeWindow(branch)
	case exists: // the one that the user left
		return nil
	}
	_, err := localTmux(ctx, "select-window", "-t", "="+e.tmux()+":="+selected)
	return err
}

// killTmux ends the local tmux session of a repository, if there is one.
func killTmux(ctx context.Context, name string) error {
	if _, err := exec.LookPath("tmux"); err != nil || !hasTmux(ctx, name) {
		return nil //nolint:nilerr // without tmux there is no session
	}
	_, err := localTmux(ctx, "kill-session", "-t", "="+name)
	return err
}

// switchTmux shows a local tmux session: in the tmux that this runs in, or by attaching
// to it.
func (s *Sessionizer) switchTmux(ctx context.Context, name string) error {
	if os.Getenv("TMUX") != "" {
		_, err := localTmux(ctx, "switch-client", "-t", "="+name)
		return err
	}
	tty, ok := work.TerminalOf(s.Terminal.In)
	if !ok {
		s.Progressf("note: standard input is not a terminal, so nothing is attached\n  → tmux attach -t %s", name)
		return nil
	}
	path, err := gitsafe.NeedProgram("tmux", "has the windows of a session")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, path, "attach-session", "-t", "="+name)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, s.Terminal.Out, s.Terminal.Err
	return cmd.Run()
}

// pick shows the selection in fzf. "" means that the user left it.
func (s *Sessionizer) pick(ctx context.Context, lines []string) (string, error) {
	path, err := gitsafe.NeedProgram("fzf", "shows the selection")
	if err != nil {
		return "", err
	}
	if _, tty := work.TerminalOf(s.Terminal.In); !tty {
		return "", work.UsageErrorf("the selection requires a terminal").WithHint("name a repository: agentlab sessionizer OWNER/REPO")
	}
	for {
		cmd := exec.CommandContext(ctx, path, "--no-multi", "--no-sort", "--prompt=repository> ")
		cmd.Stdin, cmd.Stderr = strings.NewReader(strings.Join(lines, "\n")+"\n"), s.Terminal.Err
		out, err := cmd.Output()
		if e, ok := errors.AsType[*exec.ExitError](err); ok && (e.ExitCode() == 130 || e.ExitCode() == 1) {
			return "", nil // left, or nothing matches
		}
		if err != nil {
			return "", agentlab.Errorf(agentlab.CodeUnavailable, "fzf failed: %w", err)
		}
		if repo := chosenLine(string(out)); repo != "" {
			return repo, nil
		}
	}
}
