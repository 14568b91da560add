package jobcmd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// attemptFlags adds the flags for a job with several attempts.
func attemptFlags(flags *pflag.FlagSet, f *RunFlags) {
	cli.Between(flags, &f.attempts.Count, "attempts", 2, agentlab.MaxAttempts, fmt.Sprintf("run this many attempts, 2 to %d, and keep the result of one", agentlab.MaxAttempts))
	flags.StringVar(&f.attempts.Pick, "pick", "", "shell command that judges each attempt in its checkout: exit code 0 and the highest number on its last line win (default: the first attempt that completes)")
	flags.StringSliceVar(&f.attempts.Agents, "attempt-agent", nil, "agents of the attempts, in turn, e.g. claude,codex")
	flags.StringArrayVar(&f.attemptTasks, "attempt-task-file", nil, "read the task of an attempt from this file; repeat it for other tasks, which the attempts get in turn")
}

// prepareAttempts completes the request for attempts.
func prepareAttempts(a *cli.App, f *RunFlags) error {
	for _, name := range f.attemptTasks {
		text, err := a.ReadInput(name, agentlab.MaxTaskBytes)
		if err != nil {
			return work.UsageErrorf("--attempt-task-file: %v", err)
		}
		f.attempts.Tasks = append(f.attempts.Tasks, text)
	}
	r := f.attempts
	if r.Count == 0 {
		if r.Pick != "" || len(r.Agents) > 0 || len(r.Tasks) > 0 {
			return work.UsageErrorf("--pick, --attempt-agent and --attempt-task-file require --attempts").WithHint("add --attempts N, from 2 to %d", agentlab.MaxAttempts)
		}
		return nil
	}
	if f.keepalive {
		return work.UsageErrorf("--keepalive cannot be used with --attempts: the sandboxes of attempts are not kept")
	}
	switch {
	case len(r.Agents) > r.Count:
		return work.UsageErrorf("--attempt-agent names %d agents for %d attempts", len(r.Agents), r.Count).WithHint("name at most one for each attempt")
	case len(r.Tasks) > r.Count:
		return work.UsageErrorf("--attempt-task-file is given %d times for %d attempts", len(r.Tasks), r.Count).WithHint("give at most one for each attempt")
	}
	if err := (&agentlab.JobAttempts{Count: r.Count, Pick: r.Pick, Agents: r.Agents, Tasks: r.Tasks}).Validate(); err != nil {
		return work.Usage(err)
	}
	f.Req.Attempts = &r
	return nil
}

// attemptsOf returns the jobs of the attempts at j; j itself if it has none.
func attemptsOf(j agentlab.Job, r *api.JobAttempts) []agentlab.Job {
	if r == nil {
		return []agentlab.Job{j}
	}
	return (&agentlab.JobAttempts{Count: r.Count, Agents: r.Agents, Tasks: r.Tasks}).Split(j)
}

// watchAttempts shows the events of a job with several attempts until it has
// ended: its own, those of the job that prepares a sandbox for them, and of each
// attempt how far it is. The logs of the attempts are not mixed.
func watchAttempts(ctx context.Context, a *cli.App, c *client.Client, id string) (api.Job, error) {
	a.Progressf("  → %s", logsOfAttempt(id))
	attempts, last := map[string]bool{}, ""
	j, err := FollowJob(ctx, a, c, client.EventQuery{JobID: id, Attempts: true}, func(e api.Event) {
		if e.Kind == agentlab.EventJobCreated && e.Data["attempt"] != nil {
			attempts[e.JobID] = true
		}
		wanted := !attempts[e.JobID] || slices.Contains([]string{agentlab.EventJobCreated, agentlab.EventJobStatus, agentlab.EventJobPhase, agentlab.EventImageBuild}, e.Kind)
		if wanted && e.Message != last { // all attempts can wait for one image
			last = e.Message
			a.ShowEvent(e)
		}
	})
	j.ID = id
	return j, err
}

// logsOfAttempt is the command that follows an attempt of a job.
func logsOfAttempt(id string) string {
	return "agentlab job logs --follow --attempt 1 " + id
}

// attemptID returns the ID of the numbered attempt of a job, or of the job if
// the number is 0.
func attemptID(ctx context.Context, c *client.Client, job string, number int) (string, error) {
	if number == 0 {
		return job, nil
	}
	j, err := c.Job(ctx, job)
	if err != nil {
		return "", err
	}
	for _, t := range j.Attempts {
		if t.Attempt == number {
			return t.ID, nil
		}
	}
	return "", agentlab.Errorf(agentlab.CodeNotFound, "job %s has no attempt %d", j.ID, number).WithHint("see 'agentlab job show %s'", j.ID)
}

// attemptCell describes a job in a list: the number of its attempts, which
// attempt it is, which job it salvages, or that it prepares the sandbox of attempts.
func attemptCell(j api.Job) string {
	switch {
	case j.AttemptCount > 0:
		return fmt.Sprintf("%d attempts", j.AttemptCount)
	case j.Attempt > 0:
		return fmt.Sprintf("%d of %s", j.Attempt, j.ParentID)
	case j.Salvages != "":
		return "salvages " + j.Salvages
	case j.ParentID != "":
		return "prepares " + j.ParentID
	}
	return "-"
}

// judged describes the result of the judge of an attempt.
func judged(j api.Job) string {
	var out []string
	if code := j.Result.JudgeExit; code != nil {
		out = append(out, fmt.Sprintf("exit %d", *code))
	}
	if n := j.Result.Score; n != nil {
		out = append(out, fmt.Sprintf("number %g", *n))
	}
	return cli.OrDash(strings.Join(out, ", "))
}

// attemptTable prints the attempts of a job.
func attemptTable(a *cli.App, j api.Job) error {
	if len(j.Attempts) == 0 {
		return nil
	}
	fmt.Fprintln(a.Stdout, "\nAttempts:")
	t := cli.NewTable(a.Stdout, "ATTEMPT", "JOB", "STATUS", "PHASE", "AGENT", "JUDGE", "COMMITS", "REASON")
	for _, at := range j.Attempts {
		number := fmt.Sprint(at.Attempt)
		if at.Attempt == j.Winner {
			number += " (won)"
		}
		t.Row(number, at.ID, at.Status, cli.OrDash(at.Phase), at.Agent, judged(at), at.Result.Commits, cli.OrDash(cli.FirstLine(cmp.Or(at.Reason, at.Waiting), 60)))
	}
	return t.Flush()
}
