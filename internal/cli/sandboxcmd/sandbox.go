package sandboxcmd

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/jobcmd"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

func sandboxCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "sandbox", Aliases: []string{"sb"}, Short: "Manage sandboxes"}
	lease := &cobra.Command{Use: "lease", Short: "Manage leases, which limit the lifetime of sandboxes"}
	lease.AddCommand(leaseRenewCmd(a))
	cmd.AddCommand(sandboxNewCmd(a), sandboxListCmd(a), sandboxShowCmd(a))
	cmd.AddCommand(sandboxPowerCmds(a)...)
	cmd.AddCommand(sandboxDestroyCmd(a), sandboxLogsCmd(a), lease, snapshotCmd(a), sandboxForkCmd(a), a.DoctorOf("sandbox", (*client.Client).SandboxDoctor))
	return cmd
}

// NewFlags are the flags of a new sandbox.
type NewFlags struct {
	Repo, ref, task string
	NoPreflight     bool
	NoSetup         bool
	agent           string
	ttl             time.Duration
	keepalive, wait bool
	workspace       cli.WorkspaceChoice
	Req             api.SandboxCreate
}

func sandboxNewCmd(a *cli.App) *cobra.Command {
	f := &NewFlags{}
	cmd := &cobra.Command{
		Use:   "new",
		Short: "Create a sandbox and wait until it is ready",
		Long: `Create a sandbox and wait until it is ready. With --repo or --task, wait until
the job in it has ended, and show its progress; the exit code is that of
'agentlab job run'.`,
		Example: `  agentlab sandbox new --name play && agentlab ssh play
  agentlab sandbox new --profile interactive-dev --keepalive --ttl 8h`,
		Args: cli.ExactArgs(),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.Req.Name, "name", "", "name (default: generated)")
	flags.StringVar(&f.Req.Profile, "profile", "", "profile (see 'agentlab profile list')")
	flags.StringVar(&f.Req.FromSnapshot, "from-snapshot", "", "snapshot SANDBOX/NAME to start from; its profile, image, cores and memory are the default")
	cli.BackendFlag(flags, &f.Req.Backend, "the sandbox (default: the one of its workspace or snapshot, or the profile's, or the configured default)")
	flags.StringVar(&f.Req.Image, "image", "", "image (default: the profile's)")
	cli.Count(flags, &f.Req.Cores, "cores", "number of virtual CPUs (default: the profile's)")
	cli.Count(flags, &f.Req.MemoryMB, "memory-mb", "MiB of memory (default: the profile's)")
	cli.Choice(flags, &f.Req.Nested, "nested", agentlab.NestedModes, "hardware virtualization for virtual machines in the sandbox: off, auto or on (default: the profile's, whose off remains)")
	flags.Var(cli.DurationFlag(&f.ttl, agentlab.MaxTTL), "ttl", "duration of the lease, e.g. 30m, 4h, 2d (default: the profile's)")
	flags.BoolVar(&f.keepalive, "keepalive", false, "keep the sandbox when its job ends (default: the profile's)")
	flags.StringVar(&f.Repo, "repo", "", "URL or local path of a repository to clone to /tmp/repo; without --task, implies --keepalive")
	flags.StringVar(&f.ref, "ref", "", "branch, tag or commit of --repo")
	flags.StringVar(&f.task, "task", "", "task to run in the sandbox (default: none; --repo is only cloned)")
	cli.Choice(flags, &f.agent, "agent", agentlab.Agents, "agent for --task")
	cli.PreflightFlag(flags, &f.NoPreflight)
	cli.SetupFlag(flags, &f.NoSetup)
	cli.WorkspaceFlags(flags, &f.workspace, "named like the sandbox")
	cli.WaitFlag(cmd, &f.wait, "wait until the sandbox is ready, and its job has ended")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) (err error) {
		f.Req.TTLMinutes = int(f.ttl / time.Minute)
		if cmd.Flags().Changed("keepalive") {
			f.Req.Keepalive = &f.keepalive
		}
		if f.workspace.Stateful && f.workspace.Name == "" && f.Req.Name == "" {
			f.Req.Name = "sb-" + agentlab.NewUID()[:6] // the workspace has the same
		}
		if f.Req.WorkspaceSelection, err = f.workspace.Selection(f.Req.Name, "--name"); err != nil {
			return err
		}
		if err := SandboxJob(ctx, a, c, f); err != nil {
			return err
		}
		sb, err := c.CreateSandbox(ctx, f.Req)
		if err != nil {
			if f.Req.Job != nil {
				gitsafe.DropBundle(ctx, a, c, f.Req.Job.BundleID)
			}
			return err
		}
		if f.wait {
			sb, err = work.WaitSandbox(ctx, a, c, sb, 0, work.IsUp)
			// A short job may have ended, and its sandbox may be stopped or destroyed.
			if short := sb.JobID != "" && (work.IsStopped(sb) || work.IsDestroyed(sb)); err != nil && !short {
				if ctx.Err() != nil {
					a.Progressf("sandbox %s (%d) is still being started\n  → follow it: agentlab sandbox show %[2]d; or destroy it: agentlab sandbox destroy %[2]d", sb.Name, sb.VMID)
				}
				return err
			}
		}
		if f.wait && sb.JobID != "" {
			return sandboxJobEnd(ctx, a, c, sb)
		}
		return PrintSandbox(a, sb)
	})
	return cmd
}

