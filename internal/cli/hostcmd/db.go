package hostcmd

import (
	"fmt"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func dbCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "db", Short: "Back up, restore and rebuild the database",
		Long: `Back up, restore and rebuild the database of the daemon.

The daemon makes a backup every hour (see backups in config.yaml), in backups/ of
its state directory. A database belongs to one state directory: the daemon does
not start if they do not match, or if the database is missing or empty and the
directory is not. It deletes nothing then.`,
	}
	backup := cli.Query(a, "backup", "Make a backup of the database now", cli.ExactArgs(), cli.All((*client.Client).BackupDatabase), func(b api.Backup) error {
		_, err := fmt.Fprintln(a.Stdout, agentlab.WithoutControls(b.Path))
		return err
	})
	cmd.AddCommand(backup, dbListCmd(a), dbRestoreCmd(a), dbRebuildCmd(a))
	return cmd
}

func dbListCmd(a *cli.App) *cobra.Command {
	var system bool
	cmd := &cobra.Command{Use: "list", Short: "List the backups, newest first", Args: cli.ExactArgs()}
	systemFlag(cmd, &system)
	cmd.RunE = func(*cobra.Command, []string) error { return repair(a, system, "list") }
	return cmd
}

func dbRestoreCmd(a *cli.App) *cobra.Command {
	var system, adopt bool
	cmd := &cobra.Command{
		Use: "restore [BACKUP]", Short: "Replace the database by a backup",
		Long: `Replace the database by a backup: the newest valid one, or the given one, by its
name in 'agentlab db list' or its path. The daemon must not run. The whole backup
is checked first. The old database is kept beside the new one. Changes since the
backup are added from the files of jobs and the sandboxes of the backend, as
'agentlab db rebuild' does.`,
		Args: cobra.MaximumNArgs(1),
	}
	systemFlag(cmd, &system)
	cmd.Flags().BoolVar(&adopt, "adopt", false, "accept a backup of another installation")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		var flags []string
		if adopt {
			flags = append(flags, "--adopt")
		}
		return repair(a, system, "restore", append(append(flags, "--"), args...)...)
	}
	return cmd
}

func dbRebuildCmd(a *cli.App) *cobra.Command {
	var system bool
	cmd := &cobra.Command{
		Use: "rebuild", Short: "Rebuild a lost database from the state directory and the backend",
		Long: `Rebuild a lost database: jobs from their records, logs and artifacts, sandboxes
from the marks on the backend. The daemon must not run. A valid database of this
installation is completed; any other is kept beside the new one.

Unfinished jobs become FAILED. Sandboxes become FAILED: their VMs are powered off,
their disks are kept for 7 days. On a backend that others also use, sandboxes are
only reported. Events, network records and API tokens cannot be rebuilt; profiles,
secrets and images are not in the database.

If the database rejects a record, it is reported, the other records are added,
and the exit code is 1.`,
		Args: cli.ExactArgs(),
	}
	systemFlag(cmd, &system)
	cmd.RunE = func(*cobra.Command, []string) error { return repair(a, system, "rebuild") }
	return cmd
}

func systemFlag(cmd *cobra.Command, system *bool) {
	cmd.Flags().BoolVar(system, "system", false, "use the system daemon instead of your own")
}

// repair replaces this process by 'agentlabd db'. No daemon is running, and only
// the daemon's own program reads and writes its files.
func repair(a *cli.App, system bool, verb string, args ...string) error {
	if err := a.LocalOnly(); err != nil {
		return err
	}
	if a.Socket != "" {
		return work.UsageErrorf("--socket selects a running daemon; this command works without one").WithHint("set AGENTLAB_HOME to select an installation")
	}
	binary, err := config.FindProgram("agentlabd")
	if err != nil {
		return err
	}
	argv := []string{binary, "db", verb}
	if system {
		argv = append(argv, "--system")
	}
	if a.JSON {
		argv = append(argv, "--json")
	}
	if err := syscall.Exec(binary, append(argv, args...), os.Environ()); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot run %s: %w", binary, err)
	}
	return nil
}

func confirmClockCmd(a *cli.App) *cobra.Command {
	cmd := cli.Query(a, "confirm-clock", "Confirm that the clock is right after it jumped", cli.ExactArgs(), cli.All((*client.Client).ConfirmClock), func(clock api.Clock) error {
		if clock.Suspended {
			a.Progressf("retention continues; the time is %s", work.LocalTime(clock.Now))
		} else {
			a.Progressf("retention was not suspended; the time is %s", work.LocalTime(clock.Now))
		}
		return nil
	})
	cmd.Long = `Confirm that the clock of the daemon's host is right. If the clock jumps more than
a day ahead, the daemon deletes nothing because of its age until you confirm the
clock, or until the host has run for 24 hours.`
	return cmd
}
