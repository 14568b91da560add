package jobcmd

import (
	"cmp"
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func jobLogsCmd(a *cli.App) *cobra.Command {
	var follow bool
	var attempt int
	cmd := &cobra.Command{
		Use: "logs JOB", Short: "Print the agent's log of a job", Args: cli.ExactArgs("JOB"),
		Long: `Print the agent's log of a job. For a job with several attempts, it is the log
of the attempt that won, or of the attempt N with --attempt N.`,
	}
	cli.Between(cmd.Flags(), &attempt, "attempt", 1, agentlab.MaxAttempts, "print the log of this attempt")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new lines until the job ends, then how it ended")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		id, err := attemptID(ctx, c, args[0], attempt)
		if err != nil {
			return err
		}
		return CopyJobLog(ctx, a, c, id, follow)
	})
	return cmd
}

// CopyJobLog copies the agent's log to standard output. With follow it does so
// until the job has ended, and prints denied requests and how the job ended.
func CopyJobLog(ctx context.Context, a *cli.App, c *client.Client, id string, follow bool) error {
	var j api.Job
	var err error
	if follow {
		if j, err = c.Job(ctx, id); err != nil {
			return err
		}
	}
	if follow && j.AttemptCount > 0 && !agentlab.JobStatus(j.Status).Final() {
		return agentlab.Errorf(agentlab.CodeConflict, "job %s has several attempts, which run at the same time", j.ID).
			WithHint("choose one: %s", logsOfAttempt(j.ID))
	}
	if follow && !agentlab.JobStatus(j.Status).Final() {
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		var lost error
		j, err = watchJob(ctx, a, c, j.ID, a.Stdout, func(api.Event) {}, func(err error) { lost = err; stop() })
		err = cmp.Or(lost, err)
	} else {
		if !follow {
			err = preparationLog(ctx, a, c, id, func(id string) error {
				log, err := c.JobLog(ctx, id, false, 0)
				if err == nil {
					err = CopyAll(work.LogWriter(a.Stdout), log)
				}
				return err
			})
			if err != nil {
				return err
			}
		}
		var log client.Body
		if log, err = c.JobLog(ctx, id, follow, 0); err == nil {
			err = CopyAll(work.LogWriter(a.Stdout), log)
		}
	}
	if err == nil && follow {
		printOutcome(a, j)
	}
	return err
}

// CopyAll copies r to w, and closes r.
func CopyAll(w io.Writer, r io.ReadCloser) error {
	defer func() { _ = r.Close() }()
	_, err := io.Copy(w, r)
	return err
}

// watchJob copies the agent's log to out, prints denied requests and calls show
// for each event until the job has ended. If the rest of the log cannot be
// copied, it calls lost from another goroutine before it returns. The returned
// job always has an ID.
func watchJob(ctx context.Context, a *cli.App, c *client.Client, id string, out io.Writer, show func(api.Event), lost func(error)) (api.Job, error) {
	logCtx, stopLog := context.WithCancelCause(ctx)
	defer stopLog(nil)
	idle := newIdleLimit(work.LogWriter(out), a.LogIdle, func() { stopLog(errLogIdle) })
	ended := make(chan struct{})
	var log sync.WaitGroup
	log.Go(func() {
		err := streamLog(logCtx, c, id, idle, ended)
		if cause := context.Cause(logCtx); cause != nil && !errors.Is(cause, errLogIdle) {
			return // the caller stopped
		}
		if err != nil {
			cut := agentlab.Errorf(agentlab.CodeOf(err), "the log was cut off: %w", err)
			lost(cut.WithHint("%s", cmp.Or(agentlab.HintOf(err), "agentlab job logs "+id)))
		}
	})
	denied, stopDenied := context.WithCancel(ctx)
	log.Go(func() { showDenials(denied, a, c, id) })
	j, err := FollowJob(ctx, a, c, client.EventQuery{JobID: id}, show)
	j.ID = id
	close(ended)
	stopDenied()
	if err != nil {
		stopLog(nil)
	} else {
		// The daemon ends the log stream of a final job. The limit is for a
		// daemon that dies before it does.
		idle.start()
	}
	log.Wait()
	idle.stop()
	return j, err
}

const (
	// logRetry is the delay before a broken log stream is resumed.
	logRetry = 200 * time.Millisecond
	// logIdle is how long the log of an ended job may yield no bytes.
	logIdle = 10 * time.Second
)

var errLogIdle = agentlab.Errorf(agentlab.CodeUnavailable, "the job has ended, but its log is incomplete")

// streamLog copies the agent's log until it has read a whole stream that began
// after the job ended. It resumes a broken stream. Errors of out, and an answer
// that rejects the call, are final.
func streamLog(ctx context.Context, c *client.Client, id string, out *idleLimit, ended <-chan struct{}) error {
	for {
		final := isClosed(ended)
		r, err := c.JobLog(ctx, id, true, out.written)
		if err == nil {
			err = CopyAll(out, r)
		}
		again := err == nil || out.err == nil && agentlab.CodeOf(err) == agentlab.CodeUnavailable
		if !again || final || ctx.Err() != nil || err == nil && isClosed(ended) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ended:
		case <-time.After(logRetry):
		}
	}
}

