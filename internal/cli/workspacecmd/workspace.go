package workspacecmd

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func workspaceCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "workspace", Aliases: []string{"ws"}, Short: "Manage workspaces: disks that outlive sandboxes",
		Long: `Manage workspaces: disks that outlive sandboxes. A workspace is named by its ID or
its name. One sandbox at a time can use it, at /work: see --workspace of
'agentlab sandbox new' and 'agentlab job run'.`,
	}
	cmd.AddCommand(workspaceCreateCmd(a), workspaceListCmd(a), workspaceShowCmd(a), workspaceRenameCmd(a), workspaceResizeCmd(a),
		workspaceDeleteCmd(a), workspaceUndeleteCmd(a), workspaceForkCmd(a), workspaceSnapshotCmd(a), workspaceCheckCmd(a), workspaceFsckCmd(a), workspaceExportCmd(a), workspaceImportCmd(a), workspaceMoveCmd(a),
		workspaceAttachCmd(a), workspaceDetachCmd(a), workspaceRebindCmd(a), workspaceLeaseCmd(a), a.DoctorOf("workspace", (*client.Client).WorkspaceDoctor))
	return cmd
}

// workspaceChange requests a change of a workspace, waits until it is in one of the
// states want if wait is set, and prints the outcome.
func workspaceChange(ctx context.Context, a *cli.App, c *client.Client, wait bool, request func() (api.Workspace, error), want ...agentlab.WorkspaceState) error {
	after, err := work.LastEvent(ctx, c, "")
	if err != nil {
		return err
	}
	w, err := request()
	if err == nil && wait && !slices.Contains(want, agentlab.WorkspaceState(w.State)) {
		w, err = work.WaitWorkspace(ctx, a, c, w, after, want)
	}
	if err != nil {
		return err
	}
	return a.Done(w, "workspace %s (%s) is %s", w.Name, w.ID, w.State)
}

func workspaceCreateCmd(a *cli.App) *cobra.Command {
	var r api.WorkspaceCreate
	var wait bool
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Create an empty workspace",
		Example: "  agentlab workspace create data --size 80",
	}
	setName := cli.NameOrFlag(cmd, &r.Name, "workspace")
	cmd.Flags().Func("size", "size in GiB (default: 20)", cli.GibFlag(&r.SizeGB))
	cmd.Flags().StringVar(&r.Storage, "storage", "", "one of the backend's storages (default: the configured one)")
	cli.BackendFlag(cmd.Flags(), &r.Backend, "the workspace (default: the configured one)")
	cli.WaitFlag(cmd, &wait, "wait until the workspace is ready")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		setName(args)
		return workspaceChange(ctx, a, c, wait, func() (api.Workspace, error) { return c.CreateWorkspace(ctx, r) }, agentlab.WorkspaceReady)
	})
	return cmd
}

func workspaceListCmd(a *cli.App) *cobra.Command {
	var trash bool
	cmd := &cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List workspaces", Args: cli.ExactArgs()}
	cmd.Flags().BoolVar(&trash, "trash", false, "list deleted workspaces instead")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
		list, err := c.Workspaces(ctx, trash)
		if err != nil {
			return err
		}
		return a.Emit(list, func() error {
			if trash {
				return trashTable(a, list.Items)
			}
			t := cli.NewTable(a.Stdout, "NAME", "ID", "STATE", "SIZE", "USED", "SANDBOX", "STORAGE", "BACKEND", "AGE")
			for _, w := range list.Items {
				t.Row(w.Name, w.ID, w.State, fmt.Sprintf("%d GiB", w.SizeGB), cli.UsedBytes(w.Bytes), cli.OrDash(workspaceUser(w)), cli.OrDash(w.Storage), w.Backend, a.Age(w.CreatedAt))
			}
			return t.Flush()
		})
	})
	return cmd
}

