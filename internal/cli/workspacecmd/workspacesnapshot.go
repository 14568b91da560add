package workspacecmd

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func workspaceSnapshotCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "snapshot", Short: "Manage snapshots of workspaces"}
	cmd.AddCommand(workspaceSaveCmd(a), workspaceSavedCmd(a), workspaceRestoreCmd(a), workspaceDropCmd(a))
	return cmd
}

// snapshotChange requests a change of a snapshot, waits until it is in a state if wait
// is set, and prints the outcome.
func snapshotChange(ctx context.Context, a *cli.App, c *client.Client, wait bool, request func() (api.WorkspaceSnapshot, error), want agentlab.WorkspaceSnapshotState) error {
	after, err := work.LastEvent(ctx, c, "")
	if err != nil {
		return err
	}
	n, err := request()
	if err != nil {
		return err
	}
	if wait {
		for e, err := range c.FollowEvents(ctx, client.EventQuery{Kind: agentlab.EventWorkspaceSnapshot, After: after}) {
			if err != nil {
				return err
			}
			if e.Data["snapshot"] != n.UID {
				continue
			}
			a.ShowEvent(e)
			if err := work.Refusal(e); err != nil {
				return err
			}
			if e.Data["state"] == string(want) {
				n.State = string(want)
				break
			}
		}
		if n.State != string(want) {
			return context.Cause(ctx)
		}
	}
	return a.Done(n, "snapshot %s of workspace %s is %s", n.Name, n.WorkspaceID, n.State)
}

func workspaceSaveCmd(a *cli.App) *cobra.Command {
	var name, attached string
	var wait bool
	cmd := &cobra.Command{
		Use: "create WORKSPACE --name NAME", Short: "Save the content of a workspace", Args: cli.ExactArgs("WORKSPACE"),
		Long: `Save the content of a workspace. Its snapshots are deleted with it. A workspace that
a sandbox has is saved only with --attached:

  frozen  The guest writes everything, and waits until the workspace is saved. If it
          does not, nothing is saved.
  crash   The guest is not asked. The snapshot has what a power cut would leave: what
          was synced, and perhaps more.`,
		Example: "  agentlab workspace snapshot create data --name clean\n  agentlab workspace snapshot create data --name now --attached frozen",
	}
	cli.NameFlag(cmd, &name, "name of the snapshot")
	cli.Choice(cmd.Flags(), &attached, "attached", agentlab.AttachedConsistencies, "save it also while a sandbox has it: frozen or crash")
	cli.WaitFlag(cmd, &wait, "wait until the workspace is saved")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		return snapshotChange(ctx, a, c, wait, func() (api.WorkspaceSnapshot, error) {
			return c.SaveWorkspaceSnapshot(ctx, args[0], api.WorkspaceSnapshotCreate{Name: name, Attached: attached})
		}, agentlab.WorkspaceSnapshotReady)
	})
	return cmd
}

func workspaceSavedCmd(a *cli.App) *cobra.Command {
	cmd := cli.Query(a, "list WORKSPACE", "List the snapshots of a workspace", cli.ExactArgs("WORKSPACE"), cli.One((*client.Client).WorkspaceSnapshots), func(list api.List[api.WorkspaceSnapshot]) error {
		t := cli.NewTable(a.Stdout, "NAME", "STATE", "CONSISTENCY", "SIZE", "AGE")
		for _, n := range list.Items {
			t.Row(n.Name, n.State, n.Consistency, fmt.Sprintf("%d GiB", n.SizeGB), a.Age(n.CreatedAt))
		}
		return t.Flush()
	})
	cmd.Aliases = []string{"ls"}
	return cmd
}

func workspaceRestoreCmd(a *cli.App) *cobra.Command {
	var name string
	var wait, yes bool
	cmd := &cobra.Command{
		Use: "restore WORKSPACE --name NAME", Short: "Restore a workspace to one of its snapshots", Args: cli.ExactArgs("WORKSPACE"),
		Long: `Replace the content and the size of a workspace by those of one of its snapshots;
what they are now is lost. The command asks for confirmation, unless it gets --yes.`,
		Example: "  agentlab workspace snapshot restore data --name clean --yes",
	}
	cli.NameFlag(cmd, &name, "name of the snapshot")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cli.WaitFlag(cmd, &wait, "wait until the workspace is restored")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if !yes && !a.Confirm(fmt.Sprintf("Replace the content of workspace %s by its snapshot %s?", args[0], name)) {
			return work.UsageErrorf("workspace %s not restored: not confirmed", args[0]).WithHint("restore it without confirmation with --yes")
		}
		return workspaceChange(ctx, a, c, wait, func() (api.Workspace, error) {
			return c.RestoreWorkspaceSnapshot(ctx, args[0], name)
		}, agentlab.WorkspaceReady)
	})
	return cmd
}

func workspaceDropCmd(a *cli.App) *cobra.Command {
	var name string
	var wait, yes bool
	cmd := &cobra.Command{
		Use: "delete WORKSPACE --name NAME", Short: "Delete a snapshot of a workspace", Args: cli.ExactArgs("WORKSPACE"),
		Long: "Delete a snapshot of a workspace. The workspace and its copies do not change. The\ncommand asks for confirmation, unless it gets --yes.",
	}
	cli.NameFlag(cmd, &name, "name of the snapshot")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cli.WaitFlag(cmd, &wait, "wait until the snapshot is deleted")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if !yes && !a.Confirm(fmt.Sprintf("Delete the snapshot %s of workspace %s?", name, args[0])) {
			return work.UsageErrorf("snapshot %s not deleted: not confirmed", name).WithHint("delete it without confirmation with --yes")
		}
		return snapshotChange(ctx, a, c, wait, func() (api.WorkspaceSnapshot, error) {
			return c.DeleteWorkspaceSnapshot(ctx, args[0], name)
		}, agentlab.WorkspaceSnapshotDeleted)
	})
	return cmd
}
