package workspacecmd

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

func workspaceFsckCmd(a *cli.App) *cobra.Command {
	var repair, yes bool
	cmd := &cobra.Command{
		Use: "fsck WORKSPACE", Short: "Check the file system of a workspace", Args: cli.ExactArgs("WORKSPACE"),
		Long: `Check the file system of a workspace that no sandbox has, with e2fsck in a
maintenance sandbox without a network. Nothing is changed, and the exit code is 1 if
there are errors. A workspace whose sandbox was killed can have some: the next
sandbox that mounts it corrects those that are safe to correct.

With --repair all errors are corrected, which can lose damaged files; save a snapshot
first. The command asks for confirmation, unless it gets --yes.`,
		Example: `  agentlab workspace fsck data
  agentlab workspace snapshot create data --name before-repair
  agentlab workspace fsck data --repair --yes`,
	}
	cmd.Flags().BoolVar(&repair, "repair", false, "correct all errors")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if yes && !repair {
			return work.UsageErrorf("--yes requires --repair")
		}
		if repair && !yes && !a.Confirm(fmt.Sprintf("Correct all errors in the file system of workspace %s? Damaged files may be lost.", args[0])) {
			return work.UsageErrorf("workspace %s not repaired: not confirmed", args[0]).WithHint("repair it without confirmation with --yes")
		}
		res, err := transfer.Fsck(ctx, a, c, args[0], repair)
		if err == nil {
			err = a.Emit(res, func() error {
				_, err := fmt.Fprintf(a.Stdout, "%s\nThe file system of workspace %s is %s.\n", res.Output, args[0], res.State)
				return err
			})
		}
		if err != nil || res.State != transfer.FsckDamaged {
			return err
		}
		if !repair {
			a.Progressf("  → agentlab workspace fsck %s --repair", args[0])
		}
		return work.ExitStatus(cli.ExitFailure)
	})
	return cmd
}

func workspaceExportCmd(a *cli.App) *cobra.Command {
	var out string
	var force bool
	cmd := &cobra.Command{
		Use: "export WORKSPACE", Short: "Write the files of a workspace to a tar.zst", Args: cli.ExactArgs("WORKSPACE"),
		Long: `Write the files of a workspace that no sandbox has to an archive (tar.zst), through a
maintenance sandbox without a network. The archive has no devices and no sockets. Its
names are checked, but agents wrote its content: treat it as hostile.`,
		Example: `  agentlab workspace export data -o data.tar.zst
  agentlab workspace import copy data.tar.zst`,
	}
	cmd.Flags().StringVarP(&out, "out", "o", "", "file or directory to write to; - means standard output (default: WORKSPACE.tar.zst)")
	cmd.Flags().BoolVar(&force, "force", false, "overwrite an existing file")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if _, tty := work.TerminalOf(a.Stdout); tty && out == "-" {
			return work.UsageErrorf("an archive is not written to a terminal").WithHint("use --out FILE or a pipe")
		}
		w, err := c.Workspace(ctx, args[0])
		if err != nil {
			return err
		}
		name := cli.OutputName(out, w.Name+".tar.zst")
		if _, err := os.Lstat(name); err == nil && !force && out != "-" {
			return agentlab.Errorf(agentlab.CodeExists, "%s exists", name).WithHint("use --force to replace it, or --out to write elsewhere")
		}
		r := api.SandboxCreate{Maintenance: agentlab.MaintenanceFiles, WorkspaceSelection: api.WorkspaceSelection{Workspace: w.ID}}
		return transfer.Maintain(ctx, a, c, r, func(ctx context.Context, sb api.Sandbox) error {
			see := &gitsafe.ArchiveNames{}
			if out == "-" {
				_, err := transfer.Export(ctx, c, sb, w, a.Stdout, see.See)
				gitsafe.NoteArchive(a, see.Findings())
				return err
			}
			var entries int
			n, err := work.SaveTo(name, transfer.Pipe(func(to io.Writer) (err error) {
				entries, err = transfer.Export(ctx, c, sb, w, to, see.See)
				return err
			}), force, 0o600)
			if err != nil {
				return err
			}
			gitsafe.NoteArchive(a, see.Findings())
			return a.Done(map[string]any{"file": name, "size": n, "entries": entries}, "wrote %s (%s, %s)", name, agentlab.Plural(entries, "entry"), work.ByteSize(n))
		})
	})
	return cmd
}

func workspaceImportCmd(a *cli.App) *cobra.Command {
	var use api.WorkspaceNew
	cmd := &cobra.Command{
		Use: "import NAME FILE", Short: "Create a workspace with the files of a tar.zst", Args: cli.ExactArgs("NAME", "FILE"),
		Long: `Create a workspace with the files of an archive (tar.zst) that 'agentlab workspace
export' has written, through a maintenance sandbox without a network. FILE - means
standard input. The workspace gets its name when it is complete; until then its name
begins with import-, and after an error it is deleted.`,
		Example: "  agentlab workspace import copy data.tar.zst --size 80",
	}
	cli.Between(cmd.Flags(), &use.SizeGB, "size", 0, 1<<16, "size in GiB (default: 20)")
	cmd.Flags().StringVar(&use.Storage, "storage", "", "one of the backend's storages (default: the configured one)")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		in := a.Stdin
		if args[1] != "-" {
			f, err := os.Open(args[1])
			if err != nil {
				return agentlab.Errorf(agentlab.CodeInvalid, "cannot read the archive: %w", err)
			}
			defer func() { _ = f.Close() }()
			in = f
		}
		if err := agentlab.ValidateWorkspaceName(args[0]); err != nil {
			return err
		}
		if w, err := c.Workspace(ctx, args[0]); err == nil && w.TrashedAt == nil {
			return agentlab.Errorf(agentlab.CodeExists, "there is a workspace named %q", args[0]).WithHint("choose another name")
		}
		w, err := transfer.ImportTo(ctx, a, c, "", use, func(ctx context.Context, sb api.Sandbox, w api.Workspace) error {
			return transfer.Extract(ctx, c, sb, w, in, nil)
		})
		if err != nil {
			return err
		}
		if w, err = c.RenameWorkspace(ctx, w.ID, args[0]); err != nil {
			return err
		}
		return a.Done(w, "workspace %s (%s) is %s", w.Name, w.ID, w.State)
	})
	return cmd
}

func workspaceMoveCmd(a *cli.App) *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use: "move WORKSPACE", Short: "Move a workspace to another backend", Args: cli.ExactArgs("WORKSPACE"),
		Long: `Move a workspace that no sandbox has to another backend. Its files are copied through
two maintenance sandboxes without a network, and compared. The copy then has its name and
its session, and the workspace goes to the trash with its snapshots, which are not copied.
After an error the workspace is unchanged, and the copy is deleted.`,
		Example: `  agentlab workspace move data --to local
  agentlab workspace undelete ws-… --name data-before   # the workspace on the old backend`,
	}
	cmd.Flags().StringVar(&to, "to", "", "backend to move the workspace to (see 'agentlab backend list')")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if to == "" {
			return work.UsageErrorf("--to is missing").WithHint("name a backend of 'agentlab backend list'")
		}
		w, err := c.Workspace(ctx, args[0])
		if err != nil {
			return err
		}
		moved, err := transfer.Move(ctx, a, c, w, to)
		if err != nil {
			return err
		}
		return a.Done(moved, "workspace %s (%s) is on backend %s; the one on backend %s (%s) is in the trash", moved.Name, moved.ID, moved.Backend, w.Backend, w.ID)
	})
	return cmd
}