// trashTable prints deleted workspaces with the time of their deletion, and when their
// retention ends.
func trashTable(a *cli.App, list []api.Workspace) error {
	t := cli.NewTable(a.Stdout, "NAME", "ID", "STATE", "SIZE", "USED", "STORAGE", "BACKEND", "DELETED", "KEPT UNTIL")
	for _, w := range list {
		t.Row(w.Name, w.ID, w.State, fmt.Sprintf("%d GiB", w.SizeGB), cli.UsedBytes(w.Bytes), cli.OrDash(w.Storage), w.Backend, timeOrDash(w.TrashedAt), timeOrDash(w.DeleteAfter))
	}
	if err := t.Flush(); err != nil || len(list) == 0 {
		return err
	}
	a.Progressf("a workspace is deleted for good after KEPT UNTIL (retention.trash_days)\n  → agentlab workspace undelete NAME")
	return nil
}

func timeOrDash(t *time.Time) string {
	if t == nil {
		return "-"
	}
	return work.LocalTime(*t)
}

// workspaceUser returns the name of the sandbox that has a workspace, with the number
// of those that wait for it.
func workspaceUser(w api.Workspace) string {
	if len(w.Leases) == 0 {
		return ""
	}
	user := w.Leases[0].Sandbox
	if n := len(w.Leases) - 1; n > 0 {
		user += fmt.Sprintf(" (%d waiting)", n)
	}
	return user
}

func workspaceShowCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "show WORKSPACE", "Show a workspace", cli.ExactArgs("WORKSPACE"), cli.One((*client.Client).Workspace), func(w api.Workspace) error {
		size := fmt.Sprintf("%d GiB", w.SizeGB)
		if w.GrowToGB > 0 {
			size += fmt.Sprintf(", growing to %d GiB", w.GrowToGB)
		}
		rows := [][2]string{
			{"ID:", w.ID}, {"State:", w.State}, {"Reason:", w.Reason}, {"Size:", size}, {"Used:", cli.UsedBytes(w.Bytes)}, {"Sandbox:", workspaceUser(w)},
			{"Backend:", w.Backend}, {"Storage:", w.Storage}, {"Copy of:", w.From}, {"Created:", work.LocalTime(w.CreatedAt)},
		}
		if w.TrashedAt != nil {
			rows = append(rows, [2]string{"Deleted:", work.LocalTime(*w.TrashedAt)}, [2]string{"Kept until:", timeOrDash(w.DeleteAfter)})
		}
		t := cli.NewTable(a.Stdout, "Workspace:", w.Name)
		for _, r := range rows {
			t.Optional(r[0], r[1])
		}
		return t.Flush()
	})
}

func workspaceRenameCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "rename WORKSPACE NAME", Short: "Change the name of a workspace", Args: cli.ExactArgs("WORKSPACE", "NAME")}
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		w, err := c.RenameWorkspace(ctx, args[0], args[1])
		if err != nil {
			return err
		}
		return a.Done(w, "workspace %s has the name %s", w.ID, w.Name)
	})
	return cmd
}

func workspaceResizeCmd(a *cli.App) *cobra.Command {
	var size int
	var wait bool
	cmd := &cobra.Command{
		Use: "resize WORKSPACE --size GIB", Short: "Make a workspace larger", Args: cli.ExactArgs("WORKSPACE"),
		Long: "Make a workspace larger. Its content does not change. A workspace cannot become\nsmaller, except when an older snapshot is restored.",
	}
	cli.Between(cmd.Flags(), &size, "size", 1, 1<<16, "new size in GiB")
	_ = cmd.MarkFlagRequired("size")
	cli.WaitFlag(cmd, &wait, "wait until the workspace has the size")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		return workspaceChange(ctx, a, c, wait, func() (api.Workspace, error) { return c.ResizeWorkspace(ctx, args[0], size) }, agentlab.WorkspaceReady)
	})
	return cmd
}

