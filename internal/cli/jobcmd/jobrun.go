package jobcmd

import (
	"cmp"
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
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/project"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// RunFlags are the flags of a new job.
type RunFlags struct {
	Repo, taskFile string
	ttl            time.Duration
	wait           bool
	keepalive      bool
	attempts       api.JobAttempts
	attemptTasks   []string // files
	workspace      cli.WorkspaceChoice
	branch         string
	identity       gitsafe.Identity // for --stateful
	Req            api.JobCreate
	run            bool // a job that 'job run' creates
	noSetupCache   bool
}

// cachesSetup reports whether the job may use a snapshot after setup.
func (f *RunFlags) cachesSetup() bool {
	return f.run && !f.noSetupCache && !f.Req.NoSetup && f.Req.Attempts == nil && f.Req.Workspace == "" && f.Req.Session == ""
}

func jobRunCmd(a *cli.App) *cobra.Command {
	f := &RunFlags{run: true}
	cmd := &cobra.Command{
		Use:   "run [--repo URL|PATH] --task TEXT",
		Short: "Run a coding agent on a repository in a new sandbox",
		Long: `Run a coding agent on a repository in a new sandbox, and keep the results.

The repository is a URL, which the sandbox clones over the network, or a local
path, which is sent as a git bundle: no directory of this machine is mounted,
and uncommitted changes are not sent. Checked-out submodules and the objects of Git LFS
that are here are sent; the command lists the others.
Fetch the commits of a job on a local repository with 'agentlab job fetch JOB'.

With --attempts the job runs several times, each attempt in a sandbox of its
own, and keeps the result of one: of the attempt for which the command --pick,
run in its checkout after the agent, exits with code 0 and prints the highest
number on its last line; without --pick, of the first that completes. The diff
and log of each attempt are artifacts of the job, below attempts/N/. Attempts
push nothing. On a backend that can fork sandboxes, the repository is cloned and
its setup commands run once, and the attempts continue copies of that sandbox.

By default the command waits for the job, shows progress and the agent's log,
and exits with 0 for COMPLETED, 1 for FAILED or CANCELLED, and 124 for TIMEOUT.
Ctrl-C leaves the job running; 'agentlab job cancel JOB' stops it.`,
		Example: `  agentlab job run --repo https://github.com/org/repo --ref main --task "Fix issue 12"
  agentlab job run --repo . --agent codex --task-file TASK.md --ttl 2h
  agentlab job run --repo . --agent shell --task "make test"
  agentlab job run --repo . --task "Fix issue 12" --attempts 4 --attempt-agent claude,codex --pick "make test"`,
		Args: cli.ExactArgs(),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.Repo, "repo", "", "URL to clone, or path of a local repository (default: none, the agent starts in an empty directory)")
	flags.StringVar(&f.Req.Ref, "ref", "", "branch, tag or commit; for a local repository any revision, e.g. HEAD~2 (default: the default branch of the URL, or HEAD)")
	cli.Count(flags, &f.Req.Depth, "depth", "clone only this many commits of history; URLs only; 0 means all")
	flags.StringVar(&f.Req.Task, "task", "", "task for the agent; with --agent shell, a shell script")
	flags.StringVar(&f.taskFile, "task-file", "", "read the task from this file; - means standard input")
	flags.StringVar(&f.Req.Agent, "agent", "", "claude, codex, opencode, gemini or shell")
	flags.StringVar(&f.Req.Profile, "profile", "", "profile (see 'agentlab profile list')")
	cli.BackendFlag(flags, &f.Req.Backend, "the sandbox (default: the one of its workspace, or the profile's, or the configured default)")
	flags.StringVar(&f.Req.Image, "image", "", "image (default: the profile's)")
	flags.StringVar(&f.Req.Mode, "mode", "", "permission mode; dangerous, the default, is the only one: the agent may do everything inside its sandbox")
	flags.Var(cli.DurationFlag(&f.ttl, agentlab.MaxTTL), "ttl", "time limit of the job, e.g. 30m, 4h (default: the profile's)")
	flags.BoolVar(&f.keepalive, "keepalive", false, "keep the sandbox after the job")
	attemptFlags(flags, f)
	cli.WorkspaceFlags(flags, &f.workspace, "of the repository, whose name has a hash of its path or URL")
	flags.StringVar(&f.Req.Session, "session", "", "session to run in: on its workspace, with its profile, on its branch")
	flags.StringVar(&f.branch, "branch", "", "run in the session of this Git branch, which is created unless it exists, and work on the branch")
	cli.PreflightFlag(flags, &f.Req.NoPreflight)
	cli.SetupFlag(flags, &f.Req.NoSetup)
	cli.DevcontainerFlag(flags, &f.Req.Devcontainer)
	flags.BoolVar(&f.noSetupCache, "no-setup-cache", false, "run the commands under setup in this job, and neither use nor make a snapshot after them")
	cli.WaitFlag(cmd, &f.wait, "wait for the job to end, with progress and log")
	cmd.MarkFlagsMutuallyExclusive("task", "task-file", "attempt-task-file")
	cmd.MarkFlagsMutuallyExclusive("session", "branch", "workspace", "stateful")
	cmd.MarkFlagsMutuallyExclusive("agent", "attempt-agent")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := prepareRun(cmd.Context(), a, f, cmd); err != nil {
			return err
		}
		c, err := a.Connect(cmd.Context())
		if err != nil {
			return err
		}
		return cli.ArgumentError(cmd, jobRun(cmd.Context(), a, c, f))
	}
	return cmd
}

