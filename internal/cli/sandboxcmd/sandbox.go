package cli

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
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

func (a *App) sandboxCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "sandbox", Aliases: []string{"sb"}, Short: "Manage sandboxes"}
	lease := &cobra.Command{Use: "lease", Short: "Manage leases, which limit the lifetime of sandboxes"}
	lease.AddCommand(a.leaseRenewCmd())
	cmd.AddCommand(a.sandboxNewCmd(), a.sandboxListCmd(), a.sandboxShowCmd())
	cmd.AddCommand(a.sandboxPowerCmds()...)
	cmd.AddCommand(a.sandboxDestroyCmd(), a.sandboxLogsCmd(), lease, a.snapshotCmd(), a.sandboxForkCmd(), a.doctorOf("sandbox", (*client.Client).SandboxDoctor))
	return cmd
}

type sandboxNewFlags struct {
	repo, ref, task string
	noPreflight     bool
	noSetup         bool
	agent           string
	ttl             time.Duration
	keepalive, wait bool
	workspace       workspaceChoice
	req             api.SandboxCreate
}

func (a *App) sandboxNewCmd() *cobra.Command {
	f := &sandboxNewFlags{}
	cmd := &cobra.Command{
		Use:   "new",
		Short: "Create a sandbox and wait until it is ready",
		Long: `Create a sandbox and wait until it is ready. With --repo or --task, wait until
the job in it has ended, and show its progress; the exit code is that of
'agentlab job run'.`,
		Example: `  agentlab sandbox new --name play && agentlab ssh play
  agentlab sandbox new --profile interactive-dev --keepalive --ttl 8h`,
		Args: exactArgs(),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.req.Name, "name", "", "name (default: generated)")
	flags.StringVar(&f.req.Profile, "profile", "", "profile (see 'agentlab profile list')")
	flags.StringVar(&f.req.FromSnapshot, "from-snapshot", "", "snapshot SANDBOX/NAME to start from; its profile, image, cores and memory are the default")
	backendFlag(flags, &f.req.Backend, "the sandbox (default: the one of its workspace or snapshot, or the profile's, or the configured default)")
	flags.StringVar(&f.req.Image, "image", "", "image (default: the profile's)")
	count(flags, &f.req.Cores, "cores", "number of virtual CPUs (default: the profile's)")
	count(flags, &f.req.MemoryMB, "memory-mb", "MiB of memory (default: the profile's)")
	choice(flags, &f.req.Nested, "nested", agentlab.NestedModes, "hardware virtualization for virtual machines in the sandbox: off, auto or on (default: the profile's, whose off remains)")
	flags.Var(durationFlag{&f.ttl, agentlab.MaxTTL}, "ttl", "duration of the lease, e.g. 30m, 4h, 2d (default: the profile's)")
	flags.BoolVar(&f.keepalive, "keepalive", false, "keep the sandbox when its job ends (default: the profile's)")
	flags.StringVar(&f.repo, "repo", "", "URL or local path of a repository to clone to /tmp/repo; without --task, implies --keepalive")
	flags.StringVar(&f.ref, "ref", "", "branch, tag or commit of --repo")
	flags.StringVar(&f.task, "task", "", "task to run in the sandbox (default: none; --repo is only cloned)")
	choice(flags, &f.agent, "agent", agentlab.Agents, "agent for --task")
	preflightFlag(flags, &f.noPreflight)
	setupFlag(flags, &f.noSetup)
	workspaceFlags(flags, &f.workspace, "named like the sandbox")
	waitFlag(cmd, &f.wait, "wait until the sandbox is ready, and its job has ended")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, _ []string) (err error) {
		f.req.TTLMinutes = int(f.ttl / time.Minute)
		if cmd.Flags().Changed("keepalive") {
			f.req.Keepalive = &f.keepalive
		}
		if f.workspace.stateful && f.workspace.name == "" && f.req.Name == "" {
			f.req.Name = "sb-" + agentlab.NewUID()[:6] // the workspace has the same
		}
		if f.req.WorkspaceSelection, err = f.workspace.selection(f.req.Name, "--name"); err != nil {
			return err
		}
		if err := a.sandboxJob(ctx, c, f); err != nil {
			return err
		}
		sb, err := c.CreateSandbox(ctx, f.req)
		if err != nil {
			if f.req.Job != nil {
				gitsafe.DropBundle(ctx, a, c, f.req.Job.BundleID)
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
			return a.sandboxJobEnd(ctx, c, sb)
		}
		return a.printSandbox(sb)
	})
	return cmd
}

