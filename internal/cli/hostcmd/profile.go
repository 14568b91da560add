package cli

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) profileCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "profile", Short: "Show the profiles from which sandboxes are created"}
	cmd.AddCommand(
		query(a, "list", "List profiles", exactArgs(), all((*client.Client).Profiles), a.profileTable),
		query(a, "show NAME", "Print a profile", exactArgs("NAME"), one((*client.Client).Profile), func(p api.Profile) error {
			if p.Problem != "" {
				a.Progressf("note: not usable: %s", p.Problem)
			}
			_, err := fmt.Fprint(a.Stdout, p.YAML)
			return err
		}),
		query(a, "validate FILE", "Check a profile file (- means standard input) without installing it", exactArgs("FILE"),
			func(ctx context.Context, c *client.Client, args []string) (api.Profile, error) {
				text, err := a.readInput(args[0], maxRecipeBytes)
				if err != nil {
					return api.Profile{}, err
				}
				p, err := c.ValidateProfile(ctx, text)
				if err != nil {
					return p, contentError{err}
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
	return yesNo(p.Default)
}

func (a *App) profileTable(list api.List[api.Profile]) error {
	t := newTable(a.Stdout, "NAME", "CORES", "MEMORY", "NETWORK", "TTL", "KEEPALIVE", "DEFAULT", "SOURCE", "PROBLEM")
	for _, p := range list.Items {
		t.row(p.Name, p.Cores, fmt.Sprintf("%d MiB", p.MemoryMB), p.Network,
			shortDuration(time.Duration(p.TTLMinutes)*time.Minute), yesNo(p.Keepalive), defaultFor(p), p.Source, orDash(p.Problem))
	}
	return t.flush()
}
