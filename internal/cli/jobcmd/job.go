package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

func (a *App) jobCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "job", Short: "Manage jobs"}
	cmd.AddCommand(a.jobRunCmd(), a.jobListCmd(), a.jobShowCmd(), a.jobWaitCmd(), a.jobLogsCmd(), a.jobCancelCmd(),
		a.jobArtifactsCmd(), a.jobFetchCmd(), a.jobDiffCmd(), a.jobApplyCmd(), a.jobSalvageCmd(), a.doctorOf("job", (*client.Client).JobDoctor))
	return cmd
}

func (a *App) jobListCmd() *cobra.Command {
	q := client.JobQuery{Limit: 50}
	cmd := query(a, "list", "List jobs, newest first", exactArgs(), func(ctx context.Context, c *client.Client, _ []string) (api.List[api.Job], error) {
		return c.Jobs(ctx, q)
	}, func(jobs api.List[api.Job]) error {
		t := newTable(a.Stdout, "JOB", "STATUS", "PHASE", "AGENT", "SANDBOX", "ATTEMPT", "AGE", "TASK")
		for _, j := range jobs.Items {
			t.row(j.ID, j.Status, orDash(j.Phase), j.Agent, dashInt(j.SandboxVMID), attemptCell(j), a.age(j.CreatedAt), firstLine(j.Task, 48))
		}
		if err := t.flush(); err != nil {
			return err
		}
		a.noteMore(jobs.Next)
		return nil
	})
	choice(cmd.Flags(), &q.Status, "status", agentlab.JobStatuses, "only jobs with this status, e.g. RUNNING")
	limitFlag(cmd, &q.Limit)
	return cmd
}

// jobEvents is how many events the daemon shows with a job.
const jobEvents = 50

func (a *App) jobShowCmd() *cobra.Command {
	tail := jobEvents
	cmd := query(a, "show JOB", "Show a job with its last events and artifacts", exactArgs("JOB"), func(ctx context.Context, c *client.Client, args []string) (api.Job, error) {
		j, err := c.Job(ctx, args[0])
		j.Events = j.Events[max(0, len(j.Events)-tail):]
		return j, err
	}, a.showJob)
	between(cmd.Flags(), &tail, "events-tail", 0, jobEvents, "show at most this many of the last events; 'agentlab events --job JOB' shows all")
	return cmd
}

func (a *App) showJob(j api.Job) error {
	t := newTable(a.Stdout, "Job:", j.ID)
	t.row("Status:", j.Status)
	t.optional("Phase:", j.Phase)
	t.optional("Reason:", j.Reason)
	t.optional("Waiting:", j.Waiting)
	if j.ExitCode != nil {
		t.row("Exit code:", *j.ExitCode)
	}
	t.optional(relation(j))
	t.optional("Pick:", firstLine(j.Pick, 200))
	if j.Attempt > 0 && j.Pick != "" {
		t.row("Judge:", judged(j))
	}
	t.row("Agent:", j.Agent)
	t.row("Profile:", j.Profile)
	if j.Bundled {
		t.row("Repository:", "local, sent as a bundle")
	}
	t.optional("Repository:", j.RepoURL)
	t.optional("Ref:", j.Ref)
	if base := j.Result.BaseCommit; base != "" {
		t.row("Base commit:", fmt.Sprintf("%.12s", base))
	}
	if j.SandboxVMID != 0 {
		t.row("Sandbox:", j.SandboxVMID)
	}
	t.row("Created:", work.LocalTime(j.CreatedAt))
	if j.FinishedAt != nil {
		t.row("Took:", shortDuration(j.FinishedAt.Sub(j.CreatedAt)))
	} else if j.DeadlineAt != nil {
		t.row("Time left:", a.until(*j.DeadlineAt))
	}
	if r := j.Result; r.HeadCommit != "" {
		t.row("Commits:", fmt.Sprintf("%d on %s (%.12s)", r.Commits, r.Branch, r.HeadCommit))
		t.row("Pushed:", yesNo(r.Pushed))
		t.row("Uncommitted changes:", uncommitted(j))
	}
	t.optional("Checkpoint:", source.CheckpointTime(j))
	t.row("Task:", firstLine(j.Task, 200))
	if err := t.flush(); err != nil {
		return err
	}
	a.noteCheckpoint(j)
	if err := a.attemptTable(j); err != nil {
		return err
	}
	if len(j.Artifacts) > 0 {
		fmt.Fprintln(a.Stdout, "\nArtifacts:")
		if err := a.artifactTable(j.Artifacts); err != nil {
			return err
		}
	}
	if err := a.egressSummary(j.Egress); err != nil {
		return err
	}
	if len(j.Events) > 0 {
		fmt.Fprintln(a.Stdout, "\nLast events:")
		for _, e := range j.Events {
			fmt.Fprintf(a.Stdout, "  %s  %s\n", work.LocalTime(e.Time), agentlab.WithoutControls(e.Message))
		}
	}
	return nil
}

// noteCheckpoint names the commands for the work of a job that ended without a result,
// if there is a checkpoint.
func (a *App) noteCheckpoint(j api.Job) {
	taken := source.CheckpointTime(j)
	if taken == "" || !agentlab.JobStatus(j.Status).Final() {
		return
	}
	a.Progressf("  the checkpoint of %s has its work\n  → agentlab job fetch %s\n  → agentlab job diff %s", taken, j.ID, j.ID)
}

// relation returns what a job does for another one, with a label.
func relation(j api.Job) (label, of string) {
	switch {
	case j.Attempt > 0:
		return "Attempt:", fmt.Sprintf("%d of %s", j.Attempt, j.ParentID)
	case j.Salvages != "":
		return "Salvages:", j.Salvages
	}
	return "Prepares:", j.ParentID
}

func (a *App) artifactTable(items []api.Artifact) error {
	t := newTable(a.Stdout, "PATH", "SIZE", "TYPE", "SHA256")
	for _, f := range items {
		t.row(f.Path, work.ByteSize(f.Size), f.MIME, fmt.Sprintf("%.12s", f.SHA256))
	}
	return t.flush()
}

func (a *App) jobCancelCmd() *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use: "cancel JOB", Short: "Cancel a job and keep its results", Args: exactArgs("JOB"),
		Long: `Cancel a job. Its agent is stopped, and its results are uploaded. A job that
has exceeded its time and is uploading its results ends at once with status
TIMEOUT. The sandbox of a job that has not started is destroyed, also with
--keepalive.`,
	}
	waitFlag(cmd, &wait, "wait until the job has ended")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.CancelJob(ctx, args[0])
		if err != nil {
			return err
		}
		if wait {
			if !agentlab.JobStatus(j.Status).Final() {
				a.Progressf("job %s: waiting until its agent has stopped and its results are uploaded", j.ID)
			}
			if j, err = a.waitJob(ctx, c, j.ID); err != nil {
				return err
			}
			a.waitDestroyed(ctx, c, j)
		}
		return a.done(j, "job %s is %s", j.ID, j.Status)
	})
	return cmd
}

// uncommitted describes the uncommitted changes of a job.
func uncommitted(j api.Job) string {
	text := yesNo(j.Result.Dirty)
	if n := j.Result.Uncommitted; n > 0 {
		text = agentlab.Plural(n, "file")
	}
	names := source.ModuleDiffs(j)
	switch {
	case len(names) == 0:
		return text
	case text == "no":
		return "inside submodules: " + work.JoinNames(names)
	}
	return text + ", and inside submodules: " + work.JoinNames(names)
}
