package session

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
)

// Target is what a terminal or an editor opens: a session, or a sandbox without one.
type Target struct {
	Session  api.Session
	Link     Link
	Worktree string // its branch; "" means the main one
	Sandbox  string // name
}

// ChooseTarget returns what an argument names: a session and perhaps a work tree of it, a
// sandbox, or else the work tree of a branch in the session of this repository.
func ChooseTarget(ctx context.Context, ui work.UI, c *client.Client, arg string) (Target, error) {
	name, worktree, _ := strings.Cut(arg, "/")
	s, l, err := Choose(ctx, ui, c, name)
	if agentlab.CodeOf(err) != agentlab.CodeNotFound || name == "" {
		return Target{Session: s, Link: l, Worktree: worktree}, err
	}
	if worktree == "" {
		var sb api.Sandbox
		if sb, err = c.Sandbox(ctx, name); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return Target{Sandbox: sb.Name}, err
		}
	}
	if l.Session != "" {
		if s, serr := c.Session(ctx, l.Session); serr == nil {
			return Target{Session: s, Link: l, Worktree: arg}, nil
		}
	}
	return Target{}, err
}

// WorkDir returns the directory of a work tree in the running sandbox of a session; ""
// means the main one.
func WorkDir(ctx context.Context, c *client.Client, s api.Session, sb api.Sandbox, l Link, worktree string) (string, error) {
	if worktree == "" {
		return guestapi.RepoDir, nil
	}
	w := newOpened(c, s, sb, l)
	var err error
	if w.Guest, err = w.Repo.State(ctx); err != nil {
		return "", err
	}
	t, err := w.worktree(worktree)
	return JoinGuest(t.Dir), err
}

// Attach attaches to a terminal of a session.
func Attach(ctx context.Context, ui work.UI, c *client.Client, terminal attach.Terminal, s api.Session, l Link, o StartOptions) error {
	choice, err := attach.MultiplexerChoice(ctx, c, s, o.Multiplexer)
	if err != nil {
		return err
	}
	if choice != nil || o.Worktree != "" {
		sb, open, err := TerminalOf(ctx, ui, c, s, l, o, choice)
		if err != nil {
			return err
		}
		return attachTerminal(ctx, ui, c, terminal, s, sb, l, open, nil)
	}
	// The terminal is the first command: the user waits for it.
	open := terminalRequest(o, guestapi.RepoDir)
	var conn net.Conn
	sb, err := resumeFor(ctx, ui, c, s, 0, func(sandbox string) (err error) {
		conn, err = terminal.Connect(ctx, c, sandbox, open)
		return err
	})
	if err != nil {
		return err
	}
	return attachTerminal(ctx, ui, c, terminal, s, sb, l, open, conn)
}

// TerminalOf continues the sandbox of a session, and returns the request for a terminal
// in it. choice is the result of attach.MultiplexerChoice.
func TerminalOf(ctx context.Context, ui work.UI, c *client.Client, s api.Session, l Link, o StartOptions, choice *guestapi.SessionTerminal) (sb api.Sandbox, open guestapi.ExecRequest, err error) {
	if sb, err = Resume(ctx, ui, c, s, 0); err != nil {
		return sb, open, err
	}
	dir, err := WorkDir(ctx, c, s, sb, l, o.Worktree)
	if err != nil {
		return sb, open, err
	}
	return sb, terminalRequest(o, dir), attach.ChooseMultiplexer(ctx, c, s, fmt.Sprint(sb.VMID), choice)
}

// terminalRequest is the request for a terminal in a directory.
func terminalRequest(o StartOptions, dir string) guestapi.ExecRequest {
	return guestapi.ExecRequest{Command: openCommand(o, dir), TTY: true, Dir: "/"}
}

// attachTerminal opens the terminal of a session, and says what follows. conn is the first
// connection; nil makes it.
func attachTerminal(ctx context.Context, ui work.UI, c *client.Client, terminal attach.Terminal, s api.Session, sb api.Sandbox, l Link, open guestapi.ExecRequest, conn net.Conn) error {
	err := terminal.Open(ctx, c, fmt.Sprint(sb.VMID), open, conn)
	if err == nil {
		noteKeepsRunning(ui, s, l.Session == s.ID)
	}
	return err
}

// openCommand returns the command that attaches to the terminal of a work tree.
func openCommand(o StartOptions, dir string) []string {
	name := "main"
	switch {
	case o.Terminal != "" && o.Terminal != name:
		name = tmuxName(o.Terminal)
	case o.Worktree != "":
		name = terminalName(o.Worktree)
	}
	cmd := []string{"agentlab-agent", "open", "--session", name, "--dir", dir}
	if o.Run != "" {
		cmd = append(cmd, "--run", o.Run)
	}
	switch {
	case o.shell:
		return append(cmd, "--shell")
	case o.Agent == ShellOnly:
		return cmd
	}
	cmd = append(cmd, "--agent", o.Agent)
	if o.Resume {
		cmd = append(cmd, "--resume")
	}
	return append(append(cmd, "--"), o.Args...)
}

// terminalName is the name of the terminal of a work tree.
func terminalName(branch string) string { return tmuxName("worktree/" + branch) }

// tmuxName returns a name without the characters that tmux reserves.
func tmuxName(name string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(":. \\", r) {
			return '_'
		}
		return r
	}, name)
}

// OpenStarted attaches to the terminal of a session until the user detaches.
func OpenStarted(ctx context.Context, ui work.UI, c *client.Client, terminal attach.Terminal, p Prepared) error {
	ui.Progressf("attaching to %s of session %s; detach with Ctrl-]", ShownPath(p.Dir), p.Session.Name)
	auto := startSync(ctx, ui, newOpened(c, p.Session, p.Sandbox, p.link), p.sync)
	err := terminal.Open(ctx, c, fmt.Sprint(p.Sandbox.VMID), p.open, nil)
	auto.stop()
	if err != nil {
		return err
	}
	auto.report(ui)
	noteKeepsRunning(ui, p.Session, true)
	return nil
}

// noteKeepsRunning says what follows after a terminal of a session; here reports whether
// it is the session of the repository in the current directory.
func noteKeepsRunning(ui work.UI, s api.Session, here bool) {
	sync := ""
	if here {
		sync = "\n  → agentlab sync"
	}
	ui.Progressf("session %s keeps running%s\n  → agentlab stop %[1]s", s.Name, sync)
}