// sandboxJobEnd waits for the job of a new sandbox, shows its progress, and
// prints the sandbox.
func sandboxJobEnd(ctx context.Context, a *cli.App, c *client.Client, sb api.Sandbox) error {
	a.Progressf("waiting for job %s to end\n  → agentlab job logs --follow %s", sb.JobID, sb.JobID)
	j, err := jobcmd.FollowJob(ctx, a, c, client.EventQuery{JobID: sb.JobID}, func(e api.Event) {
		if e.ID > a.Shown { // others were events of the sandbox, too
			a.ShowEvent(e)
		}
	})
	if err != nil {
		return jobcmd.JobContinues(ctx, a, sb.JobID, false, err)
	}
	jobcmd.WaitDestroyed(ctx, a, c, j)
	if now, err := c.Sandbox(ctx, fmt.Sprint(sb.VMID)); err == nil {
		sb = now
	}
	if err := PrintSandbox(a, sb); err != nil {
		return err
	}
	if err := jobcmd.StatusError(j); err != nil {
		a.Progressf("job %s is %s: %s\n  → agentlab job logs %s", j.ID, j.Status, agentlab.WithoutControls(j.Reason), j.ID)
		return err
	}
	return nil
}

// SandboxJob sets the job of the request from --repo, --ref and --task.
func SandboxJob(ctx context.Context, a *cli.App, c *client.Client, f *NewFlags) error {
	if f.Repo == "" && f.task == "" {
		if f.ref != "" || f.agent != "" {
			return work.UsageErrorf("--ref requires --repo, and --agent requires --task")
		}
		return nil
	}
	run := &jobcmd.RunFlags{Repo: f.Repo, Req: api.JobCreate{Image: f.Req.Image, Ref: f.ref, Task: f.task, Agent: f.agent, NoPreflight: f.NoPreflight, NoSetup: f.NoSetup}}
	if f.task == "" {
		if f.agent != "" {
			return work.UsageErrorf("--agent requires --task")
		}
		run.Req.Agent = agentlab.AgentNone
	}
	if run.Repo != "" {
		check := run.Req
		check.Profile, check.Image, check.TTLMinutes, check.Keepalive = f.Req.Profile, f.Req.Image, f.Req.TTLMinutes, f.Req.Keepalive
		if err := jobcmd.ChooseRepo(ctx, a, c, run, check); err != nil {
			return err
		}
		f.Req.Image = run.Req.Image
	}
	f.Req.Job = &run.Req
	return nil
}

