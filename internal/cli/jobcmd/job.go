package jobcmd

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/networkcmd"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

func jobCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "job", Short: "Manage jobs"}
	cmd.AddCommand(jobRunCmd(a), jobListCmd(a), jobShowCmd(a), jobWaitCmd(a), jobLogsCmd(a), jobCancelCmd(a),
		jobArtifactsCmd(a), jobFetchCmd(a), jobDiffCmd(a), jobApplyCmd(a), jobSalvageCmd(a), a.DoctorOf("job", (*client.Client).JobDoctor))
	return cmd
}

func jobListCmd(a *cli.App) *cobra.Command {
	q := client.JobQuery{Limit: 50}
	cmd := cli.Query(a, "list", "List jobs, newest first", cli.ExactArgs(), func(ctx context.Context, c *client.Client, _ []string) (api.List[api.Job], error) {
		return c.Jobs(ctx, q)
	}, func(jobs api.List[api.Job]) error {
		t := cli.NewTable(a.Stdout, "JOB", "STATUS", "PHASE", "AGENT", "SANDBOX", "ATTEMPT", "AGE", "TASK")
		for _, j := range jobs.Items {
			t.Row(j.ID, j.Status, cli.OrDash(j.Phase), j.Agent, cli.DashInt(j.SandboxVMID), attemptCell(j), a.Age(j.CreatedAt), cli.FirstLine(j.Task, 48))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		a.NoteMore(jobs.Next)
		return nil
	})
	cli.Choice(cmd.Flags(), &q.Status, "status", agentlab.JobStatuses, "only jobs with this status, e.g. RUNNING")
	cli.LimitFlag(cmd, &q.Limit)
	return cmd
}

// jobEvents is how many events the daemon shows with a job.
const jobEvents = 50

func jobShowCmd(a *cli.App) *cobra.Command {
	tail := jobEvents
	cmd := cli.Query(a, "show JOB", "Show a job with its last events and artifacts", cli.ExactArgs("JOB"), func(ctx context.Context, c *client.Client, args []string) (api.Job, error) {
		j, err := c.Job(ctx, args[0])
		j.Events = j.Events[max(0, len(j.Events)-tail):]
		return j, err
	}, func(j api.Job) error { return showJob(a, j) })
	cli.Between(cmd.Flags(), &tail, "events-tail", 0, jobEvents, "show at most this many of the last events; 'agentlab events --job JOB' shows all")
	return cmd
}

func showJob(a *cli.App, j api.Job) error {
	t := cli.NewTable(a.Stdout, "Job:", j.ID)
	t.Row("Status:", j.Status)
	t.Optional("Phase:", j.Phase)
	t.Optional("Reason:", j.Reason)
	t.Optional("Waiting:", j.Waiting)
	if j.ExitCode != nil {
		t.Row("Exit code:", *j.ExitCode)
	}
	t.Optional(relation(j))
	t.Optional("Pick:", cli.FirstLine(j.Pick, 200))
	if j.Attempt > 0 && j.Pick != "" {
		t.Row("Judge:", judged(j))
	}
	t.Row("Agent:", j.Agent)
	t.Row("Profile:", j.Profile)
	if j.Bundled {
		t.Row("Repository:", "local, sent as a bundle")
	}
	t.Optional("Repository:", j.RepoURL)
	t.Optional("Ref:", j.Ref)
	if base := j.Result.BaseCommit; base != "" {
		t.Row("Base commit:", fmt.Sprintf("%.12s", base))
	}
	if j.SandboxVMID != 0 {
		t.Row("Sandbox:", j.SandboxVMID)
	}
	t.Row("Created:", work.LocalTime(j.CreatedAt))
	if j.FinishedAt != nil {
		t.Row("Took:", cli.ShortDuration(j.FinishedAt.Sub(j.CreatedAt)))
	} else if j.DeadlineAt != nil {
		t.Row("Time left:", a.Until(*j.DeadlineAt))
	}
	if r := j.Result; r.HeadCommit != "" {
		t.Row("Commits:", fmt.Sprintf("%d on %s (%.12s)", r.Commits, r.Branch, r.HeadCommit))
		t.Row("Pushed:", cli.YesNo(r.Pushed))
		t.Row("Uncommitted changes:", uncommitted(j))
	}
	t.Optional("Checkpoint:", source.CheckpointTime(j))
	t.Row("Task:", cli.FirstLine(j.Task, 200))
	if err := t.Flush(); err != nil {
		return err
	}
	noteCheckpoint(a, j)
	if err := attemptTable(a, j); err != nil {
		return err
	}
	if len(j.Artifacts) > 0 {
		fmt.Fprintln(a.Stdout, "\nArtifacts:")
		if err := artifactTable(a, j.Artifacts); err != nil {
			return err
		}
	}
	if err := networkcmd.EgressSummary(a, j.Egress); err != nil {
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
func noteCheckpoint(a *cli.App, j api.Job) {
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

func artifactTable(a *cli.App, items []api.Artifact) error {
	t := cli.NewTable(a.Stdout, "PATH", "SIZE", "TYPE", "SHA256")
	for _, f := range items {
		t.Row(f.Path, work.ByteSize(f.Size), f.MIME, fmt.Sprintf("%.12s", f.SHA256))
	}
	return t.Flush()
}

func jobCancelCmd(a *cli.App) *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use: "cancel JOB", Short: "Cancel a job and keep its results", Args: cli.ExactArgs("JOB"),
		Long: `Cancel a job. Its agent is stopped, and its results are uploaded. A job that
has exceeded its time and is uploading its results ends at once with status
TIMEOUT. The sandbox of a job that has not started is destroyed, also with
--keepalive.`,
	}
	cli.WaitFlag(cmd, &wait, "wait until the job has ended")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.CancelJob(ctx, args[0])
		if err != nil {
			return err
		}
		if wait {
			if !agentlab.JobStatus(j.Status).Final() {
				a.Progressf("job %s: waiting until its agent has stopped and its results are uploaded", j.ID)
			}
			if j, err = waitJob(ctx, a, c, j.ID); err != nil {
				return err
			}
			WaitDestroyed(ctx, a, c, j)
		}
		return a.Done(j, "job %s is %s", j.ID, j.Status)
	})
	return cmd
}

// uncommitted describes the uncommitted changes of a job.
func uncommitted(j api.Job) string {
	text := cli.YesNo(j.Result.Dirty)
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
