package hostcmd

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

func profileCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "profile", Short: "Show the profiles from which sandboxes are created"}
	cmd.AddCommand(
		cli.Query(a, "list", "List profiles", cli.ExactArgs(), cli.All((*client.Client).Profiles), func(list api.List[api.Profile]) error { return profileTable(a, list) }),
		cli.Query(a, "show NAME", "Print a profile", cli.ExactArgs("NAME"), cli.One((*client.Client).Profile), func(p api.Profile) error {
			if p.Problem != "" {
				a.Progressf("note: not usable: %s", p.Problem)
			}
			_, err := fmt.Fprint(a.Stdout, p.YAML)
			return err
		}),
		cli.Query(a, "validate FILE", "Check a profile file (- means standard input) without installing it", cli.ExactArgs("FILE"),
			func(ctx context.Context, c *client.Client, args []string) (api.Profile, error) {
				text, err := a.ReadInput(args[0], cli.MaxRecipeBytes)
				if err != nil {
					return api.Profile{}, err
				}
				p, err := c.ValidateProfile(ctx, text)
				if err != nil {
					return p, cli.ContentError(err)
				}
				if file := filepath.Base(args[0]); args[0] != "-" && file != p.Name+".yaml" {
					a.Progressf("note: the profile cannot be used from the file %s, because its name is %s\n  → rename the file to %[2]s.yaml, or change its name", file, p.Name)
				}
				return p, nil
			}, func(p api.Profile) error {
				a.Progressf("profile %s is valid", p.Name)
				return nil
			}),
	)
	return cmd
}

// defaultFor returns what a profile is the default of.
func defaultFor(p api.Profile) string {
	switch {
	case p.Default && p.SessionDefault:
		return "yes, sessions"
	case p.SessionDefault:
		return "sessions"
	}
	return cli.YesNo(p.Default)
}

func profileTable(a *cli.App, list api.List[api.Profile]) error {
	t := cli.NewTable(a.Stdout, "NAME", "CORES", "MEMORY", "NETWORK", "TTL", "KEEPALIVE", "DEFAULT", "SOURCE", "PROBLEM")
	for _, p := range list.Items {
		t.Row(p.Name, p.Cores, fmt.Sprintf("%d MiB", p.MemoryMB), p.Network,
			cli.ShortDuration(time.Duration(p.TTLMinutes)*time.Minute), cli.YesNo(p.Keepalive), defaultFor(p), p.Source, cli.OrDash(p.Problem))
	}
	return t.Flush()
}
