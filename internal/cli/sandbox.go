package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) sandboxCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "sandbox", Aliases: []string{"sb"}, Short: "Make, look at and remove sandboxes"}
	lease := &cobra.Command{Use: "lease", Short: "Leases: how long a sandbox may live"}
	lease.AddCommand(a.leaseRenewCmd())
	cmd.AddCommand(a.sandboxNewCmd(), a.sandboxListCmd(), a.sandboxShowCmd(), a.sandboxStartCmd(), a.sandboxStopCmd(), a.sandboxSuspendCmd(), a.sandboxResumeCmd(),
		a.sandboxDestroyCmd(), a.sandboxLogsCmd(), lease)
	return cmd
}

type sandboxNewFlags struct {
	repo, ref, task string
	noPreflight     bool
	agent           string
	ttl             time.Duration
	keepalive, wait bool
	req             api.SandboxCreate
}

func (a *App) sandboxNewCmd() *cobra.Command {
	f := &sandboxNewFlags{wait: true}
	cmd := &cobra.Command{
		Use:   "new",
		Short: "Make a sandbox and wait until it answers",
		Example: `  agentlab sandbox new --name play && agentlab ssh play
  agentlab sandbox new --profile interactive-dev --keepalive --ttl 8h`,
		Args: exactArgs(),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.req.Name, "name", "", "name (default: made up)")
	flags.StringVar(&f.req.Profile, "profile", "", "profile (see 'agentlab profile list')")
	flags.StringVar(&f.req.Image, "image", "", "image instead of the profile's")
	flags.IntVar(&f.req.Cores, "cores", 0, "virtual CPUs instead of the profile's")
	flags.IntVar(&f.req.MemoryMB, "memory-mb", 0, "MiB of memory instead of the profile's")
	flags.Var(ttlFlag{&f.ttl}, "ttl", "lease, e.g. 30m, 4h, 2d (default: the profile's)")
	flags.BoolVar(&f.keepalive, "keepalive", false, "keep it when its job ends")
	flags.StringVar(&f.repo, "repo", "", "URL or local path of a repository to clone into it, at /tmp/repo; it is kept when its lease ends, as with --keepalive")
	flags.StringVar(&f.ref, "ref", "", "branch, tag or commit of --repo")
	flags.StringVar(&f.task, "task", "", "run this task in it (with --repo: default is only to clone)")
	choice(flags, &f.agent, "agent", agentlab.Agents, "agent for --task")
	preflightFlag(flags, &f.noPreflight)
	workspaceFlag(flags, &f.req.Workspace)
	flags.BoolVar(&f.wait, "wait", true, "wait until it answers")
	noWait(cmd, &f.wait)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, _ []string) error {
		f.req.TTLMinutes = int(f.ttl / time.Minute)
		if cmd.Flags().Changed("keepalive") {
			f.req.Keepalive = &f.keepalive
		}
		if err := a.sandboxJob(ctx, c, f); err != nil {
			return err
		}
		sb, err := c.CreateSandbox(ctx, f.req)
		if err != nil {
			if f.req.Job != nil {
				a.dropBundle(ctx, c, f.req.Job.BundleID)
			}
			return err
		}
		if f.wait {
			sb, err = a.waitSandbox(ctx, c, sb, 0, isUp)
			// A short job may have ended, and its sandbox with it.
			if short := sb.JobID != "" && isDestroyed(agentlab.SandboxState(sb.State)); err != nil && !short {
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

// sandboxJobEnd waits for the job of a new sandbox and shows what became of
// both.
func (a *App) sandboxJobEnd(ctx context.Context, c *client.Client, sb api.Sandbox) error {
	j, err := a.waitJob(ctx, c, sb.JobID)
	if err != nil {
		return err
	}
	a.awaitGone(ctx, c, j)
	if now, err := c.Sandbox(ctx, fmt.Sprint(sb.VMID)); err == nil {
		sb = now
	}
	if err := a.printSandbox(sb); err != nil {
		return err
	}
	if err := jobStatusError(j); err != nil {
		a.progressf("its job %s is %s: %s\n  → agentlab job logs %s", j.ID, j.Status, plain(j.Reason), j.ID)
		return err
	}
	return nil
}

// workspaceFlag passes --workspace on, which the daemon refuses with the
// reason until there are workspaces.
func workspaceFlag(flags *pflag.FlagSet, p **string) {
	flags.Func("workspace", "workspace to mount at /work (not supported yet)", func(s string) error { *p = &s; return nil })
}

// sandboxJob turns --repo, --ref and --task into the job of the request.
func (a *App) sandboxJob(ctx context.Context, c *client.Client, f *sandboxNewFlags) error {
	if f.repo == "" && f.task == "" {
		if f.ref != "" || f.agent != "" {
			return usageErrorf("--ref goes with --repo, and --agent with --task")
		}
		return nil
	}
	run := &jobRunFlags{repo: f.repo, req: api.JobCreate{Ref: f.ref, Task: f.task, Agent: f.agent, NoPreflight: f.noPreflight}}
	if f.task == "" {
		if f.agent != "" {
			return usageErrorf("--agent goes with --task")
		}
		run.req.Agent = agentlab.AgentNone
	}
	if run.repo != "" {
		check := run.req
		check.Profile, check.Image, check.TTLMinutes, check.Keepalive = f.req.Profile, f.req.Image, f.req.TTLMinutes, f.req.Keepalive
		if err := a.chooseRepo(ctx, c, run, check); err != nil {
			return err
		}
	}
	f.req.Job = &run.req
	return nil
}

func (a *App) printSandbox(sb api.Sandbox) error {
	if a.json {
		return a.printJSON(sb)
	}
	t := newTable(a.Stdout, "Sandbox:", fmt.Sprint(sb.VMID))
	t.row("Name:", sb.Name)
	t.row("State:", sb.State)
	if sb.Waiting != "" {
		t.row("Waiting:", sb.Waiting)
	}
	if sb.Reason != "" {
		t.row("Reason:", sb.Reason)
	}
	if sb.JobID != "" {
		t.row("Job:", sb.JobID)
	}
	t.row("Profile:", sb.Profile)
	t.row("Image:", sb.Image)
	t.row("Backend:", sb.Backend)
	t.row("Address:", dash(sb.IP))
	t.row("Resources:", fmt.Sprintf("%d cores, %d MiB memory", sb.Cores, sb.MemoryMB))
	t.row("Network:", sb.NetworkMode)
	t.row("Lease ends in:", a.until(sb.LeaseExpiresAt))
	t.row("Keepalive:", yesNo(sb.Keepalive))
	t.row("Created:", localTime(sb.CreatedAt))
	return t.flush()
}

func (a *App) sandboxListCmd() *cobra.Command {
	var all, orphans bool
	cmd := &cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List sandboxes", Args: exactArgs()}
	cmd.Flags().BoolVar(&all, "all", false, "also those that were destroyed")
	cmd.Flags().BoolVar(&orphans, "orphans", false, "list virtual machines of ours that belong to no sandbox instead")
	cmd.MarkFlagsMutuallyExclusive("all", "orphans")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, _ []string) error {
		if orphans {
			return a.listOrphans(ctx, c)
		}
		list, err := c.Sandboxes(ctx, client.SandboxQuery{Destroyed: all})
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(list)
		}
		t := newTable(a.Stdout, "VMID", "NAME", "STATE", "PROFILE", "IP", "LEASE", "JOB", "AGE")
		for _, sb := range list.Items {
			t.row(sb.VMID, sb.Name, sb.State, sb.Profile, dash(sb.IP), a.until(sb.LeaseExpiresAt), dash(sb.JobID), a.age(sb.CreatedAt))
		}
		return t.flush()
	})
	return cmd
}

