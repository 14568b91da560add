package cli

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
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/project"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

type jobRunFlags struct {
	repo, taskFile string
	ttl            time.Duration
	wait           bool
	keepalive      bool
	attempts       api.JobAttempts
	attemptTasks   []string // files
	workspace      workspaceChoice
	branch         string
	identity       gitsafe.Identity // for --stateful
	req            api.JobCreate
	run            bool // a job that 'job run' creates
	noSetupCache   bool
}

// cachesSetup reports whether the job may use a snapshot after setup.
func (f *jobRunFlags) cachesSetup() bool {
	return f.run && !f.noSetupCache && !f.req.NoSetup && f.req.Attempts == nil && f.req.Workspace == "" && f.req.Session == ""
}

func (a *App) jobRunCmd() *cobra.Command {
	f := &jobRunFlags{run: true}
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
		Args: exactArgs(),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.repo, "repo", "", "URL to clone, or path of a local repository (default: none, the agent starts in an empty directory)")
	flags.StringVar(&f.req.Ref, "ref", "", "branch, tag or commit; for a local repository any revision, e.g. HEAD~2 (default: the default branch of the URL, or HEAD)")
	count(flags, &f.req.Depth, "depth", "clone only this many commits of history; URLs only; 0 means all")
	flags.StringVar(&f.req.Task, "task", "", "task for the agent; with --agent shell, a shell script")
	flags.StringVar(&f.taskFile, "task-file", "", "read the task from this file; - means standard input")
	flags.StringVar(&f.req.Agent, "agent", "", "claude, codex, opencode, gemini or shell")
	flags.StringVar(&f.req.Profile, "profile", "", "profile (see 'agentlab profile list')")
	backendFlag(flags, &f.req.Backend, "the sandbox (default: the one of its workspace, or the profile's, or the configured default)")
	flags.StringVar(&f.req.Image, "image", "", "image (default: the profile's)")
	flags.StringVar(&f.req.Mode, "mode", "", "permission mode; dangerous, the default, is the only one: the agent may do everything inside its sandbox")
	flags.Var(durationFlag{&f.ttl, agentlab.MaxTTL}, "ttl", "time limit of the job, e.g. 30m, 4h (default: the profile's)")
	flags.BoolVar(&f.keepalive, "keepalive", false, "keep the sandbox after the job")
	attemptFlags(flags, f)
	workspaceFlags(flags, &f.workspace, "of the repository, whose name has a hash of its path or URL")
	flags.StringVar(&f.req.Session, "session", "", "session to run in: on its workspace, with its profile, on its branch")
	flags.StringVar(&f.branch, "branch", "", "run in the session of this Git branch, which is created unless it exists, and work on the branch")
	preflightFlag(flags, &f.req.NoPreflight)
	setupFlag(flags, &f.req.NoSetup)
	devcontainerFlag(flags, &f.req.Devcontainer)
	flags.BoolVar(&f.noSetupCache, "no-setup-cache", false, "run the commands under setup in this job, and neither use nor make a snapshot after them")
	waitFlag(cmd, &f.wait, "wait for the job to end, with progress and log")
	cmd.MarkFlagsMutuallyExclusive("task", "task-file", "attempt-task-file")
	cmd.MarkFlagsMutuallyExclusive("session", "branch", "workspace", "stateful")
	cmd.MarkFlagsMutuallyExclusive("agent", "attempt-agent")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := a.prepareRun(cmd.Context(), f, cmd); err != nil {
			return err
		}
		c, err := a.connect(cmd.Context())
		if err != nil {
			return err
		}
		return argumentError(cmd, a.jobRun(cmd.Context(), c, f))
	}
	return cmd
}