// idleLimit writes to w. After start, it calls a function if no bytes arrive for
// too long. Time in w.Write does not count.
type idleLimit struct {
	w       io.Writer
	written int64
	err     error // of w

	mu      sync.Mutex
	timer   *time.Timer
	limit   time.Duration
	started bool
	writing bool
}

func newIdleLimit(w io.Writer, limit time.Duration, expired func()) *idleLimit {
	l := &idleLimit{w: w, limit: cmp.Or(limit, logIdle)}
	l.timer = time.AfterFunc(l.limit, expired)
	l.timer.Stop()
	return l
}

func (l *idleLimit) Write(p []byte) (n int, err error) {
	l.set(func() { l.writing = true })
	n, err = l.w.Write(p)
	l.written += int64(n)
	l.err = err
	l.set(func() { l.writing = false })
	return n, err
}

func (l *idleLimit) start() { l.set(func() { l.started = true }) }
func (l *idleLimit) stop()  { l.set(func() { l.started = false }) }

// set changes the state and restarts the timer, which runs only while bytes are
// expected.
func (l *idleLimit) set(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
	if l.timer.Stop(); l.started && !l.writing {
		l.timer.Reset(l.limit)
	}
}

// waitJob returns the job when it is final.
func waitJob(ctx context.Context, a *cli.App, c *client.Client, id string) (api.Job, error) {
	return FollowJob(ctx, a, c, client.EventQuery{JobID: id}, func(api.Event) {})
}

// FollowJob calls show for each event of the query and returns its job when it is
// final. It starts the user's daemon again if that has died. Without the right
// to read events it polls the job.
func FollowJob(ctx context.Context, a *cli.App, c *client.Client, q client.EventQuery, show func(api.Event)) (api.Job, error) {
	for {
		j, err := followJobOnce(ctx, c, &q, show)
		if agentlab.CodeOf(err) == agentlab.CodeDenied {
			j, err = pollJob(ctx, c, q.JobID)
		}
		if ctx.Err() != nil {
			return api.Job{}, ctx.Err()
		}
		if agentlab.CodeOf(err) != agentlab.CodeUnavailable || a.ExplicitDaemon() {
			return j, err
		}
		if a.StoppedByUser() {
			return j, agentlab.Errorf(agentlab.CodeUnavailable, "the daemon was stopped; the job continues in its sandbox").
				WithHint("follow it again, which starts the daemon: %s", "agentlab job logs --follow "+q.JobID)
		}
		if _, err := a.Connect(ctx); err != nil {
			return api.Job{}, err
		}
	}
}

func followJobOnce(ctx context.Context, c *client.Client, q *client.EventQuery, show func(api.Event)) (api.Job, error) {
	for e, err := range c.FollowEvents(ctx, *q) {
		if err != nil {
			return api.Job{}, err
		}
		q.After = e.ID
		show(e)
		if e.Kind != agentlab.EventJobStatus || e.JobID != q.JobID {
			continue
		}
		// When this event is read, the job may have ended: its last event is shown too.
		if status, ok := e.Data["status"].(string); ok && !agentlab.JobStatus(status).Final() {
			continue
		}
		j, err := c.Job(ctx, q.JobID)
		if err != nil {
			return api.Job{}, err
		}
		if agentlab.JobStatus(j.Status).Final() {
			return j, nil
		}
	}
	return api.Job{}, context.Cause(ctx)
}

// pollJob returns the job when it is final. Like FollowEvents, it tolerates
// that the daemon is unavailable for about fifteen seconds.
func pollJob(ctx context.Context, c *client.Client, id string) (api.Job, error) {
	const pause, most = time.Second, 15
	for failures := 0; ; {
		j, err := c.Job(ctx, id)
		switch {
		case err == nil && agentlab.JobStatus(j.Status).Final():
			return j, nil
		case err == nil:
			failures = 0
		case agentlab.CodeOf(err) != agentlab.CodeUnavailable || failures == most:
			return api.Job{}, err
		default:
			failures++
		}
		select {
		case <-ctx.Done():
			return api.Job{}, ctx.Err()
		case <-time.After(pause):
		}
	}
}

// preparationLog copies the log of the job that runs the commands under setup for a job,
// until it has ended.
func preparationLog(ctx context.Context, a *cli.App, c *client.Client, id string, copyLog func(id string) error) error {
	j, err := c.Job(ctx, id)
	if err != nil || j.Setup == nil || j.Setup.PreparationID == "" {
		return err
	}
	return copyLog(j.Setup.PreparationID)
}