func (a *App) sandboxShowCmd() *cobra.Command {
	return &cobra.Command{
		Use: "show SANDBOX", Short: "Show a sandbox", Args: exactArgs("SANDBOX"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			sb, err := c.Sandbox(ctx, args[0])
			if err != nil {
				return err
			}
			return a.printSandbox(sb)
		}),
	}
}

func (a *App) sandboxStartCmd() *cobra.Command {
	wait := true
	cmd := &cobra.Command{Use: "start SANDBOX", Short: "Start a stopped sandbox", Args: exactArgs("SANDBOX")}
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until it answers")
	noWait(cmd, &wait)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		return a.changeSandbox(ctx, c, args[0], c.StartSandbox, wait, isUp)
	})
	return cmd
}

func (a *App) sandboxSuspendCmd() *cobra.Command {
	wait := true
	cmd := &cobra.Command{
		Use: "suspend SANDBOX", Short: "Freeze a sandbox; its memory is kept", Args: exactArgs("SANDBOX"),
		Long: "Freeze a READY sandbox: its CPUs stand still, memory and disk are kept, its lease goes on.\nOnly on backends that can; 'agentlab sandbox stop' works on all.",
	}
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until it is suspended")
	noWait(cmd, &wait)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		return a.changeSandbox(ctx, c, args[0], c.SuspendSandbox, wait, func(s agentlab.SandboxState) bool {
			return s == agentlab.SandboxSuspended || s == agentlab.SandboxStopped
		})
	})
	return cmd
}

