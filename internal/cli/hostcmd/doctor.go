package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func (a *App) doctorCmd() *cobra.Command {
	var f doctorFlags
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check the host, or write a doctor bundle of the whole installation",
		Long: `Check the host now and print all findings, each with a remedy. The exit code is
1 if one of them is an error. With --out, write a doctor bundle of the whole
installation instead.

` + doctorLong,
		Args: exactArgs(),
	}
	f.add(cmd)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, _ []string) error {
		if f.out != "" {
			body, err := c.Doctor(ctx)
			return a.writeDoctor(f, "agentlab-doctor.tar.gz", body, err)
		}
		if f.force {
			return work.UsageErrorf("--force requires --out")
		}
		checks, err := c.HostChecks(ctx)
		if err != nil {
			return err
		}
		return a.emitChecks(checks)
	})
	return cmd
}

// emitChecks prints the results of checks, and returns an error if one of them is an error.
func (a *App) emitChecks(checks api.HostChecks) error {
	if err := a.emit(checks, func() error { return a.printFindings(checks.Checks) }); err != nil {
		return err
	}
	return findingsError(checks.Checks)
}
