package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) jobCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "job", Short: "Run jobs and look at what they made"}
	cmd.AddCommand(a.jobRunCmd(), a.jobListCmd(), a.jobShowCmd(), a.jobLogsCmd(), a.jobCancelCmd(),
		a.jobArtifactsCmd(), a.jobFetchCmd(), a.jobDiffCmd(), a.jobApplyCmd())
	return cmd
}

func (a *App) jobListCmd() *cobra.Command {
	var status string
	var limit int
	cmd := &cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List jobs, newest first", Args: exactArgs()}
	choice(cmd.Flags(), &status, "status", agentlab.JobStatuses, "only jobs with this status, e.g. RUNNING")
	cmd.Flags().IntVar(&limit, "limit", 50, "at most this many")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, _ []string) error {
		jobs, err := c.Jobs(ctx, client.JobQuery{Status: status, Limit: limit})
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(jobs)
		}
		t := newTable(a.Stdout, "JOB", "STATUS", "PHASE", "AGENT", "SANDBOX", "AGE", "TASK")
		for _, j := range jobs.Items {
			t.row(j.ID, j.Status, dash(j.Phase), j.Agent, dashInt(j.SandboxVMID), a.age(j.CreatedAt), firstLine(j.Task, 48))
		}
		return t.flush()
	})
	return cmd
}

func (a *App) jobShowCmd() *cobra.Command {
	return &cobra.Command{
		Use: "show JOB", Short: "Show a job with its last events and artifacts", Args: exactArgs("JOB"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			j, err := c.Job(ctx, args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(j)
			}
			return a.showJob(j)
		}),
	}
}

func (a *App) showJob(j api.Job) error {
	t := newTable(a.Stdout, "Job:", j.ID)
	t.row("Status:", j.Status)
	optional := func(label, value string) {
		if value != "" {
			t.row(label, value)
		}
	}
	optional("Phase:", j.Phase)
	optional("Reason:", j.Reason)
	optional("Waiting:", j.Waiting)
	if j.ExitCode != nil {
		t.row("Exit code:", *j.ExitCode)
	}
	t.row("Agent:", j.Agent)
	t.row("Profile:", j.Profile)
	if j.Bundled {
		t.row("Repository:", "local, sent as a bundle")
	}
	optional("Repository:", j.RepoURL)
	optional("Ref:", j.Ref)
	if base := j.Result.BaseCommit; base != "" {
		t.row("Base commit:", fmt.Sprintf("%.12s", base))
	}
	if j.SandboxVMID != 0 {
		t.row("Sandbox:", j.SandboxVMID)
	}
	t.row("Created:", localTime(j.CreatedAt))
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
	t.row("Task:", firstLine(j.Task, 200))
	if err := t.flush(); err != nil {
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
			fmt.Fprintf(a.Stdout, "  %s  %s\n", localTime(e.Time), plain(e.Message))
		}
	}
	return nil
}

func (a *App) artifactTable(items []api.Artifact) error {
	t := newTable(a.Stdout, "PATH", "SIZE", "TYPE", "SHA256")
	for _, f := range items {
		t.row(f.Path, byteSize(f.Size), f.MIME, fmt.Sprintf("%.12s", f.SHA256))
	}
	return t.flush()
}

func (a *App) jobCancelCmd() *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use: "cancel JOB", Short: "Stop a job; what it made so far is kept", Args: exactArgs("JOB"),
		Long: `Stop a job. Its agent is ended, and its results are uploaded first. A job
whose time is over already, and that only uploads, ends at once as TIMEOUT.`,
	}
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until it has ended")
	noWait(cmd, &wait)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.CancelJob(ctx, args[0])
		if err != nil {
			return err
		}
		if wait {
			if !agentlab.JobStatus(j.Status).Final() {
				a.progressf("job %s: waiting until its agent has stopped and its results are uploaded", j.ID)
			}
			if j, err = a.waitJob(ctx, c, j.ID); err != nil {
				return err
			}
			a.awaitGone(ctx, c, j)
		}
		if a.json {
			return a.printJSON(j)
		}
		a.progressf("job %s is %s", j.ID, j.Status)
		return nil
	})
	return cmd
}

// noWait adds --no-wait as the opposite of the --wait that sets p.
func noWait(cmd *cobra.Command, p *bool) {
	cmd.Flags().BoolFunc("no-wait", "return at once", func(string) error { *p = false; return nil })
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func dashInt(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// uncommitted says what the agent left uncommitted.
func uncommitted(j api.Job) string {
	text := yesNo(j.Result.Dirty)
	if n := j.Result.Uncommitted; n > 0 {
		text = fmt.Sprintf("%d file(s)", n)
	}
	names := moduleDiffs(j)
	switch {
	case len(names) == 0:
		return text
	case text == "no":
		return "inside submodules: " + someNames(names)
	}
	return text + ", and inside submodules: " + someNames(names)
}

func firstLine(s string, most int) string {
	s, _, more := strings.Cut(strings.TrimSpace(s), "\n")
	if r := []rune(s); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	if more {
		return s + " …"
	}
	return s
}

func localTime(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05") }
