package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

type jobRunFlags struct {
	repo, taskFile string
	ttl            time.Duration
	wait           bool
	keepalive      bool
	req            api.JobCreate
}

func (a *App) jobRunCmd() *cobra.Command {
	f := &jobRunFlags{wait: true}
	cmd := &cobra.Command{
		Use:   "run [--repo URL|PATH] --task TEXT",
		Short: "Run a coding agent on a repository in a fresh sandbox",
		Long: `Run a coding agent on a repository in a fresh sandbox, to its end, and keep
what it made.

The repository is a URL, which the sandbox clones through the network, or a
local path, which is sent as a git bundle: nothing of this machine is mounted,
and uncommitted changes are not sent. Submodules that are checked out are sent,
others and the content of Git LFS files are named. Fetch the commits of a local
job back with 'agentlab job fetch JOB'.

By default the command waits, shows progress and the agent's log, and exits
with 0 COMPLETED, 1 FAILED or CANCELLED, 124 TIMEOUT. An interrupt (Ctrl-C)
leaves the job running; 'agentlab job cancel JOB' stops it.`,
		Example: `  agentlab job run --repo https://github.com/org/repo --ref main --task "Fix issue 12"
  agentlab job run --repo . --agent codex --task-file TASK.md --ttl 2h
  agentlab job run --repo . --agent shell --task "make test"`,
		Args: exactArgs(),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.repo, "repo", "", "URL to clone, or path of a local repository; without it the agent starts in an empty folder")
	flags.StringVar(&f.req.Ref, "ref", "", "branch, tag or commit; of a local repository any revision, such as HEAD~2 (default: the repository's default, or what is checked out)")
	flags.IntVar(&f.req.Depth, "depth", 0, "clone only this many commits of history (URLs only; 0 means all)")
	flags.StringVar(&f.req.Task, "task", "", "what the agent is told; for --agent shell, the script")
	flags.StringVar(&f.taskFile, "task-file", "", "read the task from this file (- is standard input)")
	flags.StringVar(&f.req.Agent, "agent", "", "claude, codex, opencode, gemini or shell")
	flags.StringVar(&f.req.Profile, "profile", "", "profile (see 'agentlab profile list')")
	flags.StringVar(&f.req.Image, "image", "", "image instead of the profile's")
	flags.StringVar(&f.req.Mode, "mode", "", "dangerous, the default and only mode: the agent may do everything inside its sandbox")
	flags.Var(ttlFlag{&f.ttl}, "ttl", "time the agent may take, e.g. 30m, 4h (default: the profile's)")
	flags.BoolVar(&f.keepalive, "keepalive", false, "keep the sandbox after the job")
	workspaceFlag(flags, &f.req.Workspace)
	preflightFlag(flags, &f.req.NoPreflight)
	flags.BoolVar(&f.wait, "wait", true, "wait for the end, with progress and log")
	noWait(cmd, &f.wait)
	cmd.MarkFlagsMutuallyExclusive("task", "task-file")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := a.completeRun(f, cmd); err != nil {
			return err
		}
		c, err := a.connect(cmd.Context())
		if err != nil {
			return err
		}
		return a.jobRun(cmd.Context(), c, f)
	}
	return cmd
}

// completeRun checks what can be checked without the daemon, so that a slip
// costs no start.
func (a *App) completeRun(f *jobRunFlags, cmd *cobra.Command) error {
	if f.taskFile != "" {
		text, err := a.readLimited(f.taskFile, agentlab.MaxTaskBytes)
		if err != nil {
			return err
		}
		f.req.Task = text
	}
	if cmd.Flags().Changed("keepalive") {
		f.req.Keepalive = &f.keepalive
	}
	f.req.TTLMinutes = int(f.ttl / time.Minute)
	check := agentlab.Job{Task: f.req.Task, Agent: f.req.Agent, Mode: f.req.Mode, Ref: f.req.Ref, Depth: f.req.Depth}
	if _, local, err := localRepo(f.repo); err == nil && local && f.repo != "" {
		check.Ref = "" // git on this machine knows what it stands for
	}
	if check.Agent == "" {
		check.Agent = "shell" // the daemon knows the default
	}
	if check.Mode == "" {
		check.Mode = "dangerous"
	}
	if err := check.Validate(); err != nil {
		return usage(err)
	}
	if check.Agent == agentlab.AgentNone {
		return usageErrorf("a job without an agent needs a sandbox to work in").WithHint("agentlab sandbox new --repo URL|PATH")
	}
	return nil
}

// usage turns a validation error into one with exit code 2.
func usage(err error) error {
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		return usageError{e}
	}
	return err
}

func (a *App) readLimited(path string, limit int64) (string, error) {
	in := a.Stdin
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return "", agentlab.Errorf(agentlab.CodeInvalid, "cannot read the file: %w", err)
		}
		defer func() { _ = file.Close() }()
		in = file
	}
	text, err := io.ReadAll(io.LimitReader(in, limit+1))
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "cannot read %s: %w", path, err)
	}
	return string(text), nil
}

