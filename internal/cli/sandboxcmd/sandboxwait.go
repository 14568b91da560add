package sandboxcmd

import (
	"context"
	"errors"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

// finishSandbox waits for a requested change and prints the outcome.
func finishSandbox(ctx context.Context, a *cli.App, c *client.Client, r work.ChangeRequest, wait bool, done func(api.Sandbox) bool) error {
	sb, err := r.Sb, r.Err
	if err == nil && wait && !done(sb) {
		sb, err = work.WaitSandbox(ctx, a, c, sb, r.After, done)
	}
	if err != nil {
		return err
	}
	return a.Done(sb, "sandbox %s (%d) is %s", sb.Name, sb.VMID, sb.State)
}

// destroySandboxes requests the destruction of all named sandboxes, then waits
// for each and prints its outcome. It continues after errors.
func destroySandboxes(ctx context.Context, a *cli.App, c *client.Client, names []string, wait, force, purge bool) error {
	requests := make([]work.ChangeRequest, len(names))
	call, done := c.DestroySandbox, func(sb api.Sandbox) bool { return work.IsDestroyed(sb) || work.IsKept(sb) }
	if purge {
		call, done = c.PurgeSandbox, work.IsDestroyed
	}
	for i, name := range names {
		if purge {
			nameUnshipped(ctx, a, c, name)
		}
		requests[i] = work.RequestChange(ctx, c, name, wait, call)
	}
	var failed error
	for i, r := range requests {
		if force && agentlab.CodeOf(r.Err) == agentlab.CodeNotFound {
			if err := a.Emit(map[string]any{"name": names[i], "exists": false}, cli.Silent); err != nil {
				return err
			}
			continue
		}
		err := finishSandbox(ctx, a, c, r, wait, done)
		if sb := r.Sb; err == nil && sb.Salvage && !purge {
			a.Progressf("sandbox %s (%d) is kept until %s: its job has work that is not stored\n  → agentlab job salvage %s\n  → agentlab sandbox destroy --purge %[2]d",
				sb.Name, sb.VMID, work.LocalTime(sb.LeaseExpiresAt), sb.JobID)
		}
		switch {
		case err == nil:
		case ctx.Err() != nil:
			for _, r := range requests[i:] {
				if r.Err == nil {
					a.Progressf("sandbox %s (%d) is still being destroyed\n  → agentlab sandbox show %d", r.Sb.Name, r.Sb.VMID, r.Sb.VMID)
				}
			}
			return err
		case len(names) == 1:
			return err
		default:
			a.PrintError(err)
			failed = errors.Join(failed, work.ExitStatus(cli.ExitFailure))
		}
	}
	return failed
}

// nameUnshipped prints which work of the job in a sandbox is not stored, before the
// sandbox is destroyed with it. What cannot be read is not printed.
func nameUnshipped(ctx context.Context, a *cli.App, c *client.Client, sandbox string) {
	sb, err := c.Sandbox(ctx, sandbox)
	if err != nil || sb.JobID == "" || work.IsDestroyed(sb) {
		return
	}
	j, err := c.Job(ctx, sb.JobID)
	if err != nil {
		return
	}
	for _, e := range j.Events {
		if e.Kind == agentlab.EventJobUnshipped {
			a.Progressf("note: %s", agentlab.WithoutControls(e.Message))
		}
	}
	if j.FinishedAt != nil || j.StartedAt == nil {
		return
	}
	stored := "and has no checkpoint"
	if at := source.CheckpointTime(j); at != "" {
		stored = "and has a checkpoint of " + at
	}
	a.Progressf("note: job %s is %s %s; other work on the disk of sandbox %s is deleted", j.ID, j.Status, stored, sb.Name)
}
