package sandboxcmd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func snapshotCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "snapshot", Short: "Manage snapshots of sandboxes"}
	cmd.AddCommand(snapshotSaveCmd(a), snapshotRestoreCmd(a), snapshotListCmd(a), snapshotDeleteCmd(a))
	return cmd
}

func snapshotSaveCmd(a *cli.App) *cobra.Command {
	var r api.SnapshotCreate
	var wait bool
	cmd := &cobra.Command{
		Use: "save SANDBOX --name NAME", Short: "Save a sandbox", Args: cli.ExactArgs("SANDBOX"),
		Long: `Save the disk of a sandbox, and its memory if it runs or is suspended. A running
sandbox continues; its CPUs stop for a short time. A sandbox that runs a job, or
has received secrets from the bundle of its profile, cannot be saved. Secrets that
users copied or typed into the sandbox are not detected: the snapshot contains them.

The snapshot is deleted with its sandbox, or when retention.snapshots_days in
config.yaml have passed. With --keep it exists until you delete it.`,
		Example: `  agentlab sandbox snapshot save play --name clean
  agentlab sandbox new --from-snapshot play/clean`,
	}
	cli.NameFlag(cmd, &r.Name, "name of the snapshot")
	cmd.Flags().BoolVar(&r.Keep, "keep", false, "delete it neither with the sandbox nor by retention")
	cli.WaitFlag(cmd, &wait, "wait until the sandbox is saved")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		after, err := work.LastEvent(ctx, c, args[0])
		if err != nil {
			return err
		}
		n, err := c.SaveSnapshot(ctx, args[0], r)
		if err == nil && wait {
			n, err = waitSnapshot(ctx, a, c, n, after, agentlab.SnapshotReady)
		}
		if err != nil {
			return err
		}
		return a.Done(n, "snapshot %s of sandbox %s is %s", n.Name, n.SandboxName, n.State)
	})
	return cmd
}

// waitSnapshot shows the events of a sandbox until its snapshot is in a state.
func waitSnapshot(ctx context.Context, a *cli.App, c *client.Client, n api.Snapshot, after int64, want agentlab.SnapshotState) (api.Snapshot, error) {
	for e, err := range c.FollowEvents(ctx, client.EventQuery{Sandbox: fmt.Sprint(n.SandboxVMID), After: after}) {
		if err != nil {
			return n, err
		}
		a.ShowEvent(e)
		if e.Kind != agentlab.EventSandboxSnapshot || e.Data["snapshot"] != n.UID {
			continue
		}
		if err := work.Refusal(e); err != nil {
			return n, err
		}
		if e.Data["state"] != string(want) {
			continue
		}
		n.State = string(want)
		list, err := c.Snapshots(ctx, fmt.Sprint(n.SandboxVMID))
		if want == agentlab.SnapshotDeleted {
			return n, nil // there may be no sandbox either
		}
		for _, now := range list.Items {
			if now.UID == n.UID {
				n = now
			}
		}
		return n, err
	}
	return n, context.Cause(ctx)
}

func snapshotRestoreCmd(a *cli.App) *cobra.Command {
	var name string
	var wait, yes bool
	cmd := &cobra.Command{
		Use: "restore SANDBOX --name NAME", Short: "Restore a sandbox to one of its snapshots", Args: cli.ExactArgs("SANDBOX"),
		Long: `Replace the disk and the memory of a sandbox by those of one of its snapshots;
what they are now is lost. The number, the name, the lease and the network policy
of the sandbox do not change. The sandbox then runs, or is STOPPED if the snapshot
has no memory. The command asks for confirmation, unless it gets --yes.`,
		Example: "  agentlab sandbox snapshot restore play --name clean --yes",
	}
	cli.NameFlag(cmd, &name, "name of the snapshot")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cli.WaitFlag(cmd, &wait, "wait until the sandbox is restored")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if !yes && !a.Confirm(fmt.Sprintf("Replace the disk and the memory of sandbox %s by its snapshot %s?", args[0], name)) {
			return work.UsageErrorf("sandbox %s not restored: not confirmed", args[0]).WithHint("restore it without confirmation with --yes")
		}
		restore := func(ctx context.Context, sandbox string) (api.Sandbox, error) {
			return c.RestoreSnapshot(ctx, sandbox, name)
		}
		return finishSandbox(ctx, a, c, work.RequestChange(ctx, c, args[0], wait, restore), wait, func(sb api.Sandbox) bool {
			return !sb.Restoring && (work.IsUp(sb) || work.IsStopped(sb))
		})
	})
	return cmd
}

func snapshotListCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "list [SANDBOX]", Aliases: []string{"ls"}, Short: "List snapshots", Args: cobra.MaximumNArgs(1),
		Long: "List the snapshots of a sandbox, which may no longer exist, or all snapshots.",
	}
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		list, err := c.Snapshots(ctx, append(args, "")[0])
		if err != nil {
			return err
		}
		return a.Emit(list, func() error {
			t := cli.NewTable(a.Stdout, "SANDBOX", "VMID", "NAME", "STATE", "MEMORY", "SIZE", "KEEP", "AGE")
			for _, n := range list.Items {
				t.Row(n.SandboxName, n.SandboxVMID, n.Name, n.State, cli.YesNo(n.Memory), cli.UsedBytes(n.Bytes), cli.YesNo(n.Keep), a.Age(n.CreatedAt))
			}
			return t.Flush()
		})
	})
	return cmd
}

func snapshotDeleteCmd(a *cli.App) *cobra.Command {
	var name string
	var wait, yes bool
	cmd := &cobra.Command{
		Use: "delete SANDBOX --name NAME", Short: "Delete a snapshot", Args: cli.ExactArgs("SANDBOX"),
		Long: `Delete a snapshot of a sandbox, which may no longer exist. The sandboxes that were
created from it do not change. The command asks for confirmation, unless it gets
--yes.`,
	}
	cli.NameFlag(cmd, &name, "name of the snapshot")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cli.WaitFlag(cmd, &wait, "wait until it is deleted")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if !yes && !a.Confirm(fmt.Sprintf("Delete the snapshot %s of sandbox %s?", name, args[0])) {
			return work.UsageErrorf("snapshot %s not deleted: not confirmed", name).WithHint("delete it without confirmation with --yes")
		}
		after, err := work.LastEvent(ctx, c, "") // the sandbox may no longer exist
		if err != nil {
			return err
		}
		n, err := c.DeleteSnapshot(ctx, args[0], name)
		if err == nil && wait {
			n, err = waitSnapshot(ctx, a, c, n, after, agentlab.SnapshotDeleted)
		}
		if err != nil {
			return err
		}
		return a.Done(n, "snapshot %s of sandbox %s is %s", n.Name, n.SandboxName, n.State)
	})
	return cmd
}

func sandboxForkCmd(a *cli.App) *cobra.Command {
	var r api.SandboxFork
	var ttl time.Duration
	var wait bool
	cmd := &cobra.Command{
		Use: "fork SANDBOX --count N", Short: "Create sandboxes that continue a sandbox", Args: cli.ExactArgs("SANDBOX"),
		Long: `Create sandboxes that continue a sandbox from its current state, with its disk and
the processes in its memory. Each has its own name, number, network and lease. The
sandbox itself continues; its CPUs stop for a short time.

If the sandbox has received secrets, the new ones have them too; an event records
that. The exit code is 1 if one of the new sandboxes does not become ready.`,
		Example: "  agentlab sandbox fork play --count 4 --name-prefix try",
	}
	cli.Between(cmd.Flags(), &r.Count, "count", 1, agentlab.MaxFork, fmt.Sprintf("number of new sandboxes, 1 to %d", agentlab.MaxFork))
	_ = cmd.MarkFlagRequired("count")
	cmd.Flags().StringVar(&r.NamePrefix, "name-prefix", "", "prefix of the names PREFIX-1, PREFIX-2, … (default: the name of SANDBOX)")
	cmd.Flags().Var(cli.DurationFlag(&ttl, agentlab.MaxTTL), "ttl", "duration of each lease, e.g. 30m, 4h, 2d (default: the profile's)")
	cli.WaitFlag(cmd, &wait, "wait until the new sandboxes are ready")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		r.Sandbox, r.TTLMinutes = args[0], int(ttl/time.Minute)
		made, err := c.ForkSandbox(ctx, r)
		if err != nil {
			return err
		}
		var failed error
		for i, sb := range made.Items {
			if !wait {
				break
			}
			made.Items[i], err = work.WaitSandbox(ctx, a, c, sb, 0, work.IsUp)
			if ctx.Err() != nil {
				return err
			}
			if err != nil {
				a.PrintError(err)
				failed = errors.Join(failed, work.ExitStatus(cli.ExitFailure))
			}
		}
		if err := a.Emit(made, func() error { return sandboxesTable(a, made.Items) }); err != nil {
			return err
		}
		return failed
	})
	return cmd
}