// PrintSandbox prints a sandbox.
func PrintSandbox(a *cli.App, sb api.Sandbox) error {
	return a.Emit(sb, func() error { return sandboxTable(a, sb) })
}

func sandboxTable(a *cli.App, sb api.Sandbox) error {
	t := cli.NewTable(a.Stdout, "Sandbox:", fmt.Sprint(sb.VMID))
	t.Row("Name:", sb.Name)
	t.Row("State:", sb.State)
	if sb.OnDisk {
		t.Row("Memory:", "on disk")
	}
	t.Optional("Waiting:", sb.Waiting)
	t.Optional("Reason:", sb.Reason)
	if sb.JobID != "" {
		t.Row("Job:", sb.JobID)
		if sb.Salvage {
			t.Row("Kept for:", "work of the job that is not stored (agentlab job salvage "+sb.JobID+")")
		}
	}
	t.Optional("Workspace:", sb.WorkspaceID)
	t.Row("Profile:", sb.Profile)
	t.Row("Image:", sb.Image)
	t.Optional("Created from:", sb.FromSnapshot)
	t.Optional("Start:", sb.Start)
	t.Row("Backend:", sb.Backend)
	if sb.Handle != "" && sb.Handle != strconv.Itoa(sb.VMID) {
		t.Row("VM:", agentlab.WithoutControls(sb.Handle))
	}
	t.Row("Address:", cli.OrDash(sb.IP))
	t.Row("Resources:", fmt.Sprintf("%d cores, %d MiB memory", sb.Cores, sb.MemoryMB))
	t.Row("Nested VMs:", nestedText(sb))
	if m := sb.Memory; m != nil {
		t.Row("Host memory:", work.ByteSize(m.UniqueBytes)+" of its own, "+work.ByteSize(m.SharedBytes)+" shared")
	}
	t.Row("Network:", sb.NetworkMode)
	t.Row("Lease ends in:", a.Until(sb.LeaseExpiresAt))
	t.Row("Keepalive:", cli.YesNo(sb.Keepalive))
	t.Row("Created:", work.LocalTime(sb.CreatedAt))
	return t.Flush()
}

// nestedText describes whether virtual machines run in a sandbox.
func nestedText(sb api.Sandbox) string {
	switch {
	case sb.NestedState == "":
		return sb.Nested
	case sb.NestedReason != "":
		return sb.Nested + ", but they do not run: " + sb.NestedReason
	}
	return sb.Nested + ", they can run"
}

func sandboxListCmd(a *cli.App) *cobra.Command {
	q := client.SandboxQuery{Limit: cli.ListLimit}
	var orphans bool
	cmd := &cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List sandboxes", Args: cli.ExactArgs()}
	cmd.Flags().BoolVar(&q.Destroyed, "all", false, "include destroyed sandboxes and those of the warm pool")
	cmd.Flags().BoolVar(&orphans, "orphans", false, "list orphans instead: VMs with AgentLab's mark that belong to no sandbox")
	cli.LimitFlag(cmd, &q.Limit)
	cmd.MarkFlagsMutuallyExclusive("all", "orphans")
	cmd.MarkFlagsMutuallyExclusive("limit", "orphans")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
		if orphans {
			return listOrphans(ctx, a, c)
		}
		list, err := c.Sandboxes(ctx, q)
		if err != nil {
			return err
		}
		return a.Emit(list, func() error {
			if err := sandboxesTable(a, list.Items); err != nil {
				return err
			}
			a.NoteMore(list.Next)
			for _, sb := range list.Items {
				if sb.Waiting != "" {
					a.Progressf("note: %s (%d): %s", sb.Name, sb.VMID, agentlab.WithoutControls(sb.Waiting))
				}
			}
			return nil
		})
	})
	return cmd
}

