package imagecmd

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func setupCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "setup", Short: "Manage snapshots after the commands under setup of repositories",
		Long: `Manage the snapshots that jobs make after the commands under setup in the
.agentlab.yaml of a repository, so that later jobs do not run them. They are a
cache of limited size; docs/project.md describes them.`,
	}
	cmd.AddCommand(setupListCmd(a), setupRmCmd(a))
	return cmd
}

func setupListCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "list", "List snapshots after setup, the last used first", cli.ExactArgs(), cli.All((*client.Client).Setups), func(list api.List[api.Setup]) error {
		t := cli.NewTable(a.Stdout, "ID", "REPOSITORY", "BRANCH", "PROFILE", "IMAGE", "STATE", "DISK", "AGE", "USED")
		for _, s := range list.Items {
			t.Row(s.ID[:min(len(s.ID), setupIDShown)], s.Repo, cmp.Or(s.Ref, "(all)"), s.Profile, shortImage(s.Image), s.State, work.ByteSize(s.Bytes), a.Age(s.CreatedAt), a.Age(s.UsedAt))
		}
		return t.Flush()
	})
}

// setupIDShown is the number of characters of an ID in a list: all begin alike.
const setupIDShown = 20

func setupRmCmd(a *cli.App) *cobra.Command {
	var every bool
	cmd := &cobra.Command{
		Use: "rm [SETUP]", Short: "Remove a snapshot after setup, or all", Args: cobra.MaximumNArgs(1),
		Long: `Remove a snapshot after setup, by its ID or a unique prefix of it, or all. The
next job runs the commands again. Running jobs do not change.`,
	}
	cmd.Flags().BoolVar(&every, "all", false, "remove all snapshots after setup")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if every == (len(args) == 1) {
			return work.UsageErrorf("give an ID or --all").WithHint("list snapshots after setup with 'agentlab setup list'")
		}
		var list api.List[api.Setup]
		var err error
		if every {
			list, err = c.RemoveSetups(ctx)
		} else {
			list, err = c.RemoveSetup(ctx, args[0])
		}
		if err != nil {
			return err
		}
		return a.Done(list, "%s removed", agentlab.Plural(len(list.Items), "snapshot"))
	})
	return cmd
}
