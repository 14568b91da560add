package sessioncmd

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/sessionizer"
)

// sessionizerFlags are the flags of 'agentlab sessionizer'.
type sessionizerFlags struct {
	sessionizer.Options

	list          bool
	stop, destroy string
}

func sessionizerCmd(a *cli.App) *cobra.Command {
	var f sessionizerFlags
	cmd := &cobra.Command{
		Use:   "sessionizer [OWNER/REPO[/WORKTREE]]",
		Short: "Choose a repository, and work on it in tmux windows that show its VM",
		Long: `Choose a repository of repos.txt or a running one in fzf, start its session if it does
not run, and switch to its local tmux session. Its windows vim, server, agent, git and
scratch show terminals in the VM. The work trees of running sessions are listed too, as
OWNER/REPO/BRANCH: each has a window with its own terminal. Running sessions of other
repositories are listed by their names.

The files repos.txt, resources.yaml and network-allowlist.txt are in the directory
sessionizer of the configuration directory; they are created with examples. A
repository without a path is cloned to this machine first.`,
		Example: `  agentlab sessionizer
  agentlab sessionizer octocat/hello-world
  agentlab sessionizer octocat/hello-world/fix-12
  agentlab sessionizer --list
  agentlab sessionizer --stop octocat/hello-world
  agentlab sessionizer --destroy octocat/hello-world`,
		Args: cobra.MaximumNArgs(1),
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.list, "list", false, "list the repositories that have a session, and other running sessions")
	flags.StringVar(&f.stop, "stop", "", "stop the VM of this repository, OWNER/REPO; its disk stays")
	flags.StringVar(&f.destroy, "destroy", "", "delete the session of this repository, OWNER/REPO, with its VM")
	flags.StringVar(&f.Agent, "agent", "", "agent to run: claude, codex, opencode, gemini, or none (default: git config agentlab.agent, or claude)")
	flags.BoolVar(&f.Detach, "detach", false, "do not switch to the tmux session")
	flags.BoolVar(&f.Yes, "yes", false, "do not ask for confirmation")
	flags.BoolVar(&f.Force, "force", false, "with --destroy: also delete work that is not on this machine")
	cmd.MarkFlagsMutuallyExclusive("list", "stop", "destroy")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if len(args) > 0 && (f.list || f.stop != "" || f.destroy != "") {
			return work.UsageErrorf("unexpected argument %q", args[0]).WithHint("usage: %s", cmd.UseLine())
		}
		if f.Force && f.destroy == "" {
			return work.UsageErrorf("--force requires --destroy").WithHint("usage: %s", cmd.UseLine())
		}
		program, err := selfCommand(a)
		if err != nil {
			return err
		}
		s := &sessionizer.Sessionizer{UI: a, C: c, Terminal: a.Attached(), Program: program, Started: func(got session.Started) error { return doneStart(a, got) }, Options: f.Options}
		if err := s.Load(); err != nil {
			return err
		}
		switch {
		case f.list:
			return listSessionizer(ctx, a, s)
		case f.stop != "":
			e, err := s.Stop(ctx, f.stop)
			if err != nil {
				return err
			}
			return a.Done(e, "%s is stopped; its disk stays\n  → agentlab sessionizer %s", e.Repo, e.Repo)
		case f.destroy != "":
			e, err := s.Destroy(ctx, f.destroy)
			if err != nil {
				return err
			}
			return a.Emit(e, cli.Silent)
		}
		return s.Open(ctx, cli.FirstOf(args))
	})
	return cmd
}

// listSessionizer prints the repositories that have a session.
func listSessionizer(ctx context.Context, a *cli.App, s *sessionizer.Sessionizer) error {
	entries, err := s.List(ctx)
	if err != nil {
		return err
	}
	return a.Emit(api.List[sessionizer.Entry]{Items: append([]sessionizer.Entry{}, entries...)}, func() error {
		t := cli.NewTable(a.Stdout, "REPOSITORY", "SESSION", "SANDBOX", "STATE")
		for _, e := range entries {
			t.Row(e.Repo, e.Session, cli.OrDash(e.Sandbox), cli.OrDash(e.State))
			for _, branch := range e.Worktrees {
				t.Row(e.Repo+"/"+branch, e.Session, cli.OrDash(e.Sandbox), cli.OrDash(e.State))
			}
		}
		return t.Flush()
	})
}

// selfCommand is the command line of this program for windows of tmux, whose server has
// an environment of its own. Tokens are not part of it.
func selfCommand(a *cli.App) ([]string, error) {
	path, err := exec.LookPath(os.Args[0])
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the program agentlab is not found: %w", err)
	}
	command := []string{"env"}
	for _, name := range []string{"AGENTLAB_HOME", "AGENTLAB_HOST", "AGENTLAB_TOKEN_FILE", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"} {
		if v := os.Getenv(name); v != "" {
			command = append(command, name+"="+v)
		}
	}
	command = append(command, path)
	for _, f := range [][2]string{{"--socket", a.Socket}, {"--host", a.Host}, {"--token-file", a.TokenFile}} {
		if f[1] != "" {
			command = append(command, f[0]+"="+f[1])
		}
	}
	return command, nil
}