func sandboxesTable(a *cli.App, list []api.Sandbox) error {
	t := cli.NewTable(a.Stdout, "VMID", "NAME", "STATE", "PROFILE", "IP", "LEASE", "JOB", "AGE")
	for _, sb := range list {
		t.Row(sb.VMID, sb.Name, sb.State, sb.Profile, cli.OrDash(sb.IP), a.Until(sb.LeaseExpiresAt), cli.OrDash(sb.JobID), a.Age(sb.CreatedAt))
	}
	return t.Flush()
}

func sandboxShowCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "show SANDBOX", "Show a sandbox", cli.ExactArgs("SANDBOX"), cli.One((*client.Client).SandboxMemory), func(sb api.Sandbox) error { return sandboxTable(a, sb) })
}

// sandboxPowerCmds are start, stop, pause and resume.
func sandboxPowerCmds(a *cli.App) []*cobra.Command {
	var grace int
	var toDisk bool
	stop := func(c *client.Client, ctx context.Context, sandbox string) (api.Sandbox, error) {
		return c.StopSandbox(ctx, sandbox, api.SandboxStop{GraceSeconds: &grace})
	}
	suspend := func(c *client.Client, ctx context.Context, sandbox string) (api.Sandbox, error) {
		return c.SuspendSandbox(ctx, sandbox, api.SandboxSuspend{ToDisk: toDisk})
	}
	suspended := func(sb api.Sandbox) bool {
		return sb.State == string(agentlab.SandboxSuspended) && (sb.OnDisk || !toDisk) || work.IsStopped(sb)
	}
	var cmds []*cobra.Command
	for _, p := range []struct {
		use, short, long, wait string
		request                func(*client.Client, context.Context, string) (api.Sandbox, error)
		done                   func(api.Sandbox) bool
	}{
		{"start", "Start a stopped sandbox", "", "wait until the sandbox is ready", (*client.Client).StartSandbox, work.IsUp},
		{"stop", "Shut down a sandbox and keep its disk", "", "wait until the sandbox is stopped", stop, work.IsStopped},
		{"pause", "Pause a sandbox and keep its memory", `Pause a READY sandbox: its CPUs stop, its memory and disk are kept, and its lease
continues. Its state is then SUSPENDED. 'agentlab sandbox suspend' is the same
command.

With --to-disk, its memory is written to disk and its virtual machine ends: the
host needs no memory for it, and it survives a restart of the host. A paused
sandbox can be suspended to disk too. 'agentlab sandbox stop' discards the memory.

Not every backend supports this; all support 'agentlab sandbox stop'.`, "wait until the sandbox is suspended", suspend, suspended},
		{"resume", "Resume a suspended sandbox", `Resume a sandbox that was paused or suspended to disk. If its memory cannot be
loaded, because the host's processor or software was replaced, it stays
SUSPENDED: 'agentlab sandbox stop' discards its memory and keeps its disk.`, "wait until the sandbox is ready", (*client.Client).ResumeSandbox, work.IsUp},
	} {
		var wait bool
		cmd := &cobra.Command{Use: p.use + " SANDBOX", Short: p.short, Long: p.long, Args: cli.ExactArgs("SANDBOX")}
		if p.use == "pause" {
			cmd.Aliases = []string{"suspend"}
		}
		cli.WaitFlag(cmd, &wait, p.wait)
		cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			request := func(ctx context.Context, sandbox string) (api.Sandbox, error) { return p.request(c, ctx, sandbox) }
			return finishSandbox(ctx, a, c, work.RequestChange(ctx, c, args[0], wait, request), wait, p.done)
		})
		cmds = append(cmds, cmd)
	}
	cmds[2].Flags().BoolVar(&toDisk, "to-disk", false, "write the memory to disk and end the virtual machine")
	grace = 30
	cli.Count(cmds[1].Flags(), &grace, "grace", "seconds that the guest may take before it is powered off")
	return cmds
}

