package sessioncmd

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// lsCmd is 'session list' for the interactive workflow.
func lsCmd(a *cli.App) *cobra.Command {
	cmd := sessionListCmd(a)
	cmd.Use, cmd.Aliases, cmd.Short = "ls", nil, "List sessions"
	return cmd
}

func stopCmd(a *cli.App) *cobra.Command {
	var suspend, wait bool
	cmd := &cobra.Command{
		Use: "stop [SESSION]", Short: "Stop the sandbox of a session; its disk stays", Args: cobra.MaximumNArgs(1),
		Long: `Stop the sandbox of the session of this repository. Its disk and workspace stay, and
'agentlab start' starts it again. With --suspend its processes are saved to disk, too,
and continue then. To delete a session, see 'agentlab rm'.`,
	}
	cmd.Flags().BoolVar(&suspend, "suspend", false, "save the processes to disk; not every backend can")
	cli.WaitFlag(cmd, &wait, "wait until the sandbox is stopped")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		s, _, err := session.Choose(ctx, a, c, cli.FirstOf(args))
		if err != nil {
			return err
		}
		if s.Sandbox == "" {
			return a.Done(s, "session %s has no running sandbox", s.Name)
		}
		sb, err := session.Stop(ctx, a, c, s, suspend, wait)
		if err != nil {
			return err
		}
		return a.Done(sb, "session %s: sandbox %s is %s\n  → agentlab start", s.Name, sb.Name, sb.State)
	})
	return cmd
}

func rmCmd(a *cli.App) *cobra.Command {
	var how session.Removal
	cmd := &cobra.Command{
		Use: "rm [SESSION]", Short: "Delete a session with its sandbox", Args: cobra.MaximumNArgs(1),
		Long: `Delete the session of this repository with its sandbox, and the remote that 'agentlab
start' added. The workspace goes to the trash, from which 'agentlab workspace undelete'
returns it. A session with commits or changes that this repository does not have is not
deleted without --force; the sandbox is started to find out.`,
	}
	cmd.Flags().BoolVar(&how.Yes, "yes", false, "do not ask for confirmation")
	cmd.Flags().BoolVar(&how.Force, "force", false, "also delete work that is not in this repository")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		s, l, err := session.Choose(ctx, a, c, cli.FirstOf(args))
		if err != nil {
			return err
		}
		l.Session = s.ID
		if err := session.Remove(ctx, a, c, &l, how); err != nil {
			return err
		}
		return a.Emit(s, cli.Silent)
	})
	return cmd
}

func attachCmd(a *cli.App) *cobra.Command {
	o := session.StartOptions{Agent: session.ShellOnly}
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
	cmd.Flags().StringVar(&o.Terminal, "session", "main", "name of the terminal; another name makes a further one")
	cmd.Flags().StringVar(&o.Run, "run", "", "command that a new terminal of a session runs first, in the syntax of sh")
	cmd.Flags().BoolVar(&web, "web", false, "print the URL and the token for a browser instead of attaching")
	multiplexerFlag(cmd, &o.Multiplexer)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if _, tty := work.TerminalOf(a.Stdin); !tty && !web {
			name, _, _ := strings.Cut(cli.FirstOf(args), "/")
			return work.UsageErrorf("attach requires a terminal as standard input").WithHint("to run one command: agentlab exec %s -- COMMAND", cmp.Or(name, "SANDBOX"))
		}
		if err := attach.CheckMultiplexer(o.Multiplexer); err != nil {
			return err
		}
		t, err := session.ChooseTarget(ctx, a, c, cli.FirstOf(args))
		if err != nil {
			return err
		}
		if t.Sandbox != "" {
			if o.Run != "" || web || o.Multiplexer != "" {
				return work.UsageErrorf("--run, --web and --terminal are for sessions, and %s is a sandbox without one", t.Sandbox)
			}
			return attachSandbox(ctx, a, c, t.Sandbox, o.Terminal)
		}
		o.Worktree = t.Worktree
		if web {
			choice, err := attach.MultiplexerChoice(ctx, c, t.Session, o.Multiplexer)
			if err != nil {
				return err
			}
			sb, open, err := session.TerminalOf(ctx, a, c, t.Session, t.Link, o, choice)
			if err != nil {
				return err
			}
			return openTerminalWeb(ctx, a, c, t.Session, fmt.Sprint(sb.VMID), open)
		}
		return session.Attach(ctx, a, c, a.Attached(), t.Session, t.Link, o)
	})
	return cmd
}

// attachSandbox attaches to a terminal of a sandbox that has no session.
func attachSandbox(ctx context.Context, a *cli.App, c *client.Client, sandbox, name string) error {
	req := guestapi.AttachRequest{Session: name}
	req.Rows, req.Cols, req.Term = a.Attached().Size()
	conn, err := c.Attach(ctx, sandbox, req)
	if err != nil {
		return err
	}
	a.Progressf("attached to terminal %q; detach with Ctrl-]", name)
	defer attach.NoticeLease(ctx, c, sandbox, a.Stderr)()
	if err := a.Attached().Run(ctx, conn, a.Stdin, true); err != nil {
		return err
	}
	a.Progressf("sandbox %s keeps running\n  → agentlab attach %[1]s\n  → agentlab sandbox destroy %[1]s", sandbox)
	return nil
}
