package imagecmd

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func imageCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Manage the images that sandboxes boot",
		Long: `Manage the images that sandboxes boot. 'base' is a Debian with git, Python 3
with pip and venv, a C compiler, make and common tools; 'agents' adds Node.js and
the coding agents, and 'dev' adds Docker, compilers, a browser and more. If a job or sandbox needs a missing image, it is built first.`,
	}
	cmd.AddCommand(imageBuildCmd(a), imageListCmd(a), imageShowCmd(a), imageRmCmd(a), imageGCCmd(a), imageLayersCmd(a), imageWarmCmd(a), imageFromDevcontainerCmd(a))
	return cmd
}

func imageBuildCmd(a *cli.App) *cobra.Command {
	var recipe string
	var force bool
	cmd := &cobra.Command{
		Use: "build NAME", Short: "Build an image from a shipped recipe or your own", Args: cli.ExactArgs("NAME"),
		Long: `Build an image from a shipped recipe or your own. docs/images.md describes
recipes and the stages of a build.`,
		Example: `  agentlab image build agents
  agentlab image build mine --recipe mine.yaml`,
	}
	cmd.Flags().StringVar(&recipe, "recipe", "", "YAML recipe; - means standard input (default: the shipped recipe with that name)")
	cmd.Flags().BoolVar(&force, "force", false, "build even if the image exists")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		req := api.ImageBuild{Name: args[0], Force: force}
		if recipe != "" {
			text, err := a.ReadInput(recipe, cli.MaxRecipeBytes)
			if err != nil {
				return err
			}
			req.Recipe = text
		}
		img, err := c.BuildImage(ctx, req, func(line string) { a.Progressf("%s", agentlab.WithoutControls(line)) })
		if err != nil && recipe != "" {
			return cli.ContentError(err)
		}
		if err != nil {
			return err
		}
		return printImage(a, img)
	})
	return cmd
}

// printImage prints the reference of a new image.
func printImage(a *cli.App, img api.Image) error {
	return a.Emit(img, func() error {
		_, err := fmt.Fprintf(a.Stdout, "%s@%s\n", img.Name, img.Digest)
		return err
	})
}

func imageListCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "list", "List built images", cli.ExactArgs(), cli.All((*client.Client).Images), func(list api.List[api.Image]) error {
		t := cli.NewTable(a.Stdout, "NAME", "DIGEST", "SUITE", "ARCH", "DISK", "CURRENT", "IN USE", "AGE")
		for _, i := range list.Items {
			t.Row(i.Name, fmt.Sprintf("%.12s", i.Digest), i.Suite, i.Arch, work.ByteSize(i.DiskUsage), cli.YesNo(i.Current), cli.YesNo(i.InUse), a.Age(i.CreatedAt))
		}
		return t.Flush()
	})
}

func imageShowCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "show NAME", "Show an image with the versions of its software", cli.ExactArgs("NAME"), cli.One((*client.Client).Image), func(i api.Image) error {
		t := cli.NewTable(a.Stdout, "Image:", i.Name+"@"+i.Digest)
		t.Row("Suite:", i.Suite)
		t.Row("Architecture:", i.Arch)
		t.Row("Root disk:", work.ByteSize(i.Size))
		t.Row("On this machine:", work.ByteSize(i.DiskUsage))
		t.Row("Built:", work.LocalTime(i.CreatedAt))
		for _, k := range slices.Sorted(maps.Keys(i.Versions)) {
			t.Row("  "+k, i.Versions[k])
		}
		return t.Flush()
	})
}

func imageRmCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME", Short: "Remove an unused image", Args: cli.ExactArgs("NAME"),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			if err := c.RemoveImage(ctx, args[0]); err != nil {
				return err
			}
			return a.Done(map[string]string{"removed": args[0]}, "image %s removed", args[0])
		}),
	}
}

func imageLayersCmd(a *cli.App) *cobra.Command {
	cmd := cli.Query(a, "layers", "List the layers of builds, the last used first", cli.ExactArgs(), cli.All((*client.Client).ImageLayers), func(list api.List[api.ImageLayer]) error {
		t := cli.NewTable(a.Stdout, "KIND", "DISK", "USED")
		for _, l := range list.Items {
			t.Row(l.Kind, work.ByteSize(l.DiskUsage), a.Age(l.UsedAt))
		}
		return t.Flush()
	})
	cmd.Long = `List the layers of builds, the last used first: results of build steps that later
builds use again. They are a cache of limited size; docs/images.md describes them.`
	return cmd
}

func imageGCCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "gc", Short: "Remove the layers of builds", Args: cli.ExactArgs(),
		Long: `Remove the layers of builds, which only make later builds faster. Images stay;
'agentlab image rm' removes them, and 'agentlab template rm' their templates.`,
		RunE: a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
			list, err := c.RemoveImageLayers(ctx)
			if err != nil {
				return err
			}
			var sum int64
			for _, l := range list.Items {
				sum += l.DiskUsage
			}
			return a.Done(list, "removed %s of %s", agentlab.Plural(len(list.Items), "layer"), work.ByteSize(sum))
		}),
	}
}
