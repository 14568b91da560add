package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/config"
)

// daemonStartLimit is how long a daemon may take to answer after it was started.
const (
	daemonStartLimit = 30 * time.Second
	daemonPoll       = 20 * time.Millisecond
)

// paths returns the folders of the system's daemon where one is installed and
// running, else of the user's own. AGENTLAB_HOME always means one's own.
func (a *App) paths() (config.Paths, error) {
	if os.Getenv("AGENTLAB_HOME") == "" {
		system, err := config.ResolvePaths(os.Getenv, true)
		if err != nil {
			return config.Paths{}, err
		}
		if _, err := os.Stat(system.Socket()); err == nil {
			return system, nil
		}
	}
	return config.ResolvePaths(os.Getenv, false)
}

func (a *App) socketPath() (string, error) {
	if a.socket != "" {
		return filepath.Abs(a.socket)
	}
	p, err := a.paths()
	if err != nil {
		return "", err
	}
	return p.Socket(), p.CheckRun()
}

// connect returns a client of the daemon, starting the user's own daemon when
// none answers. A socket that was named is never started for.
func (a *App) connect(ctx context.Context) (*client.Client, error) {
	c, err := a.dial()
	if err != nil || c.Socket() == "" {
		return c, err
	}
	err = c.Ping(ctx)
	switch {
	case err == nil:
	case a.socket != "" || agentlab.CodeOf(err) == agentlab.CodeDenied:
		return nil, err
	default:
		if err := a.startDaemon(ctx); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// dial returns a client of the daemon that is meant, which need not run.
func (a *App) dial() (*client.Client, error) {
	url, err := a.remoteURL()
	if err != nil {
		return nil, err
	}
	if url != "" {
		return a.remote(url)
	}
	if a.tokenFile != "" {
		return nil, usageErrorf("--token-file is for --host")
	}
	socket, err := a.socketPath()
	if err != nil {
		return nil, err
	}
	return client.New(socket), nil
}

// ping tells whether a daemon that we may trust listens on the socket.
func ping(ctx context.Context, socket string) error {
	return client.New(socket).Ping(ctx)
}

// startDaemon starts the user-mode daemon in the background and waits until
// it answers.
func (a *App) startDaemon(ctx context.Context) error {
	p, err := a.paths()
	if err != nil {
		return err
	}
	binary, err := config.FindProgram("agentlabd")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(p.Run, 0o700); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot make the runtime folder: %w", err)
	}
	if err := p.CheckRun(); err != nil {
		return err
	}
	startLog, err := openStartLog(filepath.Join(p.Run, "agentlabd.start.log"))
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot write the daemon's start log: %w", err)
	}
	defer func() { _ = startLog.Close() }()
	cmd := exec.Command(binary, "run") //nolint:gosec,noctx // our own binary, which outlives this command
	cmd.Stderr = startLog
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Dir = "/"
	if p.Home != "" { // AGENTLAB_HOME may be relative to our directory, which is not the daemon's
		cmd.Env = append(os.Environ(), "AGENTLAB_HOME="+p.Home)
	}
	if err := cmd.Start(); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot start %s: %w", binary, err)
	}
	a.started = true
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(exited)
	}()
	return a.awaitDaemon(ctx, p.Socket(), exited, startLog)
}

// openStartLog opens an empty log. What lies there already is emptied only
// when it is a file of our own: not what a link names, nor a pipe.
func openStartLog(name string) (_ *os.File, err error) {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600) //nolint:gosec // in our runtime folder
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = file.Close()
		}
	}()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if sys, ok := info.Sys().(*syscall.Stat_t); !ok || !info.Mode().IsRegular() || int(sys.Uid) != os.Geteuid() || sys.Nlink != 1 {
		return nil, fmt.Errorf("%s is no file of yours", name)
	}
	return file, file.Truncate(0)
}

// awaitDaemon waits until the socket answers. Two commands may start two
// daemons at once; the one that finds the home locked ends, and the other
// answers soon after.
func (a *App) awaitDaemon(ctx context.Context, socket string, exited <-chan struct{}, startLog io.ReaderAt) error {
	deadline := time.NewTimer(daemonStartLimit)
	defer deadline.Stop()
	tick := time.NewTicker(daemonPoll)
	defer tick.Stop()
	var ended bool
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-exited:
			exited, ended = nil, true
			deadline.Reset(2 * time.Second)
		case <-tick.C:
			if ping(ctx, socket) == nil {
				return nil
			}
		case <-deadline.C:
			return startFailure(startLog, ended)
		}
	}
}

