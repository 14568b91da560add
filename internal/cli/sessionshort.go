package cli

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// lsCmd is 'session list' for the interactive workflow.
func (a *App) lsCmd() *cobra.Command {
	cmd := a.sessionListCmd()
	cmd.Use, cmd.Aliases, cmd.Short = "ls", nil, "List sessions"
	return cmd
}

func (a *App) stopCmd() *cobra.Command {
	var suspend, wait bool
	cmd := &cobra.Command{
		Use: "stop [SESSION]", Short: "Stop the sandbox of a session; its disk stays", Args: cobra.MaximumNArgs(1),
		Long: `Stop the sandbox of the session of this repository. Its disk and workspace stay, and
'agentlab start' starts it again. With --suspend its processes are saved to disk, too,
and continue then. To delete a session, see 'agentlab rm'.`,
	}
	cmd.Flags().BoolVar(&suspend, "suspend", false, "save the processes to disk; not every backend can")
	waitFlag(cmd, &wait, "wait until the sandbox is stopped")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		s, _, err := a.chosenSession(ctx, c, firstOf(args))
		if err != nil {
			return err
		}
		if s.Sandbox == "" {
			return a.done(s, "session %s has no running sandbox", s.Name)
		}
		sb, err := a.stopSandbox(ctx, c, s, suspend, wait)
		if err != nil {
			return err
		}
		return a.done(sb, "session %s: sandbox %s is %s\n  → agentlab start", s.Name, sb.Name, sb.State)
	})
	return cmd
}

// stopSandbox stops the sandbox of a session, or suspends it to disk.
func (a *App) stopSandbox(ctx context.Context, c *client.Client, s api.Session, suspend, wait bool) (sb api.Sandbox, err error) {
	after := work.LastSandboxEvent(ctx, c, s)
	done := work.IsStopped
	if suspend {
		done = work.IsOnDisk
		sb, err = c.StopSession(ctx, s.ID, true)
	} else {
		sb, err = c.StopSandbox(ctx, fmt.Sprint(s.SandboxVMID), api.SandboxStop{})
	}
	if err == nil && wait && !done(sb) {
		sb, err = work.WaitSandbox(ctx, a, c, sb, after, done)
	}
	return sb, err
}

func (a *App) rmCmd() *cobra.Command {
	var how removal
	cmd := &cobra.Command{
		Use: "rm [SESSION]", Short: "Delete a session with its sandbox", Args: cobra.MaximumNArgs(1),
		Long: `Delete the session of this repository with its sandbox, and the remote that 'agentlab
start' added. The workspace goes to the trash, from which 'agentlab workspace undelete'
returns it. A session with commits or changes that this repository does not have is not
deleted without --force; the sandbox is started to find out.`,
	}
	cmd.Flags().BoolVar(&how.yes, "yes", false, "do not ask for confirmation")
	cmd.Flags().BoolVar(&how.force, "force", false, "also delete work that is not in this repository")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		s, l, err := a.chosenSession(ctx, c, firstOf(args))
		if err != nil {
			return err
		}
		l.Session = s.ID
		if err := a.removeSession(ctx, c, &l, how); err != nil {
			return err
		}
		return a.emit(s, silent)
	})
	return cmd
}

func (a *App) attachCmd() *cobra.Command {
	o := startOptions{agent: shellOnly}
	var web bool
	cmd := &cobra.Command{
		Use:   "attach [SESSION[/WORKTREE]|BRANCH|SANDBOX]",
		Short: "Attach to a persistent terminal in a session or sandbox",
		Long: `Attach to the terminal of a session, by default that of this repository, or to that of
one of its work trees. In a repository, the branch of a work tree is enough. tmux or
Zellij keeps the terminal running when you detach with Ctrl-] or when the connection is
lost.

With --web, print the URL of the terminal for a browser, and the token for the login.
Zellij has a web server, tmux has none.

A sandbox without a session has a terminal, too, which shows its recent output when
you attach again.`,
		Example: `  agentlab attach
  agentlab attach fix-12
  agentlab attach app/fix-12
  agentlab attach --web
  agentlab attach play`,
		Args: cobra.MaximumNArgs(1),
	}
	cmd.Flags().StringVar(&o.terminal, "session", "main", "name of the terminal; another name makes a further one")
	cmd.Flags().StringVar(&o.run, "run", "", "command that a new terminal of a session runs first, in the syntax of sh")
	cmd.Flags().BoolVar(&web, "web", false, "print the URL and the token for a browser instead of attaching")
	multiplexerFlag(cmd, &o.multiplexer)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		if _, tty := work.TerminalOf(a.Stdin); !tty && !web {
			name, _, _ := strings.Cut(firstOf(args), "/")
			return work.UsageErrorf("attach requires a terminal as standard input").WithHint("to run one command: agentlab exec %s -- COMMAND", cmp.Or(name, "SANDBOX"))
		}
		if err := attach.CheckMultiplexer(o.multiplexer); err != nil {
			return err
		}
		t, err := a.chosenTarget(ctx, c, firstOf(args))
		if err != nil {
			return err
		}
		if t.sandbox != "" {
			if o.run != "" || web || o.multiplexer != "" {
				return work.UsageErrorf("--run, --web and --terminal are for sessions, and %s is a sandbox without one", t.sandbox)
			}
			return a.attachSandbox(ctx, c, t.sandbox, o.terminal)
		}
		o.worktree = t.worktree
		return a.attachSession(ctx, c, t.session, t.link, o, web)
	})
	return cmd
}