// sandboxJobEnd waits for the job of a new sandbox, shows its progress, and
// prints the sandbox.
func (a *App) sandboxJobEnd(ctx context.Context, c *client.Client, sb api.Sandbox) error {
	a.Progressf("waiting for job %s to end\n  → agentlab job logs --follow %s", sb.JobID, sb.JobID)
	j, err := a.followJob(ctx, c, client.EventQuery{JobID: sb.JobID}, func(e api.Event) {
		if e.ID > a.shown { // others were events of the sandbox, too
			a.ShowEvent(e)
		}
	})
	if err != nil {
		return a.jobContinues(ctx, sb.JobID, false, err)
	}
	a.waitDestroyed(ctx, c, j)
	if now, err := c.Sandbox(ctx, fmt.Sprint(sb.VMID)); err == nil {
		sb = now
	}
	if err := a.printSandbox(sb); err != nil {
		return err
	}
	if err := jobStatusError(j); err != nil {
		a.Progressf("job %s is %s: %s\n  → agentlab job logs %s", j.ID, j.Status, agentlab.WithoutControls(j.Reason), j.ID)
		return err
	}
	return nil
}

// sandboxJob sets the job of the request from --repo, --ref and --task.
func (a *App) sandboxJob(ctx context.Context, c *client.Client, f *sandboxNewFlags) error {
	if f.repo == "" && f.task == "" {
		if f.ref != "" || f.agent != "" {
			return work.UsageErrorf("--ref requires --repo, and --agent requires --task")
		}
		return nil
	}
	run := &jobRunFlags{repo: f.repo, req: api.JobCreate{Image: f.req.Image, Ref: f.ref, Task: f.task, Agent: f.agent, NoPreflight: f.noPreflight, NoSetup: f.noSetup}}
	if f.task == "" {
		if f.agent != "" {
			return work.UsageErrorf("--agent requires --task")
		}
		run.req.Agent = agentlab.AgentNone
	}
	if run.repo != "" {
		check := run.req
		check.Profile, check.Image, check.TTLMinutes, check.Keepalive = f.req.Profile, f.req.Image, f.req.TTLMinutes, f.req.Keepalive
		if err := a.chooseRepo(ctx, c, run, check); err != nil {
			return err
		}
		f.req.Image = run.req.Image
	}
	f.req.Job = &run.req
	return nil
}

func (a *App) printSandbox(sb api.Sandbox) error {
	return a.emit(sb, func() error { return a.sandboxTable(sb) })
}

func (a *App) sandboxTable(sb api.Sandbox) error {
	t := newTable(a.Stdout, "Sandbox:", fmt.Sprint(sb.VMID))
	t.row("Name:", sb.Name)
	t.row("State:", sb.State)
	if sb.OnDisk {
		t.row("Memory:", "on disk")
	}
	t.optional("Waiting:", sb.Waiting)
	t.optional("Reason:", sb.Reason)
	if sb.JobID != "" {
		t.row("Job:", sb.JobID)
		if sb.Salvage {
			t.row("Kept for:", "work of the job that is not stored (agentlab job salvage "+sb.JobID+")")
		}
	}
	t.optional("Workspace:", sb.WorkspaceID)
	t.row("Profile:", sb.Profile)
	t.row("Image:", sb.Image)
	t.optional("Created from:", sb.FromSnapshot)
	t.optional("Start:", sb.Start)
	t.row("Backend:", sb.Backend)
	if sb.Handle != "" && sb.Handle != strconv.Itoa(sb.VMID) {
		t.row("VM:", agentlab.WithoutControls(sb.Handle))
	}
	t.row("Address:", orDash(sb.IP))
	t.row("Resources:", fmt.Sprintf("%d cores, %d MiB memory", sb.Cores, sb.MemoryMB))
	t.row("Nested VMs:", nestedText(sb))
	if m := sb.Memory; m != nil {
		t.row("Host memory:", work.ByteSize(m.UniqueBytes)+" of its own, "+work.ByteSize(m.SharedBytes)+" shared")
	}
	t.row("Network:", sb.NetworkMode)
	t.row("Lease ends in:", a.until(sb.LeaseExpiresAt))
	t.row("Keepalive:", yesNo(sb.Keepalive))
	t.row("Created:", work.LocalTime(sb.CreatedAt))
	return t.flush()
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

func (a *App) sandboxListCmd() *cobra.Command {
	q := client.SandboxQuery{Limit: listLimit}
	var orphans bool
	cmd := &cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List sandboxes", Args: exactArgs()}
	cmd.Flags().BoolVar(&q.Destroyed, "all", false, "include destroyed sandboxes and those of the warm pool")
	cmd.Flags().BoolVar(&orphans, "orphans", false, "list orphans instead: VMs with AgentLab's mark that belong to no sandbox")
	limitFlag(cmd, &q.Limit)
	cmd.MarkFlagsMutuallyExclusive("all", "orphans")
	cmd.MarkFlagsMutuallyExclusive("limit", "orphans")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, _ []string) error {
		if orphans {
			return a.listOrphans(ctx, c)
		}
		list, err := c.Sandboxes(ctx, q)
		if err != nil {
			return err
		}
		return a.emit(list, func() error {
			if err := a.sandboxesTable(list.Items); err != nil {
				return err
			}
			a.noteMore(list.Next)
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

func (a *App) sandboxesTable(list []api.Sandbox) error {
	t := newTable(a.Stdout, "VMID", "NAME", "STATE", "PROFILE", "IP", "LEASE", "JOB", "AGE")
	for _, sb := range list {
		t.row(sb.VMID, sb.Name, sb.State, sb.Profile, orDash(sb.IP), a.until(sb.LeaseExpiresAt), orDash(sb.JobID), a.age(sb.CreatedAt))
	}
	return t.flush()
}

func (a *App) sandboxShowCmd() *cobra.Command {
	return query(a, "show SANDBOX", "Show a sandbox", exactArgs("SANDBOX"), one((*client.Client).SandboxMemory), a.sandboxTable)
}

// sandboxPowerCmds are start, stop, pause and resume.
func (a *App) sandboxPowerCmds() []*cobra.Command {
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
		cmd := &cobra.Command{Use: p.use + " SANDBOX", Short: p.short, Long: p.long, Args: exactArgs("SANDBOX")}
		if p.use == "pause" {
			cmd.Aliases = []string{"suspend"}
		}
		waitFlag(cmd, &wait, p.wait)
		cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
			request := func(ctx context.Context, sandbox string) (api.Sandbox, error) { return p.request(c, ctx, sandbox) }
			return a.finishSandbox(ctx, c, work.RequestChange(ctx, c, args[0], wait, request), wait, p.done)
		})
		cmds = append(cmds, cmd)
	}
	cmds[2].Flags().BoolVar(&toDisk, "to-disk", false, "write the memory to disk and end the virtual machine")
	grace = 30
	count(cmds[1].Flags(), &grace, "grace", "seconds that the guest may take before it is powered off")
	return cmds
}

func (a *App) sandboxDestroyCmd() *cobra.Command {
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
	waitFlag(cmd, &wait, "wait until the sandboxes and their disks are deleted")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "ignore sandboxes that do not exist")
	cmd.Flags().BoolVar(&purge, "purge", false, "destroy also those that have, or are kept for, work of their jobs that is not stored")
	cmd.Flags().BoolVar(&orphan, "orphan", false, "destroy orphans, after confirmation")
	cmd.Flags().BoolVar(&yes, "yes", false, "destroy orphans without confirmation; sandboxes never need one")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		if orphan && !wait {
			return work.UsageErrorf("--orphan cannot be used with --no-wait").WithHint("remove --no-wait")
		}
		if orphan {
			return a.destroyOrphans(ctx, c, args, yes, force)
		}
		return a.destroySandboxes(ctx, c, args, wait, force, purge)
	})
	return cmd
}

