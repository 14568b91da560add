package cli

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
)

// daemonStopLimit is how long a daemon may take to end after it was asked to.
const daemonStopLimit = 30 * time.Second

// daemonStop asks the daemon to end and waits until its process has ended. The
// socket does not show that: another command may start a daemon meanwhile.
func (a *App) daemonStop(ctx context.Context) error {
	socket, running, err := a.findDaemon(ctx)
	if err != nil {
		return err
	}
	if !running {
		a.progressf("no daemon is running")
		return nil
	}
	c := client.New(socket)
	defer c.Close()
	pid, ended, err := watchDaemon(ctx, c)
	if err != nil {
		return err
	}
	if err := c.StopDaemon(ctx); err != nil {
		unwatch(ended)
		return err
	}
	if err := awaitEnd(ctx, pid, ended); err != nil {
		return err
	}
	if ping(ctx, socket) == nil {
		a.progressf("the daemon (pid %d) is stopped; another one has been started since", pid)
		return nil
	}
	a.progressf("the daemon is stopped")
	return nil
}

// watchDaemon returns the process that serves c as its id and a pidfd, which
// the caller closes. The second question excludes that the process ended in
// between and the id is another process's.
func watchDaemon(ctx context.Context, c *client.Client) (pid, pidfd int, err error) {
	before, err := c.Status(ctx)
	if err != nil {
		return 0, -1, err
	}
	pidfd, err = unix.PidfdOpen(before.PID, 0)
	if err != nil {
		return 0, -1, agentlab.Errorf(agentlab.CodeUnavailable, "cannot watch the daemon (pid %d): %w", before.PID, err).
			WithHint("run the command again; a daemon of another PID namespace is stopped there")
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

// awaitEnd waits until the process of pidfd has ended, and closes pidfd.
func awaitEnd(ctx context.Context, pid, pidfd int) error {
	defer unwatch(pidfd)
	for deadline := time.Now().Add(daemonStopLimit); ; {
		fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}} //nolint:gosec // a file descriptor fits an int32
		n, err := unix.Poll(fds, int(daemonPoll/time.Millisecond))
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
