package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// maxRecipeBytes bounds a recipe or profile that is sent to the daemon.
const maxRecipeBytes = 1 << 20

func (a *App) imageCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Build and look at the images that sandboxes boot",
		Long: `Build and look at the images that sandboxes boot. 'base' is a Debian with
git, Python 3 with pip and venv, a C compiler, make and the usual tools;
'agents' adds Node.js and the coding agents.
A job or sandbox that needs a missing image builds it first.`,
	}
	cmd.AddCommand(a.imageBuildCmd(), a.imageListCmd(), a.imageShowCmd(), a.imageRmCmd())
	return cmd
}

func (a *App) imageBuildCmd() *cobra.Command {
	var recipe string
	var force bool
	cmd := &cobra.Command{
		Use: "build NAME", Short: "Build an image from a shipped recipe, or from your own", Args: exactArgs("NAME"),
		Example: `  agentlab image build agents
  agentlab image build mine --recipe mine.yaml`,
	}
	cmd.Flags().StringVar(&recipe, "recipe", "", "YAML recipe (- is standard input; default: the shipped one of that name)")
	cmd.Flags().BoolVar(&force, "force", false, "build again though it exists")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		req := api.ImageBuild{Name: args[0], Force: force}
		if recipe != "" {
			text, err := a.readLimited(recipe, maxRecipeBytes)
			if err != nil {
				return err
			}
			req.Recipe = text
		}
		img, err := c.BuildImage(ctx, req, func(line string) { a.progressf("%s", plain(line)) })
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(img)
		}
		_, err = fmt.Fprintf(a.Stdout, "%s@%s\n", img.Name, img.Digest)
		return err
	})
	return cmd
}

func (a *App) imageListCmd() *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List built images", Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			list, err := c.Images(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(list)
			}
			t := newTable(a.Stdout, "NAME", "DIGEST", "SUITE", "ARCH", "DISK", "CURRENT", "IN USE", "AGE")
			for _, i := range list.Items {
				t.row(i.Name, fmt.Sprintf("%.12s", i.Digest), i.Suite, i.Arch, byteSize(i.DiskUsage), yesNo(i.Current), yesNo(i.InUse), a.age(i.CreatedAt))
			}
			return t.flush()
		}),
	}
}

func (a *App) imageShowCmd() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show an image with its build stamp", Args: exactArgs("NAME"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			i, err := c.Image(ctx, args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(i)
			}
			t := newTable(a.Stdout, "Image:", i.Name+"@"+i.Digest)
			t.row("Suite:", i.Suite)
			t.row("Architecture:", i.Arch)
			t.row("Root disk:", byteSize(i.Size))
			t.row("On this machine:", byteSize(i.DiskUsage))
			t.row("Built:", localTime(i.CreatedAt))
			for _, k := range slices.Sorted(maps.Keys(i.Versions)) {
				t.row("  "+k, i.Versions[k])
			}
			return t.flush()
		}),
	}
}

func (a *App) imageRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME", Short: "Remove an image that no sandbox stands on", Args: exactArgs("NAME"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			if err := c.RemoveImage(ctx, args[0]); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]string{"removed": args[0]})
			}
			a.progressf("image %s is removed", args[0])
			return nil
		}),
	}
}
