package sessioncmd

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

func addStartFlags(cmd *cobra.Command, o *session.StartOptions) {
	f := cmd.Flags()
	f.StringVar(&o.Profile, "profile", "", "profile of a new session (default: git config agentlab.profile, or session_profile in config.yaml; with --fresh that of the old session; see 'agentlab profile list')")
	f.StringVar(&o.Image, "image", "", "image of a new session (default: image in .agentlab.yaml of the repository, or else the profile's)")
	f.BoolVar(&o.NoSetup, "no-setup", false, "do not run the commands under setup in .agentlab.yaml of the repository")
	cli.BackendFlag(f, &o.Backend, "a new session (default: the profile's, or the configured default)")
	f.StringVar(&o.Branch, "branch", "", "use the session of this branch, with its own VM, and check the branch out in it")
	f.StringVar(&o.Worktree, "worktree", "", "work in the work tree of this branch, in the VM of the session; it is created if it is missing")
	f.BoolVar(&o.Fresh, "fresh", false, "delete the session with its sandbox first, and start a new one")
	f.BoolVar(&o.Yes, "yes", false, "with --fresh: delete without confirmation")
	f.BoolVar(&o.Detach, "detach", false, "do not attach to the terminal")
	f.BoolVar(&o.Resume, "resume", false, "continue the last conversation of the agent")
	f.BoolVar(&o.NoEnv, "no-env", false, "do not send the files .env, .env.* and .envrc that git does not track (see 'agentlab sync-env')")
	f.BoolVar(&o.WithChanges, "with-changes", false, "carry uncommitted changes into the sandbox; they also stay here")
	f.Var(cli.DurationFlag(&o.TTL, agentlab.MaxTTL), "ttl", "duration of the lease of a new sandbox, e.g. 4h (default: the profile's)")
	multiplexerFlag(cmd, &o.Multiplexer)
	cli.DevcontainerFlag(f, &o.Devcontainer)
	f.StringVar(&o.Sync, "sync", "", "when to fetch commits while attached: manual, on-commit or on-idle (default: git config agentlab.sync, or manual)")
}

func startCmd(a *cli.App) *cobra.Command {
	var o session.StartOptions
	cmd := &cobra.Command{
		Use:   "start [PATH] [-- AGENT-ARG...]",
		Short: "Start or continue the session of a repository, and attach to its agent",
		Long: `Start or continue the session of a Git repository: a persistent VM with a copy of
the repository at /workspace, in which an agent works with every permission. The
commits of the current branch are pushed into the VM; its work comes back with
'agentlab sync'. Nothing in the VM can access this machine.

The terminal keeps running when you detach (Ctrl-], or Ctrl-B D). The state of the
session persists until 'agentlab rm'.`,
		Example: `  agentlab start
  agentlab start ~/src/app --agent codex
  agentlab start --worktree fix-12
  agentlab start --detach --json`,
	}
	addStartFlags(cmd, &o)
	cmd.Flags().StringVar(&o.Agent, "agent", "", "agent to run: claude, codex, opencode, gemini, or none for a shell (default: git config agentlab.agent, or claude)")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		n := cmd.ArgsLenAtDash()
		if n < 0 {
			n = len(args)
		}
		if n > 1 {
			return work.UsageErrorf("unexpected argument %q", args[1]).WithHint("arguments of the agent follow --")
		}
		o.Path = "."
		if n == 1 {
			o.Path = args[0]
		}
		o.Args = args[n:]
		return start(ctx, a, c, o)
	})
	return cmd
}

// agentCmd returns the command that starts a session with an agent.
func agentCmd(a *cli.App, name string) *cobra.Command {
	o := session.StartOptions{Path: ".", Agent: name}
	cmd := &cobra.Command{
		Use:   name + " [flags] [-- ARG...]",
		Short: "Run " + name + " in the session of this repository",
		Long: fmt.Sprintf(`Run %[1]s in the session of the repository in the current directory, with every
permission, in its VM. It is 'agentlab start --agent %[1]s'. Words after -- are
arguments of %[1]s. If it is running already, attach to it.`, name),
		Example: fmt.Sprintf("  agentlab %[1]s\n  agentlab %[1]s --resume\n  agentlab %[1]s --worktree fix-12", name),
	}
	addStartFlags(cmd, &o)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if n := cmd.ArgsLenAtDash(); n != 0 && len(args) > 0 {
			return work.UsageErrorf("unexpected argument %q", args[0]).WithHint("arguments of %s follow --, e.g. agentlab %s -- %q", name, name, args[0])
		}
		o.Args = args
		return start(ctx, a, c, o)
	})
	return cmd
}

// start starts or continues a session, and attaches to its agent if it can.
func start(ctx context.Context, a *cli.App, c *client.Client, o session.StartOptions) error {
	p, err := session.Start(ctx, a, c, o)
	if err != nil {
		return err
	}
	_, tty := work.TerminalOf(a.Stdin)
	if tty && !o.Detach && !a.JSON {
		return session.OpenStarted(ctx, a, c, a.Attached(), p)
	}
	if !tty && !o.Detach && !a.JSON {
		a.Progressf("note: standard input is not a terminal, so nothing is attached")
	}
	if err := p.RunDetached(ctx, c); err != nil {
		return err
	}
	return doneStart(a, p.Started)
}

// doneStart prints a session whose agent runs in the background.
func doneStart(a *cli.App, got session.Started) error {
	terminal := got.Session.Name
	if got.Worktree != "" {
		terminal += "/" + got.Worktree
	}
	return a.Done(got, "session %s is running (sandbox %s, %s)\n  → agentlab attach %s", got.Session.Name, got.Sandbox.Name, session.ShownPath(got.Dir), terminal)
}
