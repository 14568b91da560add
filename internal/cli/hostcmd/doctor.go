package hostcmd

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func doctorCmd(a *cli.App) *cobra.Command {
	var f cli.DoctorFlags
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check the host, or write a doctor bundle of the whole installation",
		Long: `Check the host now and print all findings, each with a remedy. The exit code is
1 if one of them is an error. With --out, write a doctor bundle of the whole
installation instead.

` + cli.DoctorLong,
		Args: cli.ExactArgs(),
	}
	f.Add(cmd)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
		if f.Out != "" {
			body, err := c.Doctor(ctx)
			return a.WriteDoctor(f, "agentlab-doctor.tar.gz", body, err)
		}
		if f.Force {
			return work.UsageErrorf("--force requires --out")
		}
		checks, err := c.HostChecks(ctx)
		if err != nil {
			return err
		}
		return emitChecks(a, checks)
	})
	return cmd
}

// emitChecks prints the results of checks, and returns an error if one of them is an error.
func emitChecks(a *cli.App, checks api.HostChecks) error {
	if err := a.Emit(checks, func() error { return printFindings(a, checks.Checks) }); err != nil {
		return err
	}
	return findingsError(checks.Checks)
}
