package cli

import (
	"context"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) hostCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "host", Short: "Keep the machine that sandboxes run on"}
	cmd.AddCommand(a.hostNetworkCmd())
	return cmd
}

func (a *App) hostNetworkCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "network", Short: "Keep the firewall of a bridge that sandboxes are on",
		Long: `Keep the firewall of a bridge that sandboxes are on, as on Proxmox: nothing
passes between sandboxes, to the host, to its networks or to the tailnet, and
to the internet only what each sandbox's policy allows. The key host_network of
config.yaml names the bridge and its networks.

The qemu backend needs none of this: each of its sandboxes has a network of its
own. The daemon must run as root.`,
	}
	cmd.AddCommand(
		&cobra.Command{
			Use: "render", Short: "Print the rules as 'nft -f' reads them, and change nothing", Args: exactArgs(),
			RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
				body, err := c.HostNetworkRules(ctx)
				if err != nil {
					return err
				}
				defer body.Close() //nolint:errcheck // only read from
				if !a.json {
					_, err = io.Copy(a.Stdout, body)
					return err
				}
				text, err := io.ReadAll(body)
				if err != nil {
					return err
				}
				return a.printJSON(map[string]string{"rules": string(text)})
			}),
		},
		a.hostNetworkVerb("apply", "Put the rules in force, in one step, and serve the bridge", (*client.Client).ApplyHostNetwork),
		a.hostNetworkVerb("remove", "Take the rules away: sandboxes on the bridge have no network then", (*client.Client).RemoveHostNetwork),
		a.hostNetworkVerb("status", "Tell whether the rules are in force as they should be", (*client.Client).HostNetwork),
	)
	return cmd
}

func (a *App) hostNetworkVerb(use, short string, call func(*client.Client, context.Context) (api.HostNetwork, error)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			n, err := call(c, ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(n)
			}
			return a.printHostNetwork(n)
		}),
	}
}

func (a *App) printHostNetwork(n api.HostNetwork) error {
	state := "not in force"
	switch {
	case n.Applied && len(n.Drift) > 0:
		state = "in force, but changed by somebody"
	case n.Applied:
		state = "in force"
	case len(n.Tables) > 0:
		state = "in part only (" + strings.Join(n.Tables, ", ") + ")"
	}
	t := newTable(a.Stdout, "Rules:", state)
	for _, d := range n.Drift {
		t.row("", plain(d))
	}
	serving := "no"
	if n.Serving {
		serving = "yes"
	}
	t.row("Bridge:", n.Bridge+" ("+strings.TrimSuffix(n.Subnet+", "+n.Subnet6, ", ")+")")
	t.row("Ports:", plain(strings.Join(n.Ports, " ")))
	t.row("Sandboxes:", n.Sandboxes)
	t.row("DNS and names served:", serving)
	return t.flush()
}