// prepareRun completes the request, and checks it as far as possible without
// the daemon, so that a usage error does not start one.
func prepareRun(ctx context.Context, a *cli.App, f *RunFlags, cmd *cobra.Command) error {
	if f.taskFile != "" {
		text, err := a.ReadInput(f.taskFile, agentlab.MaxTaskBytes)
		if err != nil {
			return work.UsageErrorf("--task-file: %w", err).WithHint("name a readable file with the task, or - for standard input")
		}
		f.Req.Task = text
	}
	if cmd.Flags().Changed("keepalive") {
		f.Req.Keepalive = &f.keepalive
	}
	f.Req.TTLMinutes = int(f.ttl / time.Minute)
	f.workspace.OfSession = f.Req.Session != "" || f.branch != ""
	stateful, err := f.statefulName(ctx)
	if err != nil {
		return err
	}
	if f.Req.WorkspaceSelection, err = f.workspace.Selection(stateful, "--repo"); err != nil {
		return err
	}
	if err := prepareAttempts(a, f); err != nil {
		return err
	}
	check := agentlab.Job{ // shell and dangerous stand for the defaults of the daemon
		Task: f.Req.Task, Agent: cmp.Or(f.Req.Agent, "shell"), Mode: cmp.Or(f.Req.Mode, "dangerous"), Ref: f.Req.Ref, Depth: f.Req.Depth,
	}
	if f.Repo != "" {
		switch _, local, err := gitsafe.LocalRepo(f.Repo); {
		case err != nil:
			return err
		case local:
			check.Ref = "" // git on this machine resolves it
		}
	}
	for _, j := range attemptsOf(check, f.Req.Attempts) {
		if err := j.Validate(); err != nil {
			return work.Usage(err)
		}
	}
	if check.Agent == agentlab.AgentNone {
		return work.UsageErrorf("--agent none needs a sandbox that outlives the job").WithHint("use: agentlab sandbox new --repo URL|PATH")
	}
	return nil
}

// statefulName returns the name of the workspace of --stateful; "" without a repository.
func (f *RunFlags) statefulName(ctx context.Context) (name string, err error) {
	if f.Repo == "" || !f.workspace.Stateful {
		return "", nil
	}
	f.identity, err = gitsafe.Identify(ctx, f.Repo)
	return f.identity.WorkspaceName(), err
}

func jobRun(ctx context.Context, a *cli.App, c *client.Client, f *RunFlags) error {
	if f.branch != "" {
		image, err := session.NewImage(ctx, f.Repo, f.Req.Ref, f.Req.Image)
		if err != nil {
			return err
		}
		s, err := session.OfBranch(ctx, a, c, f.Repo, api.SessionCreate{Branch: f.branch, Profile: f.Req.Profile, Image: image})
		if err != nil {
			return project.ImageError(err, image != f.Req.Image)
		}
		f.Req.Session = s.ID
	}
	if f.workspace.Stateful && f.workspace.Name == "" {
		if err := f.identity.CheckStateful(ctx, c); err != nil {
			return err
		}
	}
	if f.Repo != "" {
		continues := f.Req.Session != "" && f.Req.Ref == ""
		if err := ChooseRepo(ctx, a, c, f, f.Req); err != nil {
			return err
		}
		if continues { // from the branch in the workspace; in its absence the HEAD of the bundle is what it was made of
			f.Req.Ref = ""
		}
	}
	j, err := c.CreateJob(ctx, f.Req)
	if err != nil {
		gitsafe.DropBundle(ctx, a, c, f.Req.BundleID)
		return err
	}
	return followCreated(ctx, a, c, j, f.wait)
}