func sandboxDestroyCmd(a *cli.App) *cobra.Command {
	var wait, force, orphan, yes, purge bool
	cmd := &cobra.Command{
		Use: "destroy SANDBOX...", Short: "Destroy sandboxes with their disks", Args: cobra.MinimumNArgs(1),
		Long: `Destroy sandboxes with their disks, in any state and in parallel. Jobs in them
are cancelled. The exit code is 1 if one of them cannot be destroyed.

A sandbox whose job has work that is not stored is powered off and kept for
retention.salvage_hours, so that 'agentlab job salvage' can extract the work.
With --purge it is destroyed too.

With --orphan, destroy orphans by UID or VMID: virtual machines with AgentLab's
mark that belong to no sandbox. List them with 'agentlab sandbox list --orphans'.`,
	}
	cli.WaitFlag(cmd, &wait, "wait until the sandboxes and their disks are deleted")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "ignore sandboxes that do not exist")
	cmd.Flags().BoolVar(&purge, "purge", false, "destroy also those that have, or are kept for, work of their jobs that is not stored")
	cmd.Flags().BoolVar(&orphan, "orphan", false, "destroy orphans, after confirmation")
	cmd.Flags().BoolVar(&yes, "yes", false, "destroy orphans without confirmation; sandboxes never need one")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if orphan && !wait {
			return work.UsageErrorf("--orphan cannot be used with --no-wait").WithHint("remove --no-wait")
		}
		if orphan {
			return destroyOrphans(ctx, a, c, args, yes, force)
		}
		return destroySandboxes(ctx, a, c, args, wait, force, purge)
	})
	return cmd
}

func leaseRenewCmd(a *cli.App) *cobra.Command {
	var ttl time.Duration
	cmd := &cobra.Command{Use: "renew SANDBOX --ttl DURATION", Short: "Set the lease of a sandbox to end this long from now", Args: cli.ExactArgs("SANDBOX")}
	cmd.Flags().Var(cli.DurationFlag(&ttl, agentlab.MaxTTL), "ttl", "time from now, e.g. 30m, 4h, 2d")
	_ = cmd.MarkFlagRequired("ttl")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		sb, err := c.RenewLease(ctx, args[0], int(ttl/time.Minute))
		if err != nil {
			return err
		}
		return a.Done(sb, "the lease of sandbox %s (%d) ends in %s", sb.Name, sb.VMID, a.Until(sb.LeaseExpiresAt))
	})
	return cmd
}

func sandboxLogsCmd(a *cli.App) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{Use: "logs SANDBOX", Short: "Print the console of a sandbox", Args: cli.ExactArgs("SANDBOX")}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new output until the sandbox is destroyed")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		return copyConsole(ctx, a, c, args[0], follow)
	})
	return cmd
}

func copyConsole(ctx context.Context, a *cli.App, c *client.Client, sandbox string, follow bool) error {
	log, err := c.Console(ctx, sandbox, follow)
	if err != nil {
		return err
	}
	return jobcmd.CopyAll(work.LogWriter(a.Stdout), log)
}

func logsCmd(a *cli.App) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use: "logs SANDBOX|JOB", Short: "Print the log of a job or sandbox", Args: cli.ExactArgs("SANDBOX|JOB"),
		Long: `Print the agent's log of a job. For a sandbox that was created for a job, print
the log of that job; for another sandbox, print its console.`,
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new output until the end")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		id := args[0]
		if agentlab.ValidateJobID(id) != nil {
			sb, err := c.Sandbox(ctx, id)
			if agentlab.CodeOf(err) == agentlab.CodeNotFound && strings.HasPrefix(id, "job-") {
				sb.JobID, err = jobcmd.JobID(ctx, c, id)
			}
			if err != nil {
				return err
			}
			if sb.JobID == "" {
				return copyConsole(ctx, a, c, id, follow)
			}
			id = sb.JobID
		}
		return jobcmd.CopyJobLog(ctx, a, c, id, follow)
	})
	return cmd
}