// openTarget is what a terminal or an editor opens: a session, or a sandbox without one.
type openTarget struct {
	session  api.Session
	link     session.Link
	worktree string // its branch; "" means the main one
	sandbox  string // name
}

// chosenTarget returns what an argument names: a session and perhaps a work tree of it, a
// sandbox, or else the work tree of a branch in the session of this repository.
func (a *App) chosenTarget(ctx context.Context, c *client.Client, arg string) (openTarget, error) {
	name, worktree, _ := strings.Cut(arg, "/")
	s, l, err := a.chosenSession(ctx, c, name)
	if agentlab.CodeOf(err) != agentlab.CodeNotFound || name == "" {
		return openTarget{session: s, link: l, worktree: worktree}, err
	}
	if worktree == "" {
		var sb api.Sandbox
		if sb, err = c.Sandbox(ctx, name); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return openTarget{sandbox: sb.Name}, err
		}
	}
	if l.Session != "" {
		if s, serr := c.Session(ctx, l.Session); serr == nil {
			return openTarget{session: s, link: l, worktree: arg}, nil
		}
	}
	return openTarget{}, err
}

// workDir returns the directory of a work tree in the running sandbox of a session; ""
// means the main one.
func workDir(ctx context.Context, c *client.Client, s api.Session, sb api.Sandbox, l session.Link, worktree string) (string, error) {
	if worktree == "" {
		return guestapi.RepoDir, nil
	}
	w := newOpened(c, s, sb, l)
	var err error
	if w.state, err = w.Repo.State(ctx); err != nil {
		return "", err
	}
	t, err := w.worktree(worktree)
	return session.JoinGuest(t.Dir), err
}

// attachSession attaches to a terminal of a session, or with web prints its URL.
func (a *App) attachSession(ctx context.Context, c *client.Client, s api.Session, l session.Link, o startOptions, web bool) error {
	choice, err := attach.MultiplexerChoice(ctx, c, s, o.multiplexer)
	if err != nil {
		return err
	}
	open := guestapi.ExecRequest{Command: openCommand(o, guestapi.RepoDir), TTY: true, Dir: "/"}
	if choice == nil && o.worktree == "" && !web { // the terminal is the first command: the user waits for it
		var conn net.Conn
		sb, err := a.resumeFor(ctx, c, s, 0, func(sandbox string) (err error) {
			conn, err = a.attached().Connect(ctx, c, sandbox, open)
			return err
		})
		if err != nil {
			return err
		}
		return a.attachTerminal(ctx, c, s, sb, l, open, conn)
	}
	sb, err := a.resumeForWork(ctx, c, s, 0)
	if err != nil {
		return err
	}
	sandbox := fmt.Sprint(sb.VMID)
	dir, err := workDir(ctx, c, s, sb, l, o.worktree)
	if err != nil {
		return err
	}
	if err := attach.ChooseMultiplexer(ctx, c, s, sandbox, choice); err != nil {
		return err
	}
	open.Command = openCommand(o, dir)
	if web {
		return a.openTerminalWeb(ctx, c, s, sandbox, open)
	}
	return a.attachTerminal(ctx, c, s, sb, l, open, nil)
}

// attachTerminal is openTerminal for a session, with what follows.
func (a *App) attachTerminal(ctx context.Context, c *client.Client, s api.Session, sb api.Sandbox, l session.Link, open guestapi.ExecRequest, conn net.Conn) error {
	err := a.attached().Open(ctx, c, fmt.Sprint(sb.VMID), open, conn)
	if err == nil {
		a.noteKeepsRunning(s, l.Session == s.ID)
	}
	return err
}

// attachSandbox attaches to a terminal of a sandbox that has no session.
func (a *App) attachSandbox(ctx context.Context, c *client.Client, sandbox, name string) error {
	req := guestapi.AttachRequest{Session: name}
	req.Rows, req.Cols, req.Term = a.attached().Size()
	conn, err := c.Attach(ctx, sandbox, req)
	if err != nil {
		return err
	}
	a.Progressf("attached to terminal %q; detach with Ctrl-]", name)
	defer attach.NoticeLease(ctx, c, sandbox, a.Stderr)()
	if err := a.attached().Run(ctx, conn, a.Stdin, true); err != nil {
		return err
	}
	a.Progressf("sandbox %s keeps running\n  → agentlab attach %[1]s\n  → agentlab sandbox destroy %[1]s", sandbox)
	return nil
}
