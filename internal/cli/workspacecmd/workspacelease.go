package workspacecmd

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/sandboxcmd"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func workspaceAttachCmd(a *cli.App) *cobra.Command {
	var r api.WorkspaceAttach
	var wait time.Duration
	cmd := &cobra.Command{
		Use: "attach WORKSPACE SANDBOX", Short: "Mount a workspace in a sandbox that exists", Args: cli.ExactArgs("WORKSPACE", "SANDBOX"),
		Long: `Mount a workspace at /work in a sandbox that has none. A stopped sandbox gets it when
it starts. Not every backend can attach a workspace to a running sandbox.`,
		Example: "  agentlab workspace attach data play",
	}
	cmd.Flags().DurationVar(&wait, "wait", 0, "how long to wait while another sandbox has the workspace, e.g. 10m (default: not at all)")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		r.Sandbox, r.WaitSeconds = args[1], int((wait+time.Second-1)/time.Second)
		after, err := work.LastEvent(ctx, c, "")
		if err != nil {
			return err
		}
		return attachWorkspace(ctx, a, c, args[0], r, after)
	})
	return cmd
}

// attachWorkspace attaches a workspace and waits until the guest has mounted it. after
// is the ID of an event before the request.
func attachWorkspace(ctx context.Context, a *cli.App, c *client.Client, workspace string, r api.WorkspaceAttach, after int64) error {
	sb, err := c.AttachWorkspace(ctx, workspace, r)
	if err != nil {
		return err
	}
	if sb.State != string(agentlab.SandboxStopped) {
		err = followLease(ctx, a, c, sb.WorkspaceID, after, func(e api.Event) bool { return e.SandboxVMID == sb.VMID && e.Data["mounted"] == true })
	}
	if err != nil {
		return err
	}
	return a.Done(sb, "sandbox %s has workspace %s", sb.Name, workspace)
}

// followLease shows the events of the leases of a workspace until done returns true. It
// returns an error if a request was given up.
func followLease(ctx context.Context, a *cli.App, c *client.Client, workspace string, after int64, done func(api.Event) bool) error {
	for e, err := range c.FollowEvents(ctx, client.EventQuery{Kind: agentlab.EventWorkspaceLease, After: after}) {
		if err != nil {
			return err
		}
		a.ShowEvent(e)
		if ended, err := settlesLease(e, workspace, done); ended || err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// settlesLease reports whether an event ends the wait for a request about the lease of a
// workspace, and returns the error of one that was given up.
func settlesLease(e api.Event, workspace string, done func(api.Event) bool) (bool, error) {
	if e.Data["workspace"] != workspace {
		return false, nil
	}
	return done(e), work.Refusal(e)
}

func workspaceDetachCmd(a *cli.App) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "detach WORKSPACE", Short: "Take a workspace from the sandbox that has it", Args: cli.ExactArgs("WORKSPACE"),
		Long: `Take a workspace from the sandbox that has it. The guest unmounts it first; if its
processes use it, the command fails and names some of them. With --force it is taken
in any case, and what the guest wrote last may be lost.`,
		Example: "  agentlab workspace detach data",
	}
	cmd.Flags().BoolVar(&force, "force", false, "also if the guest does not unmount it")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		return detachWorkspace(ctx, a, c, args[0], force)
	})
	return cmd
}

// detachWorkspace takes a workspace from its sandbox, and waits for it.
func detachWorkspace(ctx context.Context, a *cli.App, c *client.Client, workspace string, force bool) error {
	w, err := c.Workspace(ctx, workspace)
	if err != nil {
		return err
	}
	after, err := work.LastEvent(ctx, c, "")
	if err != nil {
		return err
	}
	l, err := c.DetachWorkspace(ctx, w.ID, force)
	if err != nil {
		return err
	}
	err = followLease(ctx, a, c, w.ID, after, func(e api.Event) bool { return e.Data["lease"] == float64(l.Number) && e.Data["ended"] == true })
	if err != nil {
		return err
	}
	return a.Done(l, "workspace %s is detached from sandbox %d", workspace, l.SandboxVMID)
}

