package jobcmd

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

func jobSalvageCmd(a *cli.App) *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use: "salvage JOB", Short: "Extract the work of a job whose VM was lost", Args: cli.ExactArgs("JOB"),
		Long: `Extract the commits, the uncommitted changes and the declared outputs of a job that
ended before they were stored. AgentLab keeps the disk of the sandbox of such a job
for retention.salvage_hours ('agentlab job show' names it).

A new job boots a copy of the disk in a sandbox without a network and without
secrets, and uploads what it finds; no agent runs. Its result is used like that of
every job. The disk is kept until the end of its time.`,
		Example: `  agentlab job salvage job-x5v
  agentlab job fetch job-new`,
	}
	cli.WaitFlag(cmd, &wait, "wait for the new job to end, with progress and log")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.SalvageJob(ctx, args[0])
		if err != nil {
			return err
		}
		return followCreated(ctx, a, c, j, wait)
	})
	return cmd
}