func (a *App) jobRun(ctx context.Context, c *client.Client, f *jobRunFlags) error {
	if f.repo != "" {
		if err := a.chooseRepo(ctx, c, f, f.req); err != nil {
			return err
		}
	}
	j, err := c.CreateJob(ctx, f.req)
	if err != nil {
		a.dropBundle(ctx, c, f.req.BundleID)
		return err
	}
	if !f.wait {
		if a.json {
			return a.printJSON(j)
		}
		_, err := fmt.Fprintln(a.Stdout, j.ID)
		return err
	}
	a.progressf("job %s", j.ID)
	out := a.Stdout
	if a.json {
		out = a.Stderr
	}
	j, err = a.watchJob(ctx, c, j.ID, out, a.showEvent, func(err error) {
		a.progressf("%v\n  → %s", err, agentlab.HintOf(err))
	})
	if err != nil {
		if ctx.Err() != nil {
			a.progressf("\njob %s goes on in the background\n  → agentlab job logs --follow %s\n  → agentlab job cancel %s", j.ID, j.ID, j.ID)
			return context.Canceled
		}
		return err
	}
	a.awaitGone(ctx, c, j)
	if a.json {
		if err := a.printJSON(j); err != nil {
			return err
		}
	} else {
		a.summarise(j)
	}
	return jobStatusError(j)
}

// goneLimit is how long an ended job's sandbox may take to vanish before the
// command says so instead of waiting on.
const goneLimit = 30 * time.Second

// awaitGone waits until nothing is left of the job's sandbox, so that a
// command that has returned leaves nothing behind, or until a sandbox that is
// kept is not the job's any more. The job's end is not changed by how that
// goes.
func (a *App) awaitGone(ctx context.Context, c *client.Client, j api.Job) {
	ctx, cancel := context.WithTimeout(ctx, goneLimit)
	defer cancel()
	number := j.SandboxVMID
	if number == 0 { // the sandbox knows of its job before the job of its sandbox
		list, err := c.Sandboxes(ctx, client.SandboxQuery{})
		i := slices.IndexFunc(list.Items, func(sb api.Sandbox) bool { return sb.JobID == j.ID })
		if err != nil || i < 0 {
			return
		}
		number = list.Items[i].VMID
	}
	vmid := fmt.Sprint(number)
	for _, err := range c.FollowEvents(ctx, client.EventQuery{Sandbox: vmid, Kind: agentlab.EventSandboxState}) {
		if err != nil {
			break
		}
		sb, err := c.Sandbox(ctx, vmid)
		released := sb.State == string(agentlab.SandboxDestroyed) || sb.Keepalive && sb.State != string(agentlab.SandboxRunning)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound || err == nil && released {
			return
		}
	}
	if j.Keepalive {
		return
	}
	a.progressf("note: sandbox %s of the job is still being removed\n  → agentlab sandbox show %s", vmid, vmid)
}

// chooseRepo fills the repository into a request, and uploads it when it is a
// local one. Before that the daemon is asked whether it would accept check.
func (a *App) chooseRepo(ctx context.Context, c *client.Client, f *jobRunFlags, check api.JobCreate) error {
	path, local, err := localRepo(f.repo)
	if err != nil {
		return err
	}
	if !local {
		if err := agentlab.ValidateRepoURL(f.repo); err != nil {
			return usage(err)
		}
		f.req.RepoURL = f.repo
		return nil
	}
	if f.req.Depth != 0 {
		return usageErrorf("--depth does not go with a local repository").WithHint("leave --depth out; a local repository is sent with its history")
	}
	src, err := findSource(ctx, path, f.req.Ref)
	if err != nil {
		return err
	}
	check.Ref = src.branch
	if err := c.ValidateJob(ctx, check); err != nil {
		return err
	}
	f.req.Ref = src.shown(ctx, f.req.Ref)
	f.req.BundleID, err = a.sendBundle(ctx, c, src)
	return err
}

// jobStatusError maps a job's final status to the exit code.
func jobStatusError(j api.Job) error {
	switch agentlab.JobStatus(j.Status) {
	case agentlab.JobCompleted:
		return nil
	case agentlab.JobTimeout:
		return statusError(exitTimeout)
	default:
		return statusError(exitFailure)
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

// summarise tells how the job ended and what to do with it.
func (a *App) summarise(j api.Job) {
	took := ""
	if j.FinishedAt != nil {
		took = " after " + shortDuration(j.FinishedAt.Sub(j.CreatedAt))
	}
	why := ""
	if j.Reason != "" {
		why = ": " + plain(j.Reason)
	}
	a.progressf("job %s %s%s%s", j.ID, j.Status, took, why)
	if j.Result.Commits > 0 {
		a.progressf("  %d commit(s) on %s", j.Result.Commits, plain(j.Result.Branch))
		if j.Bundled {
			a.progressf("  → agentlab job fetch %s", j.ID)
		}
	}
	a.summariseDenials(j.ID, j.Egress)
	if n := j.Result.Uncommitted; n > 0 {
		a.progressf("  %d file(s) with uncommitted changes\n  → agentlab job diff %s", n, j.ID)
		if j.Bundled {
			a.progressf("  → agentlab job apply %s", j.ID)
		}
	}
	if len(j.Artifacts) > 0 {
		a.progressf("  %d artifact(s)\n  → agentlab job artifacts %s", len(j.Artifacts), j.ID)
	}
	if j.Keepalive && j.SandboxVMID != 0 {
		a.progressf("  the sandbox is kept\n  → agentlab ssh %d", j.SandboxVMID)
	}
}