func workspaceRebindCmd(a *cli.App) *cobra.Command {
	var force, wait, keepalive bool
	var r api.WorkspaceRebind
	var ttl time.Duration
	cmd := &cobra.Command{
		Use: "rebind WORKSPACE [SANDBOX]", Short: "Move a workspace to another sandbox",
		Long: `Take a workspace from the sandbox that has it, and mount it in another one: in SANDBOX,
or in a new sandbox. Sandboxes that already wait for it get it first. If the
workspace cannot be taken, the new sandbox is destroyed. A command that was
interrupted can be repeated with the --name of the new sandbox.`,
		Example: `  agentlab workspace rebind data play
  agentlab workspace rebind data --profile yolo-workspace`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 2 {
				return cli.ExactArgs("WORKSPACE")(cmd, args)
			}
			for _, name := range []string{"profile", "name", "ttl", "keepalive", "no-wait"} {
				if cmd.Flags().Changed(name) {
					return work.UsageErrorf("--%s is for a new sandbox", name).WithHint("remove it, or remove %s", args[1])
				}
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&force, "force", false, "also if the guest that has it does not unmount it")
	flags.StringVar(&r.Profile, "profile", "", "profile of the new sandbox (see 'agentlab profile list')")
	flags.StringVar(&r.Name, "name", "", "name of the new sandbox (default: generated)")
	flags.Var(cli.DurationFlag(&ttl, agentlab.MaxTTL), "ttl", "duration of the lease of the new sandbox, e.g. 30m, 4h, 2d (default: the profile's)")
	flags.BoolVar(&keepalive, "keepalive", false, "stop the new sandbox when its lease ends, do not destroy it (default: the profile's)")
	cli.WaitFlag(cmd, &wait, "wait until the new sandbox is ready")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if len(args) == 1 {
			r.TTLMinutes, r.Force = int(ttl/time.Minute), force
			if flags.Changed("keepalive") {
				r.Keepalive = &keepalive
			}
			sb, err := c.RebindWorkspace(ctx, args[0], r)
			if err == nil && wait {
				sb, err = work.WaitSandbox(ctx, a, c, sb, 0, work.IsUp)
			}
			if err != nil {
				return err
			}
			return sandboxcmd.PrintSandbox(a, sb)
		}
		return rebindTo(ctx, a, c, args[0], args[1], force)
	})
	return cmd
}

// rebindTo moves a workspace to a sandbox that exists.
func rebindTo(ctx context.Context, a *cli.App, c *client.Client, workspace, sandbox string, force bool) error {
	w, err := c.Workspace(ctx, workspace)
	if err != nil {
		return err
	}
	sb, err := c.Sandbox(ctx, sandbox)
	if err != nil {
		return err
	}
	after, err := work.LastEvent(ctx, c, "")
	if err != nil {
		return err
	}
	if len(w.Leases) > 0 && w.Leases[0].SandboxVMID != sb.VMID {
		// It has its place in the queue before the other one loses the workspace.
		if _, err := c.AttachWorkspace(ctx, w.ID, api.WorkspaceAttach{Sandbox: sandbox, WaitSeconds: int(cli.StatefulWait / time.Second)}); err != nil {
			return err
		}
		if _, err := c.DetachWorkspace(ctx, w.ID, force); err != nil {
			return err
		}
	}
	return attachWorkspace(ctx, a, c, w.ID, api.WorkspaceAttach{Sandbox: sandbox}, after)
}

func workspaceLeaseCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "lease", Short: "Show and end leases of workspaces",
		Long: `Show and end leases of workspaces. A sandbox has the lease of its workspace until the
workspace is detached, at the latest until the sandbox is destroyed.`,
	}
	cmd.AddCommand(cli.Query(a, "show WORKSPACE", "Show which sandboxes have a workspace, and wait for it", cli.ExactArgs("WORKSPACE"), cli.One((*client.Client).Workspace), func(w api.Workspace) error {
		return printLeases(a, w)
	}), leaseReleaseCmd(a))
	return cmd
}

func printLeases(a *cli.App, w api.Workspace) error {
	t := cli.NewTable(a.Stdout, "LEASE", "SANDBOX", "VMID", "JOB", "STATE", "SINCE", "UNTIL")
	for _, l := range w.Leases {
		state, since, until := "has it", l.RequestedAt, "-"
		switch {
		case l.AcquiredAt == nil:
			state = "waits"
			if l.WaitUntil != nil {
				until = work.LocalTime(*l.WaitUntil)
			}
		case l.Release != "":
			state = "is detached"
		}
		if l.AcquiredAt != nil {
			since = *l.AcquiredAt
		}
		if l.ExpiresAt != nil && l.AcquiredAt != nil {
			until = work.LocalTime(*l.ExpiresAt)
		}
		t.Row(strconv.Itoa(l.Number), cli.OrDash(l.Sandbox), strconv.Itoa(l.SandboxVMID), cli.OrDash(l.JobID), state, work.LocalTime(since), until)
	}
	return t.Flush()
}

func leaseReleaseCmd(a *cli.App) *cobra.Command {
	var force, yes bool
	cmd := &cobra.Command{
		Use: "release WORKSPACE", Short: "End the lease of the sandbox that has a workspace", Args: cli.ExactArgs("WORKSPACE"),
		Long: `End the lease of the sandbox that has a workspace: the same as 'agentlab workspace
detach'. With --force the workspace is taken from a sandbox whose guest does not
unmount it; the command asks for confirmation, unless it gets --yes.`,
		Example: "  agentlab workspace lease release data --force --yes",
	}
	cmd.Flags().BoolVar(&force, "force", false, "also if the guest does not unmount the workspace")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if force && !yes && !a.Confirm(fmt.Sprintf("Take workspace %s from its sandbox? What the guest wrote last may be lost.", args[0])) {
			return work.UsageErrorf("lease of workspace %s not released: not confirmed", args[0]).WithHint("release it without confirmation with --yes")
		}
		return detachWorkspace(ctx, a, c, args[0], force)
	})
	return cmd
}
