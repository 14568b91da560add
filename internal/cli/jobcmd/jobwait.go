package jobcmd

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func jobWaitCmd(a *cli.App) *cobra.Command {
	var limit time.Duration
	cmd := &cobra.Command{
		Use: "wait JOB", Short: "Wait for a job to end", Args: cli.ExactArgs("JOB"),
		Long: `Wait for a job to end, with progress, and print how it ended. The exit code is that
of 'agentlab job run'. If the job has not ended when the time of --timeout has
passed, it is 124, and the job continues.`,
		Example: `  JOB=$(agentlab job run --repo . --task "Fix issue 12" --no-wait)
  agentlab job wait "$JOB" --timeout 1h`,
	}
	cmd.Flags().DurationVar(&limit, "timeout", 0, "wait at most this long, e.g. 90s (default: until the job ends)")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if limit < 0 {
			return work.UsageErrorf("--timeout is negative")
		}
		began := a.Now()
		j, err := c.Job(ctx, args[0])
		if err == nil && !agentlab.JobStatus(j.Status).Final() {
			j, err = waitJobFor(ctx, a, c, j.ID, limit)
		}
		if err != nil {
			return err
		}
		if !agentlab.JobStatus(j.Status).Final() {
			if err := a.Done(j, "job %s is %s after %s", j.ID, j.Status, cli.ShortDuration(a.Now().Sub(j.CreatedAt))); err != nil {
				return err
			}
			return work.ExitStatus(cli.ExitTimeout)
		}
		return finishJob(ctx, a, c, j, goneWithin(limit, a.Now().Sub(began)))
	})
	return cmd
}

// leastGone is how long job wait waits for the sandbox of an ended job to be destroyed,
// if the time of --timeout has passed.
const leastGone = 2 * time.Second

// goneWithin returns how long to wait for the sandbox of an ended job to be destroyed
// after a wait that took this long, of a limit that is 0 if there is none.
func goneWithin(limit, took time.Duration) time.Duration {
	if limit == 0 {
		return goneLimit
	}
	return min(max(limit-took, leastGone), goneLimit)
}

// waitJobFor shows the progress of a job and returns it when it is final, or when the
// limit has passed. A limit of 0 is none.
func waitJobFor(ctx context.Context, a *cli.App, c *client.Client, id string, limit time.Duration) (api.Job, error) {
	wait := ctx
	if limit > 0 {
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	j, err := FollowJob(wait, a, c, client.EventQuery{JobID: id}, a.ShowEvent)
	if ctx.Err() == nil && wait.Err() != nil {
		return c.Job(ctx, id)
	}
	return j, err
}
