package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func (a *App) imageCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Manage the images that sandboxes boot",
		Long: `Manage the images that sandboxes boot. 'base' is a Debian with git, Python 3
with pip and venv, a C compiler, make and common tools; 'agents' adds Node.js and
the coding agents, and 'dev' adds Docker, compilers, a browser and more. If a job or sandbox needs a missing image, it is built first.`,
	}
	cmd.AddCommand(a.imageBuildCmd(), a.imageListCmd(), a.imageShowCmd(), a.imageRmCmd(), a.imageGCCmd(), a.imageLayersCmd(), a.imageWarmCmd(), a.imageFromDevcontainerCmd())
	return cmd
}

func (a *App) imageBuildCmd() *cobra.Command {
	var recipe string
	var force bool
	cmd := &cobra.Command{
		Use: "build NAME", Short: "Build an image from a shipped recipe or your own", Args: exactArgs("NAME"),
		Long: `Build an image from a shipped recipe or your own. docs/images.md describes
recipes and the stages of a build.`,
		Example: `  agentlab image build agents
  agentlab image build mine --recipe mine.yaml`,
	}
	cmd.Flags().StringVar(&recipe, "recipe", "", "YAML recipe; - means standard input (default: the shipped recipe with that name)")
	cmd.Flags().BoolVar(&force, "force", false, "build even if the image exists")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		req := api.ImageBuild{Name: args[0], Force: force}
		if recipe != "" {
			text, err := a.readInput(recipe, maxRecipeBytes)
			if err != nil {
				return err
			}
			req.Recipe = text
		}
		img, err := c.BuildImage(ctx, req, func(line string) { a.Progressf("%s", agentlab.WithoutControls(line)) })
		if err != nil && recipe != "" {
			return contentError{err}
		}
		if err != nil {
			return err
		}
		return a.printImage(img)
	})
	return cmd
}

// printImage prints the reference of a new image.
func (a *App) printImage(img api.Image) error {
	return a.emit(img, func() error {
		_, err := fmt.Fprintf(a.Stdout, "%s@%s\n", img.Name, img.Digest)
		return err
	})
}

func (a *App) imageListCmd() *cobra.Command {
	return query(a, "list", "List built images", exactArgs(), all((*client.Client).Images), func(list api.List[api.Image]) error {
		t := newTable(a.Stdout, "NAME", "DIGEST", "SUITE", "ARCH", "DISK", "CURRENT", "IN USE", "AGE")
		for _, i := range list.Items {
			t.row(i.Name, fmt.Sprintf("%.12s", i.Digest), i.Suite, i.Arch, work.ByteSize(i.DiskUsage), yesNo(i.Current), yesNo(i.InUse), a.age(i.CreatedAt))
		}
		return t.flush()
	})
}

func (a *App) imageShowCmd() *cobra.Command {
	return query(a, "show NAME", "Show an image with the versions of its software", exactArgs("NAME"), one((*client.Client).Image), func(i api.Image) error {
		t := newTable(a.Stdout, "Image:", i.Name+"@"+i.Digest)
		t.row("Suite:", i.Suite)
		t.row("Architecture:", i.Arch)
		t.row("Root disk:", work.ByteSize(i.Size))
		t.row("On this machine:", work.ByteSize(i.DiskUsage))
		t.row("Built:", work.LocalTime(i.CreatedAt))
		for _, k := range slices.Sorted(maps.Keys(i.Versions)) {
			t.row("  "+k, i.Versions[k])
		}
		return t.flush()
	})
}

func (a *App) imageRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME", Short: "Remove an unused image", Args: exactArgs("NAME"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			if err := c.RemoveImage(ctx, args[0]); err != nil {
				return err
			}
			return a.done(map[string]string{"removed": args[0]}, "image %s removed", args[0])
		}),
	}
}

func (a *App) imageLayersCmd() *cobra.Command {
	cmd := query(a, "layers", "List the layers of builds, the last used first", exactArgs(), all((*client.Client).ImageLayers), func(list api.List[api.ImageLayer]) error {
		t := newTable(a.Stdout, "KIND", "DISK", "USED")
		for _, l := range list.Items {
			t.row(l.Kind, work.ByteSize(l.DiskUsage), a.age(l.UsedAt))
		}
		return t.flush()
	})
	cmd.Long = `List the layers of builds, the last used first: results of build steps that later
builds use again. They are a cache of limited size; docs/images.md describes them.`
	return cmd
}

func (a *App) imageGCCmd() *cobra.Command {
	return &cobra.Command{
		Use: "gc", Short: "Remove the layers of builds", Args: exactArgs(),
		Long: `Remove the layers of builds, which only make later builds faster. Images stay;
'agentlab image rm' removes them, and 'agentlab template rm' their templates.`,
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			list, err := c.RemoveImageLayers(ctx)
			if err != nil {
				return err
			}
			var sum int64
			for _, l := range list.Items {
				sum += l.DiskUsage
			}
			return a.done(list, "removed %s of %s", agentlab.Plural(len(list.Items), "layer"), work.ByteSize(sum))
		}),
	}
}
