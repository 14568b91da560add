package cli

import (
	"context"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) hostCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "host", Short: "Manage the host"}
	cmd.AddCommand(a.hostNetworkCmd())
	return cmd
}

func (a *App) hostNetworkCmd() *cobra.Command {
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
			Use: "render", Short: "Print the firewall rules in the format of 'nft -f', without applying them", Args: exactArgs(),
			RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
				body, err := c.HostNetworkRules(ctx)
				return a.printBody("rules", body, err)
			}),
		},
		query(a, "apply", "Apply the firewall rules atomically and serve DNS on the bridge", exactArgs(), all((*client.Client).ApplyHostNetwork), a.printHostNetwork),
		query(a, "remove", "Remove the firewall rules; sandboxes on the bridge then have no network", exactArgs(), all((*client.Client).RemoveHostNetwork), a.printHostNetwork),
		query(a, "status", "Show whether the firewall rules are applied and unchanged", exactArgs(), all((*client.Client).HostNetwork), a.printHostNetwork),
	)
	return cmd
}

// printBody prints the text of a call: with --json as the value of one key.
func (a *App) printBody(key string, body client.Body, err error) error {
	if err != nil {
		return err
	}
	defer body.Close()
	text, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	return a.emit(map[string]string{key: string(text)}, func() error {
		_, err := a.Stdout.Write(text)
		return err
	})
}

func (a *App) printHostNetwork(n api.HostNetwork) error {
	state := "not applied"
	switch {
	case n.Applied && len(n.Drift) > 0:
		state = "applied, but changed by another program"
	case n.Applied:
		state = "applied"
	case len(n.Tables) > 0:
		state = "partly applied (" + strings.Join(n.Tables, ", ") + ")"
	}
	t := newTable(a.Stdout, "Rules:", state)
	for _, d := range n.Drift {
		t.row("", agentlab.WithoutControls(d))
	}
	t.row("Bridge:", n.Bridge+" ("+strings.TrimSuffix(n.Subnet+", "+n.Subnet6, ", ")+")")
	t.row("Ports:", agentlab.WithoutControls(strings.Join(n.Ports, " ")))
	t.row("Sandboxes:", n.Sandboxes)
	t.row("DNS served:", yesNo(n.Serving))
	return t.flush()
}
