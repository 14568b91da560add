package hostcmd

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func daemonCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "daemon", Short: "Run, start, stop and inspect the daemon",
		Long: `Run, start, stop and inspect the daemon. Other commands start the user's daemon
if none is running. Sandboxes keep running while the daemon is stopped.`,
	}
	cmd.AddCommand(
		&cobra.Command{Use: "run", Short: "Run the daemon in the foreground", Args: cli.ExactArgs(), RunE: func(*cobra.Command, []string) error { return daemonRun(a) }},
		&cobra.Command{Use: "start", Short: "Start the daemon in the background", Args: cli.ExactArgs(), RunE: func(cmd *cobra.Command, _ []string) error { return daemonStart(cmd.Context(), a) }},
		endingCmd("restart", "Stop the daemon and start the installed version; sandboxes keep running", func(ctx context.Context, force bool) error { return daemonRestart(ctx, a, force) }),
		endingCmd("stop", "Stop the daemon; sandboxes keep running", func(ctx context.Context, force bool) error { return daemonStop(ctx, a, force) }),
		&cobra.Command{Use: "status", Short: "Show whether the daemon is running, without starting it", Args: cli.ExactArgs(), RunE: func(cmd *cobra.Command, _ []string) error { return daemonStatus(cmd.Context(), a) }},
		daemonLogsCmd(a),
		confirmClockCmd(a),
	)
	return cmd
}

// endingCmd returns a command that stops the daemon with end.
func endingCmd(use, short string, end func(ctx context.Context, force bool) error) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: use, Short: short, Args: cli.ExactArgs(),
		Long: short + ".\n\nA build of an image is interrupted only after a confirmation, or with --force. A later\nbuild continues from the parts that are complete.",
		RunE: func(cmd *cobra.Command, _ []string) error { return end(cmd.Context(), force) },
	}
	cmd.Flags().BoolVar(&force, "force", false, "interrupt builds of images")
	return cmd
}

func daemonRun(a *cli.App) error {
	binary, err := config.FindProgram("agentlabd")
	if err != nil {
		return err
	}
	return syscall.Exec(binary, []string{binary, "run"}, os.Environ())
}

func daemonStart(ctx context.Context, a *cli.App) error {
	if err := a.LocalOnly(); err != nil {
		return err
	}
	c, err := a.Connect(ctx)
	if err != nil {
		return err
	}
	text := "the daemon is already running"
	if a.Started {
		text = "daemon started"
	}
	return a.Done(map[string]any{"running": true, "started": a.Started, "socket": c.Socket()}, "%s", text)
}

// findDaemon returns the socket of the daemon of this machine and whether it is
// running, without starting it.
func findDaemon(ctx context.Context, a *cli.App) (socket string, running bool, err error) {
	if err := a.LocalOnly(); err != nil {
		return "", false, err
	}
	if socket, err = a.SocketPath(); err != nil {
		return "", false, err
	}
	err = cli.Ping(ctx, socket)
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeDenied {
		return socket, false, nil
	}
	return socket, err == nil, err
}

func daemonStatus(ctx context.Context, a *cli.App) error {
	socket, running, err := findDaemon(ctx, a)
	if err != nil {
		return err
	}
	if !running {
		return noDaemonStatus(a, socket)
	}
	s, err := client.New(socket).Status(ctx)
	if err != nil {
		return err
	}
	v := map[string]any{"running": true, "socket": socket, "pid": s.PID, "version": s.Version, "state_dir": s.StateDir}
	return a.Emit(v, func() error {
		_, err := fmt.Fprintf(a.Stdout, "running: %s, pid %d (%s)\nstate: %s\n", s.Version, s.PID, socket, cli.OrDash(s.StateDir))
		return err
	})
}

func noDaemonStatus(a *cli.App, socket string) error {
	v, text := map[string]any{"running": false, "socket": socket}, fmt.Sprintf("not running (%s)\n", socket)
	if a.Socket == "" { // otherwise the directory is not known
		p, err := a.Paths()
		if err != nil {
			return err
		}
		v["state_dir"], text = p.State, text+fmt.Sprintf("state: %s\n", p.State)
	}
	if err := a.Emit(v, func() error { _, err := fmt.Fprint(a.Stdout, text); return err }); err != nil {
		return err
	}
	return work.ExitStatus(cli.ExitFailure)
}

func daemonLogsCmd(a *cli.App) *cobra.Command {
	var lines int
	cmd := &cobra.Command{Use: "logs", Short: "Print the end of the daemon's log", Args: cli.ExactArgs()}
	cmd.Flags().IntVarP(&lines, "lines", "n", 200, "print at most this many lines; -1 means all")
	cmd.RunE = func(*cobra.Command, []string) error {
		if err := a.LocalOnly(); err != nil {
			return err
		}
		p, err := a.Paths()
		if err != nil {
			return err
		}
		text, err := os.ReadFile(p.DaemonLog())
		if err != nil {
			return agentlab.Errorf(agentlab.CodeNotFound, "the daemon has no log: %w", err).WithHint("start it: agentlab daemon start")
		}
		all := strings.SplitAfter(strings.TrimSuffix(string(text), "\n"), "\n")
		if lines >= 0 && len(all) > lines {
			all = all[len(all)-lines:]
		}
		_, err = fmt.Fprintln(a.Stdout, strings.Join(all, ""))
		return err
	}
	return cmd
}