func (a *App) sandboxResumeCmd() *cobra.Command {
	wait := true
	cmd := &cobra.Command{Use: "resume SANDBOX", Short: "Let a suspended sandbox go on", Args: exactArgs("SANDBOX")}
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until it answers")
	noWait(cmd, &wait)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		return a.changeSandbox(ctx, c, args[0], c.ResumeSandbox, wait, isUp)
	})
	return cmd
}

func (a *App) sandboxStopCmd() *cobra.Command {
	wait := true
	var grace int
	cmd := &cobra.Command{Use: "stop SANDBOX", Short: "Shut a sandbox down; its disk is kept", Args: exactArgs("SANDBOX")}
	cmd.Flags().IntVar(&grace, "grace", 30, "seconds that the guest may take before its power is cut")
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until it is stopped")
	noWait(cmd, &wait)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		stop := func(ctx context.Context, sandbox string) (api.Sandbox, error) {
			return c.StopSandbox(ctx, sandbox, api.SandboxStop{GraceSeconds: &grace})
		}
		return a.changeSandbox(ctx, c, args[0], stop, wait, func(s agentlab.SandboxState) bool { return s == agentlab.SandboxStopped })
	})
	return cmd
}

func (a *App) sandboxDestroyCmd() *cobra.Command {
	wait, force, orphan, yes := true, false, false, false
	cmd := &cobra.Command{
		Use: "destroy SANDBOX...", Short: "Remove sandboxes with their disks", Args: cobra.MinimumNArgs(1),
		Long: `Remove sandboxes with their disks, in whatever state they are. A job that runs
in one is cancelled. All of them are removed at the same time. The exit code is
1 when one of them could not be.

With --orphan, remove virtual machines that bear our mark and belong to no
sandbox, by UID or VMID: 'agentlab sandbox list --orphans' lists them.`,
	}
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until nothing of it is left")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "no error when there is no such sandbox")
	cmd.Flags().BoolVar(&orphan, "orphan", false, "remove what belongs to no sandbox; asks first")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask before --orphan removes something")
	noWait(cmd, &wait)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		if yes && !orphan || orphan && !wait {
			return usageErrorf("--yes goes with --orphan, which always waits")
		}
		if orphan {
			return a.destroyOrphans(ctx, c, args, yes, force)
		}
		return a.destroySandboxes(ctx, c, args, wait, force)
	})
	return cmd
}

func (a *App) leaseRenewCmd() *cobra.Command {
	var ttl time.Duration
	cmd := &cobra.Command{Use: "renew SANDBOX --ttl DURATION", Short: "Let a sandbox live for this long from now", Args: exactArgs("SANDBOX")}
	cmd.Flags().Var(ttlFlag{&ttl}, "ttl", "e.g. 30m, 4h, 2d")
	_ = cmd.MarkFlagRequired("ttl")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		sb, err := c.RenewLease(ctx, args[0], int(ttl/time.Minute))
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(sb)
		}
		a.progressf("the lease of sandbox %s (%d) ends in %s", sb.Name, sb.VMID, a.until(sb.LeaseExpiresAt))
		return nil
	})
	return cmd
}

func (a *App) sandboxLogsCmd() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{Use: "logs SANDBOX", Short: "Print a sandbox's console", Args: exactArgs("SANDBOX")}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until it is gone")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		log, err := c.Console(ctx, args[0], follow)
		if err != nil {
			return err
		}
		return copyAll(logWriter(a.Stdout), log)
	})
	return cmd
}

func (a *App) logsCmd() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use: "logs SANDBOX|JOB", Short: "Print the log of a job, or of a sandbox's job, or a sandbox's console", Args: exactArgs("SANDBOX|JOB"),
		Long: "Print the agent's log of a job. For a sandbox that was made for a job this is that job's log; for another sandbox it is the console.",
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the end")
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
				log, err := c.Console(ctx, id, follow)
				if err != nil {
					return err
				}
				return copyAll(logWriter(a.Stdout), log)
			}
			id = sb.JobID
		}
		return a.copyJobLog(ctx, c, id, follow)
	})
	return cmd
}
