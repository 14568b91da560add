package cli

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func (a *App) workspaceCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "workspace", Aliases: []string{"ws"}, Short: "Manage workspaces: disks that outlive sandboxes",
		Long: `Manage workspaces: disks that outlive sandboxes. A workspace is named by its ID or
its name. One sandbox at a time can use it, at /work: see --workspace of
'agentlab sandbox new' and 'agentlab job run'.`,
	}
	cmd.AddCommand(a.workspaceCreateCmd(), a.workspaceListCmd(), a.workspaceShowCmd(), a.workspaceRenameCmd(), a.workspaceResizeCmd(),
		a.workspaceDeleteCmd(), a.workspaceUndeleteCmd(), a.workspaceForkCmd(), a.workspaceSnapshotCmd(), a.workspaceCheckCmd(), a.workspaceFsckCmd(), a.workspaceExportCmd(), a.workspaceImportCmd(),
		a.workspaceAttachCmd(), a.workspaceDetachCmd(), a.workspaceRebindCmd(), a.workspaceLeaseCmd(), a.doctorOf("workspace", (*client.Client).WorkspaceDoctor))
	return cmd
}

// workspaceChange requests a change of a workspace, waits until it is in one of the
// states want if wait is set, and prints the outcome.
func (a *App) workspaceChange(ctx context.Context, c *client.Client, wait bool, request func() (api.Workspace, error), want ...agentlab.WorkspaceState) error {
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
	return a.done(w, "workspace %s (%s) is %s", w.Name, w.ID, w.State)
}

func (a *App) workspaceCreateCmd() *cobra.Command {
	var r api.WorkspaceCreate
	var wait bool
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Create an empty workspace",
		Example: "  agentlab workspace create data --size 80",
	}
	setName := nameOrFlag(cmd, &r.Name, "workspace")
	cmd.Flags().Func("size", "size in GiB (default: 20)", gibFlag(&r.SizeGB))
	cmd.Flags().StringVar(&r.Storage, "storage", "", "one of the backend's storages (default: the configured one)")
	backendFlag(cmd.Flags(), &r.Backend, "the workspace (default: the configured one)")
	waitFlag(cmd, &wait, "wait until the workspace is ready")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		setName(args)
		return a.workspaceChange(ctx, c, wait, func() (api.Workspace, error) { return c.CreateWorkspace(ctx, r) }, agentlab.WorkspaceReady)
	})
	return cmd
}

func (a *App) workspaceListCmd() *cobra.Command {
	var trash bool
	cmd := &cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List workspaces", Args: exactArgs()}
	cmd.Flags().BoolVar(&trash, "trash", false, "list deleted workspaces instead")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, _ []string) error {
		list, err := c.Workspaces(ctx, trash)
		if err != nil {
			return err
		}
		return a.emit(list, func() error {
			if trash {
				return a.trashTable(list.Items)
			}
			t := newTable(a.Stdout, "NAME", "ID", "STATE", "SIZE", "USED", "SANDBOX", "STORAGE", "BACKEND", "AGE")
			for _, w := range list.Items {
				t.row(w.Name, w.ID, w.State, fmt.Sprintf("%d GiB", w.SizeGB), usedBytes(w.Bytes), orDash(workspaceUser(w)), orDash(w.Storage), w.Backend, a.age(w.CreatedAt))
			}
			return t.flush()
		})
	})
	return cmd
}

// trashTable prints deleted workspaces with the time of their deletion, and when their
// retention ends.
func (a *App) trashTable(list []api.Workspace) error {
	t := newTable(a.Stdout, "NAME", "ID", "STATE", "SIZE", "USED", "STORAGE", "BACKEND", "DELETED", "KEPT UNTIL")
	for _, w := range list {
		t.row(w.Name, w.ID, w.State, fmt.Sprintf("%d GiB", w.SizeGB), usedBytes(w.Bytes), orDash(w.Storage), w.Backend, timeOrDash(w.TrashedAt), timeOrDash(w.DeleteAfter))
	}
	if err := t.flush(); err != nil || len(list) == 0 {
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

func (a *App) workspaceShowCmd() *cobra.Command {
	return query(a, "show WORKSPACE", "Show a workspace", exactArgs("WORKSPACE"), one((*client.Client).Workspace), func(w api.Workspace) error {
		size := fmt.Sprintf("%d GiB", w.SizeGB)
		if w.GrowToGB > 0 {
			size += fmt.Sprintf(", growing to %d GiB", w.GrowToGB)
		}
		rows := [][2]string{
			{"ID:", w.ID}, {"State:", w.State}, {"Reason:", w.Reason}, {"Size:", size}, {"Used:", usedBytes(w.Bytes)}, {"Sandbox:", workspaceUser(w)},
			{"Backend:", w.Backend}, {"Storage:", w.Storage}, {"Copy of:", w.From}, {"Created:", work.LocalTime(w.CreatedAt)},
		}
		if w.TrashedAt != nil {
			rows = append(rows, [2]string{"Deleted:", work.LocalTime(*w.TrashedAt)}, [2]string{"Kept until:", timeOrDash(w.DeleteAfter)})
		}
		t := newTable(a.Stdout, "Workspace:", w.Name)
		for _, r := range rows {
			t.optional(r[0], r[1])
		}
		return t.flush()
	})
}

func (a *App) workspaceRenameCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "rename WORKSPACE NAME", Short: "Change the name of a workspace", Args: exactArgs("WORKSPACE", "NAME")}
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		w, err := c.RenameWorkspace(ctx, args[0], args[1])
		if err != nil {
			return err
		}
		return a.done(w, "workspace %s has the name %s", w.ID, w.Name)
	})
	return cmd
}

