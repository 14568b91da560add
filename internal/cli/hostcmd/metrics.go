package hostcmd

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

func metricsCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "metrics", Short: "Print the metrics of the daemon in the text format of Prometheus",
		Long: `Print the metrics of the daemon in the text format of Prometheus. docs/metrics.md
lists them. metrics.listen in config.yaml serves them to a Prometheus server.`,
		Args: cli.ExactArgs(),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
			body, err := c.Metrics(ctx)
			return printBody(a, "metrics", body, err)
		}),
	}
}
