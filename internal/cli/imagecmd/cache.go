package imagecmd

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func cacheCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "cache", Short: "Manage the registry cache of sandboxes",
		Long: `Manage the registry cache, through which sandboxes download packages of npm,
Python, Go, Debian, Ubuntu and Docker, so that several sandboxes download a
package once. It is off by default; docs/cache.md describes it.`,
	}
	cmd.AddCommand(cacheStatusCmd(a), cacheClearCmd(a))
	return cmd
}

func cacheStatusCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "status", "Show the use of the registry cache", cli.ExactArgs(), cli.All((*client.Client).Cache), func(s api.Cache) error {
		if !s.Enabled {
			_, err := fmt.Fprintln(a.Stdout, "The registry cache is off: set cache.enabled: true in config.yaml.")
			return err
		}
		t := cli.NewTable(a.Stdout, "KIND", "OBJECTS", "SIZE")
		total := api.CacheUsage{}
		for _, u := range s.Use {
			t.Row(u.Kind, fmt.Sprint(u.Objects), work.ByteSize(u.Bytes))
			total.Objects, total.Bytes = total.Objects+u.Objects, total.Bytes+u.Bytes
		}
		t.Row("total", fmt.Sprint(total.Objects), work.ByteSize(total.Bytes)+" of "+work.ByteSize(s.MaxBytes))
		return t.Flush()
	})
}

func cacheClearCmd(a *cli.App) *cobra.Command {
	kinds := []string{"npm", "pypi", "go", "apt", "docker"}
	cmd := &cobra.Command{
		Use: "clear [KIND]", Short: "Remove what the registry cache has stored", Args: cobra.MaximumNArgs(1), ValidArgs: kinds,
		Long: `Remove what the registry cache has stored, of all registries or of one kind:
npm, pypi, go, apt or docker. Downloads that run are completed and not stored.`,
		Example: `  agentlab cache clear
  agentlab cache clear apt`,
	}
	cmd.PreRunE = func(_ *cobra.Command, args []string) error {
		if len(args) == 1 && !slices.Contains(kinds, args[0]) {
			return work.UsageErrorf("unknown kind %q", args[0]).WithHint("use one of %s", strings.Join(kinds, ", "))
		}
		return nil
	}
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		call := (*client.Client).ClearCache
		if len(args) == 1 {
			call = func(c *client.Client, ctx context.Context) (api.CacheCleared, error) {
				return c.ClearCacheOf(ctx, args[0])
			}
		}
		gone, err := call(c, ctx)
		if err != nil {
			return err
		}
		return a.Done(gone, "%s removed (%s)", agentlab.Plural(gone.Objects, "object"), work.ByteSize(gone.Bytes))
	})
	return cmd
}