func (a *App) workspaceResizeCmd() *cobra.Command {
	var size int
	var wait bool
	cmd := &cobra.Command{
		Use: "resize WORKSPACE --size GIB", Short: "Make a workspace larger", Args: exactArgs("WORKSPACE"),
		Long: "Make a workspace larger. Its content does not change. A workspace cannot become\nsmaller, except when an older snapshot is restored.",
	}
	between(cmd.Flags(), &size, "size", 1, 1<<16, "new size in GiB")
	_ = cmd.MarkFlagRequired("size")
	waitFlag(cmd, &wait, "wait until the workspace has the size")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		return a.workspaceChange(ctx, c, wait, func() (api.Workspace, error) { return c.ResizeWorkspace(ctx, args[0], size) }, agentlab.WorkspaceReady)
	})
	return cmd
}

func (a *App) workspaceDeleteCmd() *cobra.Command {
	var purge, yes, wait bool
	cmd := &cobra.Command{
		Use: "delete WORKSPACE", Short: "Move a workspace to the trash, or delete it for good", Args: exactArgs("WORKSPACE"),
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
	waitFlag(cmd, &wait, "wait until it is in the trash, or deleted")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
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
		return a.workspaceChange(ctx, c, wait, func() (api.Workspace, error) { return c.DeleteWorkspace(ctx, args[0], purge) }, done...)
	})
	return cmd
}

func (a *App) workspaceUndeleteCmd() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "undelete WORKSPACE", Short: "Return a workspace from the trash", Args: exactArgs("WORKSPACE"),
		Long: "Return a workspace from the trash, with its content and its snapshots.",
	}
	cmd.Flags().StringVar(&name, "name", "", "new name (default: the name that it had)")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		w, err := c.UndeleteWorkspace(ctx, args[0], name)
		if err != nil {
			return err
		}
		return a.done(w, "workspace %s (%s) is %s", w.Name, w.ID, w.State)
	})
	return cmd
}

func (a *App) workspaceForkCmd() *cobra.Command {
	var r api.WorkspaceFork
	var wait bool
	cmd := &cobra.Command{
		Use: "fork WORKSPACE --name NAME", Short: "Create a copy of a workspace", Args: exactArgs("WORKSPACE"),
		Long: `Create a workspace with the content of another one, or of one of its snapshots. The
two are independent of each other. The other one cannot be resized, restored or
deleted before the copy is complete.`,
		Example: "  agentlab workspace fork data --name experiment --from-snapshot clean",
	}
	nameFlag(cmd, &r.Name, "name of the copy")
	cmd.Flags().StringVar(&r.FromSnapshot, "from-snapshot", "", "snapshot of WORKSPACE to copy (default: its current content)")
	waitFlag(cmd, &wait, "wait until the copy is ready")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		return a.workspaceChange(ctx, c, wait, func() (api.Workspace, error) { return c.ForkWorkspace(ctx, args[0], r) }, agentlab.WorkspaceReady)
	})
	return cmd
}

func (a *App) workspaceCheckCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "check [WORKSPACE]", Short: "Compare workspaces with the backend", Args: cobra.MaximumNArgs(1),
		Long: `Compare a workspace, or all, with the volumes on the backend now, and print each
difference with a remedy. Nothing on the backend is changed. The exit code is 1 if
there is a difference.`,
	}
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		list, err := c.CheckWorkspaces(ctx, append(args, "")[0])
		if err != nil {
			return err
		}
		err = a.emit(list, func() error {
			for _, f := range list.Items {
				fmt.Fprintf(a.Stdout, "%-5s  %s: %s\n", f.Level, agentlab.WithoutControls(f.Name), agentlab.WithoutControls(f.Detail))
				if f.Remedy != "" {
					fmt.Fprintf(a.Stdout, "       → %s\n", agentlab.WithoutControls(f.Remedy))
				}
			}
			return nil
		})
		if err == nil && slices.ContainsFunc(list.Items, func(f api.Finding) bool { return f.Level != "ok" }) {
			err = work.ExitStatus(exitFailure)
		}
		return err
	})
	return cmd
}
