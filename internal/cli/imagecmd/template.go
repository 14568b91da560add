package imagecmd

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func imageWarmCmd(a *cli.App) *cobra.Command {
	var w api.TemplateWarm
	cmd := &cobra.Command{
		Use: "warm NAME", Short: "Make the template from which sandboxes with an image start", Args: cli.ExactArgs("NAME"),
		Long: `Make the template from which sandboxes with an image and the resources of a
profile start without a boot, and wait for it. A missing image is built first.
Without this command, a template is made in the background after the first
sandbox has booted.`,
		Example: `  agentlab image warm agents
  agentlab image warm base --profile large`,
	}
	cmd.Flags().StringVar(&w.Profile, "profile", "", "profile with the resources of the sandboxes (default: the configured one)")
	cli.BackendFlag(cmd.Flags(), &w.Backend, "the template (default: the profile's, or the configured default)")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		t, err := c.WarmImage(ctx, args[0], w, func(line string) { a.Progressf("%s", agentlab.WithoutControls(line)) })
		if err != nil {
			return err
		}
		return a.Emit(t, func() error {
			_, err := fmt.Fprintln(a.Stdout, t.Key)
			return err
		})
	})
	return cmd
}

func templateCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "template", Short: "Manage templates: booted guests of which sandboxes start as copies",
		Long: `Manage templates: booted guests without identity, of which sandboxes with the
same image, cores and memory start as copies. They are a cache of limited size,
which AgentLab fills by itself; docs/templates.md describes them.`,
	}
	cmd.AddCommand(templateListCmd(a), templateRmCmd(a))
	return cmd
}

func templateListCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "list", "List templates, the last used first", cli.ExactArgs(), cli.All((*client.Client).Templates), func(list api.List[api.Template]) error {
		a.NoteMissing(list.Missing)
		t := cli.NewTable(a.Stdout, "KEY", "IMAGE", "CORES", "MEMORY", "DISK", "STALE", "BACKEND", "AGE", "USED")
		for _, i := range list.Items {
			t.Row(i.Key, shortImage(i.Image), fmt.Sprint(i.Cores), fmt.Sprintf("%d MiB", i.MemoryMB), work.ByteSize(i.DiskUsage), cli.YesNo(i.Stale), i.Backend, a.Age(i.CreatedAt), a.Age(i.UsedAt))
		}
		return t.Flush()
	})
}

// shortImage shortens the digest of an image's reference.
func shortImage(ref string) string {
	name, digest, _ := strings.Cut(ref, "@")
	return cli.OrDash(name) + fmt.Sprintf("@%.12s", digest)
}

func templateRmCmd(a *cli.App) *cobra.Command {
	var every bool
	cmd := &cobra.Command{
		Use: "rm [TEMPLATE]", Short: "Remove a template, or all", Args: cobra.MaximumNArgs(1),
		Long: `Remove a template, by its key or a unique prefix of it, or all. Sandboxes that
were started from it do not change.`,
	}
	cmd.Flags().BoolVar(&every, "all", false, "remove all templates")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if every == (len(args) == 1) {
			return work.UsageErrorf("give a key or --all").WithHint("list templates with 'agentlab template list'")
		}
		var list api.List[api.Template]
		var err error
		if every {
			list, err = c.RemoveTemplates(ctx)
		} else {
			list, err = c.RemoveTemplate(ctx, args[0])
		}
		if err != nil {
			return err
		}
		return a.Done(list, "%s removed", agentlab.Plural(len(list.Items), "template"))
	})
	return cmd
}