// followCreated prints the ID of a job that was just created, or with wait follows it to
// its end.
func followCreated(ctx context.Context, a *cli.App, c *client.Client, j api.Job, wait bool) (err error) {
	if !wait {
		return a.Emit(j, func() error {
			_, err := fmt.Fprintln(a.Stdout, j.ID)
			return err
		})
	}
	a.Progressf("job %s", j.ID)
	out := a.Stdout
	if a.JSON {
		out = a.Stderr
	}
	attempts := j.AttemptCount > 0
	if attempts {
		j, err = watchAttempts(ctx, a, c, j.ID)
	} else {
		lost := func(err error) { a.Progressf("%v\n  → %s", err, agentlab.HintOf(err)) }
		err = preparationLog(ctx, a, c, j.ID, func(id string) error {
			_, err := watchJob(ctx, a, c, id, out, a.ShowEvent, lost)
			return err
		})
		if err == nil {
			j, err = watchJob(ctx, a, c, j.ID, out, a.ShowEvent, lost)
		}
	}
	if err != nil {
		return JobContinues(ctx, a, j.ID, attempts, err)
	}
	return finishJob(ctx, a, c, j, goneLimit)
}

// finishJob waits until an ended job has left nothing behind, but at most for the time
// gone, prints how it ended, and returns its exit code as an error.
func finishJob(ctx context.Context, a *cli.App, c *client.Client, j api.Job, gone time.Duration) error {
	wait, cancel := context.WithTimeout(ctx, gone)
	defer cancel()
	WaitDestroyed(wait, a, c, append([]api.Job{j}, j.Attempts...)...)
	if err := a.Emit(j, func() error { summariseEnded(ctx, a, c, j); return nil }); err != nil {
		return err
	}
	return StatusError(j)
}

// JobContinues returns the error of waiting for a job. After an interrupt, it
// prints that the job continues.
func JobContinues(ctx context.Context, a *cli.App, id string, attempts bool, err error) error {
	if ctx.Err() == nil {
		return err
	}
	logs := "agentlab job logs --follow " + id
	if attempts {
		logs = logsOfAttempt(id)
	}
	a.Progressf("\njob %s continues in the background\n  → %s\n  → agentlab job cancel %s", id, logs, id)
	return context.Canceled
}

// goneLimit is how long a command waits for the sandbox of an ended job to be
// destroyed.
const goneLimit = 30 * time.Second

// WaitDestroyed waits until the sandbox of an ended job is destroyed or, if it is
// kept, released, so that nothing remains when the command returns. It changes
// nothing about the outcome of the job.
func WaitDestroyed(ctx context.Context, a *cli.App, c *client.Client, jobs ...api.Job) {
	ctx, cancel := context.WithTimeout(ctx, goneLimit)
	defer cancel()
	for _, j := range jobs {
		waitOneDestroyed(ctx, a, c, j)
	}
}

func waitOneDestroyed(ctx context.Context, a *cli.App, c *client.Client, j api.Job) {
	number := j.SandboxVMID
	if number == 0 { // a sandbox gets its job ID before the job gets the VMID
		for sb, err := range c.EachSandbox(ctx, client.SandboxQuery{}) {
			if err == nil && sb.JobID == j.ID {
				number = sb.VMID
				break
			}
		}
		if number == 0 {
			return
		}
	}
	vmid := fmt.Sprint(number)
	for _, err := range c.FollowEvents(ctx, client.EventQuery{Sandbox: vmid, Kind: agentlab.EventSandboxState}) {
		if err != nil {
			break
		}
		sb, err := c.Sandbox(ctx, vmid)
		released := sb.State == string(agentlab.SandboxDestroyed) || sb.Keepalive && sb.State != string(agentlab.SandboxRunning) || work.IsKept(sb)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound || err == nil && released {
			return
		}
	}
	if j.Keepalive {
		return
	}
	a.Progressf("note: sandbox %s of the job is still being destroyed\n  → agentlab sandbox show %s", vmid, vmid)
}