func workspaceDeleteCmd(a *cli.App) *cobra.Command {
	var purge, yes, wait bool
	cmd := &cobra.Command{
		Use: "delete WORKSPACE", Short: "Move a workspace to the trash, or delete it for good", Args: cli.ExactArgs("WORKSPACE"),
		Long: `Move a workspace to the trash. 'agentlab workspace undelete' returns it until
retention.trash_days in config.yaml have passed; then it is deleted with its
snapshots. With --purge it is deleted at once, also if it is in the trash.

A workspace that was never READY has no content and is deleted at once. The command
asks for confirmation, unless it gets --yes.`,
		Example: `  agentlab workspace delete data --yes
  agentlab workspace undelete data`,
	}
	cmd.Flags().BoolVar(&purge, "purge", false, "delete it at once, with its content and its snapshots")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cli.WaitFlag(cmd, &wait, "wait until it is in the trash, or deleted")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		question := fmt.Sprintf("Move workspace %s to the trash?", args[0])
		if purge {
			question = fmt.Sprintf("Delete workspace %s with its content and its snapshots for good?", args[0])
		}
		if !yes && !a.Confirm(question) {
			return work.UsageErrorf("workspace %s not deleted: not confirmed", args[0]).WithHint("delete it without confirmation with --yes")
		}
		done := []agentlab.WorkspaceState{agentlab.WorkspaceDeleted}
		if !purge {
			done = append(done, agentlab.WorkspaceTrashed)
		}
		return workspaceChange(ctx, a, c, wait, func() (api.Workspace, error) { return c.DeleteWorkspace(ctx, args[0], purge) }, done...)
	})
	return cmd
}

func workspaceUndeleteCmd(a *cli.App) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "undelete WORKSPACE", Short: "Return a workspace from the trash", Args: cli.ExactArgs("WORKSPACE"),
		Long: "Return a workspace from the trash, with its content and its snapshots.",
	}
	cmd.Flags().StringVar(&name, "name", "", "new name (default: the name that it had)")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		w, err := c.UndeleteWorkspace(ctx, args[0], name)
		if err != nil {
			return err
		}
		return a.Done(w, "workspace %s (%s) is %s", w.Name, w.ID, w.State)
	})
	return cmd
}

func workspaceForkCmd(a *cli.App) *cobra.Command {
	var r api.WorkspaceFork
	var wait bool
	cmd := &cobra.Command{
		Use: "fork WORKSPACE --name NAME", Short: "Create a copy of a workspace", Args: cli.ExactArgs("WORKSPACE"),
		Long: `Create a workspace with the content of another one, or of one of its snapshots. The
two are independent of each other. The other one cannot be resized, restored or
deleted before the copy is complete.`,
		Example: "  agentlab workspace fork data --name experiment --from-snapshot clean",
	}
	cli.NameFlag(cmd, &r.Name, "name of the copy")
	cmd.Flags().StringVar(&r.FromSnapshot, "from-snapshot", "", "snapshot of WORKSPACE to copy (default: its current content)")
	cli.WaitFlag(cmd, &wait, "wait until the copy is ready")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		return workspaceChange(ctx, a, c, wait, func() (api.Workspace, error) { return c.ForkWorkspace(ctx, args[0], r) }, agentlab.WorkspaceReady)
	})
	return cmd
}

func workspaceCheckCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "check [WORKSPACE]", Short: "Compare workspaces with the backend", Args: cobra.MaximumNArgs(1),
		Long: `Compare a workspace, or all, with the volumes on the backend now, and print each
difference with a remedy. Nothing on the backend is changed. The exit code is 1 if
there is a difference.`,
	}
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		list, err := c.CheckWorkspaces(ctx, append(args, "")[0])
		if err != nil {
			return err
		}
		err = a.Emit(list, func() error {
			for _, f := range list.Items {
				fmt.Fprintf(a.Stdout, "%-5s  %s: %s\n", f.Level, agentlab.WithoutControls(f.Name), agentlab.WithoutControls(f.Detail))
				if f.Remedy != "" {
					fmt.Fprintf(a.Stdout, "       → %s\n", agentlab.WithoutControls(f.Remedy))
				}
			}
			return nil
		})
		if err == nil && slices.ContainsFunc(list.Items, func(f api.Finding) bool { return f.Level != "ok" }) {
			err = work.ExitStatus(cli.ExitFailure)
		}
		return err
	})
	return cmd
}
