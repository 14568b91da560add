package cli

import (
	"context"
	"fmt"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/config"
)

func (a *App) dbCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "db", Short: "Back up, restore and rebuild the database",
		Long: `Back up, restore and rebuild the database of the daemon.

The daemon makes a backup every hour (backups in config.yaml), in backups/ of
its state directory. Each database belongs to one state directory: the daemon
does not start when they do not match, or when the database is missing or empty
and the directory is not, and it removes nothing then.`,
	}
	backup := &cobra.Command{Use: "backup", Short: "Make a backup of the database now", Args: exactArgs()}
	backup.RunE = a.run(func(ctx context.Context, c *client.Client, _ []string) error {
		b, err := c.BackupDatabase(ctx)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(b)
		}
		_, err = fmt.Fprintln(a.Stdout, plain(b.Path))
		return err
	})
	cmd.AddCommand(backup, a.dbListCmd(), a.dbRestoreCmd(), a.dbRebuildCmd())
	return cmd
}

func (a *App) dbListCmd() *cobra.Command {
	var system bool
	cmd := &cobra.Command{Use: "list", Short: "List the backups, the newest first", Args: exactArgs()}
	systemFlag(cmd, &system)
	cmd.RunE = func(*cobra.Command, []string) error { return a.repair(system, "list") }
	return cmd
}

func (a *App) dbRestoreCmd() *cobra.Command {
	var system, adopt bool
	cmd := &cobra.Command{
		Use: "restore [BACKUP]", Short: "Put a backup in the place of the database",
		Long: `Put a backup in the place of the database: the newest one that is sound, or the
one that is named, by its name in 'agentlab db list' or as a path. The daemon
must not run. All of the backup is checked first. The old database is kept
beside the new one. What has happened since the
backup is added from the files of the jobs and from the sandboxes of the
backend, as 'agentlab db rebuild' does.`,
		Args: cobra.MaximumNArgs(1),
	}
	systemFlag(cmd, &system)
	cmd.Flags().BoolVar(&adopt, "adopt", false, "take a backup of another installation")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		var flags []string
		if adopt {
			flags = append(flags, "--adopt")
		}
		return a.repair(system, "restore", append(append(flags, "--"), args...)...)
	}
	return cmd
}

func (a *App) dbRebuildCmd() *cobra.Command {
	var system bool
	cmd := &cobra.Command{
		Use: "rebuild", Short: "Rebuild a lost database from the state directory and the backend",
		Long: `Make a database from what is left without one: jobs from their records, logs and
artifacts, and sandboxes from the marks on the backend. The daemon must not run.
A sound database of this installation is kept and completed; any other is kept
beside the new one.

A job that had not ended becomes FAILED. A sandbox becomes FAILED: its VM is
powered off, its disk is kept for 7 days. On a backend that others use too,
sandboxes are only reported. Events, network records and API tokens cannot be
rebuilt; profiles, secrets and images are not in the database.

A record that the database refuses is reported, the others are added, and the
exit code is 1.`,
		Args: exactArgs(),
	}
	systemFlag(cmd, &system)
	cmd.RunE = func(*cobra.Command, []string) error { return a.repair(system, "rebuild") }
	return cmd
}

func systemFlag(cmd *cobra.Command, system *bool) {
	cmd.Flags().BoolVar(system, "system", false, "use the machine-wide daemon instead of your own")
}

// repair runs 'agentlabd db' in the place of this program: there is no daemon
// to ask, and the daemon's own program is what reads and writes its files.
func (a *App) repair(system bool, verb string, args ...string) error {
	if err := a.onlyHere(); err != nil {
		return err
	}
	if a.socket != "" {
		return usageErrorf("--socket names a daemon that runs; this works without one").WithHint("set AGENTLAB_HOME to say which installation is meant")
	}
	binary, err := config.FindProgram("agentlabd")
	if err != nil {
		return err
	}
	argv := []string{binary, "db", verb}
	if system {
		argv = append(argv, "--system")
	}
	if a.json {
		argv = append(argv, "--json")
	}
	if err := syscall.Exec(binary, append(argv, args...), os.Environ()); err != nil { //nolint:gosec // our own binary
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot run %s: %w", binary, err)
	}
	return nil
}

func (a *App) confirmClockCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "confirm-clock", Short: "Confirm that the clock is right after it jumped",
		Long: `Confirm that the clock of the daemon's host is right. After the clock was found
more than a day ahead of the time that was expected, nothing is deleted for its
age until it is confirmed, or until the host has run for 24 hours.`,
		Args: exactArgs(),
	}
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, _ []string) error {
		clock, err := c.ConfirmClock(ctx)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(clock)
		}
		if clock.Suspended {
			a.progressf("retention goes on; the time is %s", localTime(clock.Now))
		} else {
			a.progressf("retention was not suspended; the time is %s", localTime(clock.Now))
		}
		return nil
	})
	return cmd
}