func (a *App) leaseRenewCmd() *cobra.Command {
	var ttl time.Duration
	cmd := &cobra.Command{Use: "renew SANDBOX --ttl DURATION", Short: "Set the lease of a sandbox to end this long from now", Args: exactArgs("SANDBOX")}
	cmd.Flags().Var(durationFlag{&ttl, agentlab.MaxTTL}, "ttl", "time from now, e.g. 30m, 4h, 2d")
	_ = cmd.MarkFlagRequired("ttl")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		sb, err := c.RenewLease(ctx, args[0], int(ttl/time.Minute))
		if err != nil {
			return err
		}
		return a.done(sb, "the lease of sandbox %s (%d) ends in %s", sb.Name, sb.VMID, a.until(sb.LeaseExpiresAt))
	})
	return cmd
}

func (a *App) sandboxLogsCmd() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{Use: "logs SANDBOX", Short: "Print the console of a sandbox", Args: exactArgs("SANDBOX")}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new output until the sandbox is destroyed")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		return a.copyConsole(ctx, c, args[0], follow)
	})
	return cmd
}

func (a *App) copyConsole(ctx context.Context, c *client.Client, sandbox string, follow bool) error {
	log, err := c.Console(ctx, sandbox, follow)
	if err != nil {
		return err
	}
	return copyAll(work.LogWriter(a.Stdout), log)
}

func (a *App) logsCmd() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use: "logs SANDBOX|JOB", Short: "Print the log of a job or sandbox", Args: exactArgs("SANDBOX|JOB"),
		Long: `Print the agent's log of a job. For a sandbox that was created for a job, print
the log of that job; for another sandbox, print its console.`,
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new output until the end")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		id := args[0]
		if agentlab.ValidateJobID(id) != nil {
			sb, err := c.Sandbox(ctx, id)
			if agentlab.CodeOf(err) == agentlab.CodeNotFound && strings.HasPrefix(id, "job-") {
				sb.JobID, err = jobID(ctx, c, id)
			}
			if err != nil {
				return err
			}
			if sb.JobID == "" {
				return a.copyConsole(ctx, c, id, follow)
			}
			id = sb.JobID
		}
		return a.copyJobLog(ctx, c, id, follow)
	})
	return cmd
}