// ChooseRepo sets the repository of a request. A local one is uploaded, after
// the daemon has validated check.
func ChooseRepo(ctx context.Context, a *cli.App, c *client.Client, f *RunFlags, check api.JobCreate) error {
	path, local, err := gitsafe.LocalRepo(f.Repo)
	if err != nil {
		return err
	}
	if !local {
		if err := agentlab.ValidateRepoURL(f.Repo); err != nil {
			return work.Usage(err)
		}
		f.Req.RepoURL = f.Repo
		return nil
	}
	if f.Req.Depth != 0 {
		return work.UsageErrorf("--depth cannot be used with a local repository").WithHint("remove --depth; a local repository is sent with its history")
	}
	src, err := gitsafe.FindCommit(ctx, path, f.Req.Ref)
	if err != nil {
		return err
	}
	asked := f.Req.Image
	p, err := project.Use(ctx, src, &f.Req)
	if err == nil && f.cachesSetup() {
		err = project.UseSetup(ctx, a, src, p, &f.Req)
	}
	if err != nil {
		return err
	}
	check.Image = f.Req.Image
	check.Ref = src.Branch
	if err := c.ValidateJob(ctx, check); err != nil {
		return project.ImageError(err, asked != f.Req.Image)
	}
	f.Req.Ref = src.Shown(ctx, f.Req.Ref)
	if a.Place != nil {
		if err := a.Place.Sends(src); err != nil {
			return err
		}
	}
	f.Req.BundleID, err = gitsafe.SendBundle(ctx, a, c, src)
	return err
}

// StatusError returns the exit code for a job's final status.
func StatusError(j api.Job) error {
	switch agentlab.JobStatus(j.Status) {
	case agentlab.JobCompleted:
		return nil
	case agentlab.JobTimeout:
		return work.ExitStatus(cli.ExitTimeout)
	default:
		return work.ExitStatus(cli.ExitFailure)
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// printOutcome prints how a job ended.
func printOutcome(a *cli.App, j api.Job) {
	took := ""
	if j.FinishedAt != nil {
		took = " after " + cli.ShortDuration(j.FinishedAt.Sub(j.CreatedAt))
	}
	why := ""
	if j.Reason != "" {
		why = ": " + agentlab.WithoutControls(j.Reason)
	}
	a.Progressf("job %s %s%s%s", j.ID, j.Status, took, why)
}

// summariseEnded is summarise for a job that has just ended. It also names the disk with
// its work, if that is kept for a while.
func summariseEnded(ctx context.Context, a *cli.App, c *client.Client, j api.Job) {
	summarise(a, j)
	if j.SandboxVMID == 0 || agentlab.JobStatus(j.Status) == agentlab.JobCompleted {
		return
	}
	if sb, err := c.Sandbox(ctx, fmt.Sprint(j.SandboxVMID)); err == nil && work.IsKept(sb) && sb.JobID == j.ID {
		a.Progressf("  the disk of its sandbox is kept until %s, with work that is not stored\n  → agentlab job salvage %s", work.LocalTime(sb.LeaseExpiresAt), j.ID)
	}
}

// summarise prints how a job ended and the commands for its results.
func summarise(a *cli.App, j api.Job) {
	printOutcome(a, j)
	if j.Winner > 0 {
		a.Progressf("  attempt %d of %d won", j.Winner, j.AttemptCount)
	}
	if j.Result.Commits > 0 {
		a.Progressf("  %s on %s", agentlab.Plural(j.Result.Commits, "commit"), agentlab.WithoutControls(j.Result.Branch))
		if j.Bundled || j.Winner > 0 || j.Salvages != "" { // attempts and salvage jobs push nothing
			a.Progressf("  → agentlab job fetch %s", j.ID)
		}
	}
	if i := slices.IndexFunc(j.Artifacts, func(f api.Artifact) bool { return f.Path == agentlab.PrepareLog }); i >= 0 && j.Status == string(agentlab.JobFailed) {
		a.Progressf("  the log of the commands under setup\n  → agentlab job artifacts download %s %s", j.ID, agentlab.PrepareLog)
	}
	noteCheckpoint(a, j)
	summariseDenials(a, j.ID, j.Egress)
	if n := j.Result.Uncommitted; n > 0 {
		a.Progressf("  %s with uncommitted changes\n  → agentlab job diff %s", agentlab.Plural(n, "file"), j.ID)
		if j.Bundled {
			a.Progressf("  → agentlab job apply %s", j.ID)
		}
	}
	if len(j.Artifacts) > 0 {
		a.Progressf("  %s\n  → agentlab job artifacts %s", agentlab.Plural(len(j.Artifacts), "artifact"), j.ID)
	}
	if j.Keepalive && j.SandboxVMID != 0 {
		a.Progressf("  the sandbox is kept\n  → agentlab ssh %d", j.SandboxVMID)
	}
}
