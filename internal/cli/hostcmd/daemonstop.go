package hostcmd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// daemonStopLimit is how long a daemon may take to exit.
const daemonStopLimit = 30 * time.Second

// daemonStop asks the daemon to exit and waits for the end of its process. It
// cannot wait for the socket: another command may start a daemon in the meantime.
func daemonStop(ctx context.Context, a *cli.App, force bool) error {
	socket, running, err := findDaemon(ctx, a)
	if err != nil {
		return err
	}
	if !running {
		return a.Done(map[string]any{"running": false, "stopped": false, "socket": socket}, "no daemon is running")
	}
	pid, err := endDaemon(ctx, a, socket, force)
	if err != nil {
		return err
	}
	text, another := "daemon stopped", cli.Ping(ctx, socket) == nil
	if another {
		text = fmt.Sprintf("daemon (pid %d) stopped; another one has been started since", pid)
	}
	return a.Done(map[string]any{"running": another, "stopped": true, "socket": socket, "pid": pid}, "%s", text)
}

// endDaemon stops the daemon on a socket, waits for the end of its process, and returns
// its ID. Builds of images are interrupted with force, or if the user agrees.
func endDaemon(ctx context.Context, a *cli.App, socket string, force bool) (pid int, err error) {
	c := client.New(socket)
	defer c.Close()
	pid, ended, err := watchDaemon(ctx, c)
	if err != nil {
		return 0, err
	}
	// Terminals that lose their connection now do not start another daemon.
	_ = os.WriteFile(cli.StoppedMark(socket), nil, 0o600) // another user's daemon has no such file
	err = c.StopDaemon(ctx, force)
	if agentlab.CodeOf(err) == agentlab.CodeBusy && a.Confirm(agentlab.WithoutControls(err.Error())+". Interrupt it?") {
		err = c.StopDaemon(ctx, true)
	}
	if err != nil {
		_ = os.Remove(cli.StoppedMark(socket))
		unwatch(ended)
		return 0, err
	}
	return pid, awaitEnd(ctx, pid, ended)
}

// daemonRestart stops the user's daemon, if one is running, and starts another one, or
// uses a daemon that another command has started since.
func daemonRestart(ctx context.Context, a *cli.App, force bool) error {
	if a.Socket != "" {
		return work.UsageErrorf("a daemon is not started for --socket").WithHint("remove --socket; AGENTLAB_HOME selects another daemon of yours")
	}
	p, err := a.Paths()
	if err != nil {
		return err
	}
	if p.System {
		return agentlab.Errorf(agentlab.CodeUnsupported, "systemd manages the daemon of this machine").WithHint("%s", cli.RestartSystem)
	}
	socket, running, err := findDaemon(ctx, a)
	if err == nil && running {
		_, err = endDaemon(ctx, a, socket, force)
	}
	if err != nil {
		return err
	}
	c, err := a.Connect(ctx)
	if err != nil {
		return err
	}
	return a.Done(map[string]any{"running": true, "stopped": running, "socket": c.Socket()}, "daemon restarted")
}

// watchDaemon returns the process that serves c as its ID and a descriptor of
// openProcess, which the caller closes. The second call of Status ensures that the ID was not reused.
func watchDaemon(ctx context.Context, c *client.Client) (pid, pidfd int, err error) {
	before, err := c.Status(ctx)
	if err != nil {
		return 0, -1, err
	}
	pidfd, err = openProcess(before.PID)
	if err != nil {
		return 0, -1, agentlab.Errorf(agentlab.CodeUnavailable, "cannot watch the daemon (pid %d): %w", before.PID, err).
			WithHint("run the command again; stop a daemon of another PID namespace there")
	}
	after, err := c.Status(ctx)
	if err == nil && after.PID != before.PID {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "the daemon (pid %d) was replaced by another one (pid %d)", before.PID, after.PID).
			WithHint("run the command again")
	}
	if err != nil {
		unwatch(pidfd)
		return 0, -1, err
	}
	return before.PID, pidfd, nil
}

func unwatch(pidfd int) { _ = unix.Close(pidfd) }

// awaitEnd waits for the end of the process of pidfd, and closes pidfd.
func awaitEnd(ctx context.Context, pid, pidfd int) error {
	defer unwatch(pidfd)
	for deadline := time.Now().Add(daemonStopLimit); ; {
		fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(cli.DaemonPoll/time.Millisecond))
		switch {
		case n > 0:
			return nil
		case err != nil && !errors.Is(err, unix.EINTR):
			return agentlab.Errorf(agentlab.CodeInternal, "cannot wait for the daemon (pid %d): %w", pid, err)
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(deadline):
			return agentlab.Errorf(agentlab.CodeTimeout, "the daemon (pid %d) is still running after %s", pid, daemonStopLimit).
				WithHint("see 'agentlab daemon logs'")
		}
	}
}