// prepareRun completes the request, and checks it as far as possible without
// the daemon, so that a usage error does not start one.
func (a *App) prepareRun(ctx context.Context, f *jobRunFlags, cmd *cobra.Command) error {
	if f.taskFile != "" {
		text, err := a.readInput(f.taskFile, agentlab.MaxTaskBytes)
		if err != nil {
			return work.UsageErrorf("--task-file: %w", err).WithHint("name a readable file with the task, or - for standard input")
		}
		f.req.Task = text
	}
	if cmd.Flags().Changed("keepalive") {
		f.req.Keepalive = &f.keepalive
	}
	f.req.TTLMinutes = int(f.ttl / time.Minute)
	f.workspace.ofSession = f.req.Session != "" || f.branch != ""
	stateful, err := f.statefulName(ctx)
	if err != nil {
		return err
	}
	if f.req.WorkspaceSelection, err = f.workspace.selection(stateful, "--repo"); err != nil {
		return err
	}
	if err := a.prepareAttempts(f); err != nil {
		return err
	}
	check := agentlab.Job{ // shell and dangerous stand for the defaults of the daemon
		Task: f.req.Task, Agent: cmp.Or(f.req.Agent, "shell"), Mode: cmp.Or(f.req.Mode, "dangerous"), Ref: f.req.Ref, Depth: f.req.Depth,
	}
	if f.repo != "" {
		switch _, local, err := gitsafe.LocalRepo(f.repo); {
		case err != nil:
			return err
		case local:
			check.Ref = "" // git on this machine resolves it
		}
	}
	for _, j := range attemptsOf(check, f.req.Attempts) {
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
func (f *jobRunFlags) statefulName(ctx context.Context) (name string, err error) {
	if f.repo == "" || !f.workspace.stateful {
		return "", nil
	}
	f.identity, err = gitsafe.Identify(ctx, f.repo)
	return f.identity.WorkspaceName(), err
}

func (a *App) jobRun(ctx context.Context, c *client.Client, f *jobRunFlags) error {
	if f.branch != "" {
		image, err := session.NewImage(ctx, f.repo, f.req.Ref, f.req.Image)
		if err != nil {
			return err
		}
		s, err := session.OfBranch(ctx, a, c, f.repo, api.SessionCreate{Branch: f.branch, Profile: f.req.Profile, Image: image})
		if err != nil {
			return project.ImageError(err, image != f.req.Image)
		}
		f.req.Session = s.ID
	}
	if f.workspace.stateful && f.workspace.name == "" {
		if err := f.identity.CheckStateful(ctx, c); err != nil {
			return err
		}
	}
	if f.repo != "" {
		continues := f.req.Session != "" && f.req.Ref == ""
		if err := a.chooseRepo(ctx, c, f, f.req); err != nil {
			return err
		}
		if continues { // from the branch in the workspace; in its absence the HEAD of the bundle is what it was made of
			f.req.Ref = ""
		}
	}
	j, err := c.CreateJob(ctx, f.req)
	if err != nil {
		gitsafe.DropBundle(ctx, a, c, f.req.BundleID)
		return err
	}
	return a.followCreated(ctx, c, j, f.wait)
}

// followCreated prints the ID of a job that was just created, or with wait follows it to
// its end.
func (a *App) followCreated(ctx context.Context, c *client.Client, j api.Job, wait bool) (err error) {
	if !wait {
		return a.emit(j, func() error {
			_, err := fmt.Fprintln(a.Stdout, j.ID)
			return err
		})
	}
	a.Progressf("job %s", j.ID)
	out := a.Stdout
	if a.json {
		out = a.Stderr
	}
	attempts := j.AttemptCount > 0
	if attempts {
		j, err = a.watchAttempts(ctx, c, j.ID)
	} else {
		lost := func(err error) { a.Progressf("%v\n  → %s", err, agentlab.HintOf(err)) }
		err = a.preparationLog(ctx, c, j.ID, func(id string) error {
			_, err := a.watchJob(ctx, c, id, out, a.ShowEvent, lost)
			return err
		})
		if err == nil {
			j, err = a.watchJob(ctx, c, j.ID, out, a.ShowEvent, lost)
		}
	}
	if err != nil {
		return a.jobContinues(ctx, j.ID, attempts, err)
	}
	return a.finishJob(ctx, c, j, goneLimit)
}

// finishJob waits until an ended job has left nothing behind, but at most for the time
// gone, prints how it ended, and returns its exit code as an error.
func (a *App) finishJob(ctx context.Context, c *client.Client, j api.Job, gone time.Duration) error {
	wait, cancel := context.WithTimeout(ctx, gone)
	defer cancel()
	a.waitDestroyed(wait, c, append([]api.Job{j}, j.Attempts...)...)
	if err := a.emit(j, func() error { a.summariseEnded(ctx, c, j); return nil }); err != nil {
		return err
	}
	return jobStatusError(j)
}

// jobContinues returns the error of waiting for a job. After an interrupt, it
// prints that the job continues.
func (a *App) jobContinues(ctx context.Context, id string, attempts bool, err error) error {
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

// waitDestroyed waits until the sandbox of an ended job is destroyed or, if it is
// kept, released, so that nothing remains when the command returns. It changes
// nothing about the outcome of the job.
func (a *App) waitDestroyed(ctx context.Context, c *client.Client, jobs ...api.Job) {
	ctx, cancel := context.WithTimeout(ctx, goneLimit)
	defer cancel()
	for _, j := range jobs {
		a.waitOneDestroyed(ctx, c, j)
	}
}

func (a *App) waitOneDestroyed(ctx context.Context, c *client.Client, j api.Job) {
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

// chooseRepo sets the repository of a request. A local one is uploaded, after
// the daemon has validated check.
func (a *App) chooseRepo(ctx context.Context, c *client.Client, f *jobRunFlags, check api.JobCreate) error {
	path, local, err := gitsafe.LocalRepo(f.repo)
	if err != nil {
		return err
	}
	if !local {
		if err := agentlab.ValidateRepoURL(f.repo); err != nil {
			return work.Usage(err)
		}
		f.req.RepoURL = f.repo
		return nil
	}
	if f.req.Depth != 0 {
		return work.UsageErrorf("--depth cannot be used with a local repository").WithHint("remove --depth; a local repository is sent with its history")
	}
	src, err := gitsafe.FindCommit(ctx, path, f.req.Ref)
	if err != nil {
		return err
	}
	asked := f.req.Image
	p, err := project.Use(ctx, src, &f.req)
	if err == nil && f.cachesSetup() {
		err = project.UseSetup(ctx, a, src, p, &f.req)
	}
	if err != nil {
		return err
	}
	check.Image = f.req.Image
	check.Ref = src.Branch
	if err := c.ValidateJob(ctx, check); err != nil {
		return project.ImageError(err, asked != f.req.Image)
	}
	f.req.Ref = src.Shown(ctx, f.req.Ref)
	if a.place != nil {
		if err := a.place.sends(src); err != nil {
			return err
		}
	}
	f.req.BundleID, err = gitsafe.SendBundle(ctx, a, c, src)
	return err
}

// jobStatusError returns the exit code for a job's final status.
func jobStatusError(j api.Job) error {
	switch agentlab.JobStatus(j.Status) {
	case agentlab.JobCompleted:
		return nil
	case agentlab.JobTimeout:
		return work.ExitStatus(exitTimeout)
	default:
		return work.ExitStatus(exitFailure)
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
func (a *App) printOutcome(j api.Job) {
	took := ""
	if j.FinishedAt != nil {
		took = " after " + shortDuration(j.FinishedAt.Sub(j.CreatedAt))
	}
	why := ""
	if j.Reason != "" {
		why = ": " + agentlab.WithoutControls(j.Reason)
	}
	a.Progressf("job %s %s%s%s", j.ID, j.Status, took, why)
}

// summariseEnded is summarise for a job that has just ended. It also names the disk with
// its work, if that is kept for a while.
func (a *App) summariseEnded(ctx context.Context, c *client.Client, j api.Job) {
	a.summarise(j)
	if j.SandboxVMID == 0 || agentlab.JobStatus(j.Status) == agentlab.JobCompleted {
		return
	}
	if sb, err := c.Sandbox(ctx, fmt.Sprint(j.SandboxVMID)); err == nil && work.IsKept(sb) && sb.JobID == j.ID {
		a.Progressf("  the disk of its sandbox is kept until %s, with work that is not stored\n  → agentlab job salvage %s", work.LocalTime(sb.LeaseExpiresAt), j.ID)
	}
}

// summarise prints how a job ended and the commands for its results.
func (a *App) summarise(j api.Job) {
	a.printOutcome(j)
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
	a.noteCheckpoint(j)
	a.summariseDenials(j.ID, j.Egress)
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
