package hostcmd

import (
	"context"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

func hostCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "host", Short: "Manage the host"}
	cmd.AddCommand(hostNetworkCmd(a))
	return cmd
}

func hostNetworkCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "network", Short: "Manage the firewall of the bridge for sandboxes",
		Long: `Manage the firewall of a bridge for sandboxes, as on Proxmox VE. It blocks
traffic between sandboxes, to the host, its networks and the tailnet, and allows
to the internet only what the policy of each sandbox permits. host_network in
config.yaml sets the bridge and its networks.

The qemu backend does not need it: each of its sandboxes has its own network.
The daemon must run as root.`,
	}
	cmd.AddCommand(
		&cobra.Command{
			Use: "render", Short: "Print the firewall rules in the format of 'nft -f', without applying them", Args: cli.ExactArgs(),
			RunE: a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
				body, err := c.HostNetworkRules(ctx)
				return printBody(a, "rules", body, err)
			}),
		},
		cli.Query(a, "apply", "Apply the firewall rules atomically and serve DNS on the bridge", cli.ExactArgs(), cli.All((*client.Client).ApplyHostNetwork), func(n api.HostNetwork) error { return printHostNetwork(a, n) }),
		cli.Query(a, "remove", "Remove the firewall rules; sandboxes on the bridge then have no network", cli.ExactArgs(), cli.All((*client.Client).RemoveHostNetwork), func(n api.HostNetwork) error { return printHostNetwork(a, n) }),
		cli.Query(a, "status", "Show whether the firewall rules are applied and unchanged", cli.ExactArgs(), cli.All((*client.Client).HostNetwork), func(n api.HostNetwork) error { return printHostNetwork(a, n) }),
	)
	return cmd
}

// printBody prints the text of a call: with --json as the value of one key.
func printBody(a *cli.App, key string, body client.Body, err error) error {
	if err != nil {
		return err
	}
	defer body.Close()
	text, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	return a.Emit(map[string]string{key: string(text)}, func() error {
		_, err := a.Stdout.Write(text)
		return err
	})
}

func printHostNetwork(a *cli.App, n api.HostNetwork) error {
	state := "not applied"
	switch {
	case n.Applied && len(n.Drift) > 0:
		state = "applied, but changed by another program"
	case n.Applied:
		state = "applied"
	case len(n.Tables) > 0:
		state = "partly applied (" + strings.Join(n.Tables, ", ") + ")"
	}
	t := cli.NewTable(a.Stdout, "Rules:", state)
	for _, d := range n.Drift {
		t.Row("", agentlab.WithoutControls(d))
	}
	t.Row("Bridge:", n.Bridge+" ("+strings.TrimSuffix(n.Subnet+", "+n.Subnet6, ", ")+")")
	t.Row("Ports:", agentlab.WithoutControls(strings.Join(n.Ports, " ")))
	t.Row("Sandboxes:", n.Sandboxes)
	t.Row("DNS served:", cli.YesNo(n.Serving))
	return t.Flush()
}
