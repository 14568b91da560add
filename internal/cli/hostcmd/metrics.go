package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) metricsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "metrics", Short: "Print the metrics of the daemon in the text format of Prometheus",
		Long: `Print the metrics of the daemon in the text format of Prometheus. docs/metrics.md
lists them. metrics.listen in config.yaml serves them to a Prometheus server.`,
		Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			body, err := c.Metrics(ctx)
			return a.printBody("metrics", body, err)
		}),
	}
}
