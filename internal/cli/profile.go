package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) profileCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "profile", Short: "Look at the profiles that sandboxes are made from"}
	cmd.AddCommand(a.profileListCmd(), a.profileShowCmd(), a.profileValidateCmd())
	return cmd
}

func (a *App) profileListCmd() *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List profiles", Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			list, err := c.Profiles(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(list)
			}
			t := newTable(a.Stdout, "NAME", "CORES", "MEMORY", "NETWORK", "TTL", "KEEPALIVE", "SOURCE", "PROBLEM")
			for _, p := range list.Items {
				t.row(p.Name, p.Cores, fmt.Sprintf("%d MiB", p.MemoryMB), p.Network,
					shortDuration(time.Duration(p.TTLMinutes)*time.Minute), yesNo(p.Keepalive), p.Source, dash(p.Problem))
			}
			return t.flush()
		}),
	}
}

func (a *App) profileShowCmd() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Print a profile", Args: exactArgs("NAME"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			p, err := c.Profile(ctx, args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			if p.Problem != "" {
				a.progressf("note: not usable: %s", p.Problem)
			}
			_, err = fmt.Fprint(a.Stdout, p.YAML)
			return err
		}),
	}
}

func (a *App) profileValidateCmd() *cobra.Command {
	return &cobra.Command{
		Use: "validate FILE", Short: "Check a profile file (- is standard input) without installing it", Args: exactArgs("FILE"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			text, err := a.readLimited(args[0], maxRecipeBytes)
			if err != nil {
				return err
			}
			p, err := c.ValidateProfile(ctx, text)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			a.progressf("profile %s is valid", p.Name)
			return nil
		}),
	}
}