func startFailure(startLog io.ReaderAt, ended bool) error {
	text, _ := io.ReadAll(io.NewSectionReader(startLog, 0, 16<<10))
	what := "the daemon did not answer in time"
	if ended {
		what = "the daemon did not start"
	}
	why := daemonComplaint(string(text))
	if why == "" {
		return agentlab.Errorf(agentlab.CodeUnavailable, "%s", what).WithHint("see 'agentlab daemon logs', or run 'agentlabd run' in a terminal")
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "%s: %s", what, why).WithHint("put that right and try again; 'agentlab daemon run' shows more")
}

// daemonComplaint finds the daemon's own error among its first lines.
func daemonComplaint(log string) string {
	var kept []string
	for line := range strings.Lines(log) {
		line = strings.TrimRight(line, "\n")
		if s, ok := strings.CutPrefix(line, "agentlabd: "); ok {
			kept = append(kept, s)
		} else if len(kept) > 0 && strings.HasPrefix(line, "  ") {
			kept = append(kept, strings.TrimSpace(line))
		}
	}
	return plain(strings.Join(kept, "; "))
}

func (a *App) daemonCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "daemon", Short: "Run, start, stop and look at the daemon",
		Long: "Commands start the user's daemon when none answers, so these are needed rarely. Sandboxes go on while no daemon runs.",
	}
	cmd.AddCommand(
		&cobra.Command{Use: "run", Short: "Run the daemon in the foreground", Args: exactArgs(), RunE: func(*cobra.Command, []string) error { return a.daemonRun() }},
		&cobra.Command{Use: "start", Short: "Start the daemon in the background", Args: exactArgs(), RunE: func(cmd *cobra.Command, _ []string) error { return a.daemonStart(cmd.Context()) }},
		&cobra.Command{Use: "stop", Short: "Stop the daemon; sandboxes go on", Args: exactArgs(), RunE: func(cmd *cobra.Command, _ []string) error { return a.daemonStop(cmd.Context()) }},
		&cobra.Command{Use: "status", Short: "Tell whether the daemon runs, without starting it", Args: exactArgs(), RunE: func(cmd *cobra.Command, _ []string) error { return a.daemonStatus(cmd.Context()) }},
		a.daemonLogsCmd(),
		a.confirmClockCmd(),
	)
	return cmd
}

func (a *App) daemonRun() error {
	binary, err := config.FindProgram("agentlabd")
	if err != nil {
		return err
	}
	return syscall.Exec(binary, []string{binary, "run"}, os.Environ()) //nolint:gosec // our own binary
}

func (a *App) daemonStart(ctx context.Context) error {
	if err := a.onlyHere(); err != nil {
		return err
	}
	if _, err := a.connect(ctx); err != nil {
		return err
	}
	if a.started {
		a.progressf("the daemon is started")
	} else {
		a.progressf("the daemon was running already")
	}
	return nil
}

// onlyHere refuses to mean a daemon of this machine when another one was named.
func (a *App) onlyHere() error {
	url, err := a.remoteURL()
	if err == nil && url != "" {
		err = usageErrorf("this works only on the daemon's own machine").WithHint("do it there, or unset AGENTLAB_HOST to mean the daemon of this machine")
	}
	return err
}

// findDaemon looks for the daemon of this machine, without starting one.
func (a *App) findDaemon(ctx context.Context) (socket string, running bool, err error) {
	if err := a.onlyHere(); err != nil {
		return "", false, err
	}
	if socket, err = a.socketPath(); err != nil {
		return "", false, err
	}
	err = ping(ctx, socket)
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeDenied {
		return socket, false, nil
	}
	return socket, err == nil, err
}

func (a *App) daemonStatus(ctx context.Context) error {
	socket, running, err := a.findDaemon(ctx)
	if err != nil {
		return err
	}
	if !running {
		if a.json {
			if err := a.printJSON(map[string]any{"running": false, "socket": socket}); err != nil {
				return err
			}
		} else {
			fmt.Fprintf(a.Stdout, "not running (%s)\n", socket)
		}
		return statusError(exitFailure)
	}
	s, err := client.New(socket).Status(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(map[string]any{"running": true, "socket": socket, "pid": s.PID, "version": s.Version})
	}
	_, err = fmt.Fprintf(a.Stdout, "running: %s, pid %d (%s)\n", s.Version, s.PID, socket)
	return err
}

func (a *App) daemonLogsCmd() *cobra.Command {
	var lines int
	cmd := &cobra.Command{Use: "logs", Short: "Print the end of the daemon's log", Args: exactArgs()}
	cmd.Flags().IntVarP(&lines, "lines", "n", 200, "at most this many lines")
	cmd.RunE = func(*cobra.Command, []string) error {
		if err := a.onlyHere(); err != nil {
			return err
		}
		p, err := a.paths()
		if err != nil {
			return err
		}
		text, err := os.ReadFile(p.DaemonLog())
		if err != nil {
			return agentlab.Errorf(agentlab.CodeNotFound, "there is no log yet: %w", err).WithHint("the daemon writes it when it runs: agentlab daemon start")
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
