package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// sandbox collects a sandbox and the job that it was created for.
func (b *collector) sandbox(ctx context.Context, id string) error {
	vmid, err := strconv.Atoi(id)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not a VMID", id)
	}
	sb, err := b.cfg.Rows.Sandbox(ctx, vmid)
	if err != nil {
		return err
	}
	b.aboutSandbox(ctx, "sandbox/", sb)
	if sb.JobID == "" {
		return nil
	}
	j, err := b.cfg.Rows.Job(ctx, sb.JobID)
	if err != nil {
		b.archive.fail("job/job.json", err)
		return nil
	}
	b.aboutJob(ctx, "job/", j)
	return nil
}

// job collects a job, its sandbox, and its attempts with theirs.
func (b *collector) job(ctx context.Context, id string) error {
	j, err := b.cfg.Rows.Job(ctx, id)
	if err != nil {
		return err
	}
	b.aboutJob(ctx, "job/", j)
	b.sandboxOf(ctx, "sandbox/", j)
	if j.Attempts == 0 {
		return nil
	}
	attempts, err := b.cfg.Rows.Jobs(ctx, agentlab.JobFilter{ParentID: j.ID})
	b.archive.fail("attempts", err)
	slices.SortFunc(attempts, func(x, y agentlab.Job) int { return cmp.Or(x.Attempt-y.Attempt, cmp.Compare(x.ID, y.ID)) })
	for _, a := range attempts {
		dir := fmt.Sprintf("attempts/%d/", a.Attempt) // 0 is the job that prepares their sandbox
		b.aboutJob(ctx, dir+"job/", a)
		b.sandboxOf(ctx, dir+"sandbox/", a)
	}
	return nil
}

// sandboxOf collects the sandbox of a job. Another sandbox may have its number
// since.
func (b *collector) sandboxOf(ctx context.Context, dir string, j agentlab.Job) {
	if j.SandboxVMID == 0 {
		return
	}
	sb, err := b.cfg.Rows.Sandbox(ctx, j.SandboxVMID)
	if err == nil && sb.JobID != j.ID {
		err = agentlab.Errorf(agentlab.CodeNotFound, "the sandbox of %s no longer has a row", j.ID)
	}
	if err != nil {
		b.archive.fail(dir+"sandbox.json", err)
		return
	}
	b.aboutSandbox(ctx, dir, sb)
}

func (b *collector) aboutJob(ctx context.Context, dir string, j agentlab.Job) {
	a := b.archive
	a.doc(dir+"job.json", j)
	events, err := b.cfg.Rows.Events(ctx, agentlab.EventFilter{JobIDs: []string{j.ID}, Limit: maxRows + 1, Tail: true})
	addRows(a, dir+"events.jsonl", newestRows, eventLines(events), err)
	denied, err := b.cfg.Egress.List(ctx, agentlab.EgressFilter{JobID: j.ID, Denied: true, Limit: maxRows + 1, Tail: true})
	addRows(a, dir+"egress-denials.jsonl", newestRows, denied, err)
	artifacts, err := b.cfg.Rows.Artifacts(ctx, j.ID)
	checkpoint := slices.DeleteFunc(slices.Clone(artifacts), func(f agentlab.Artifact) bool { return !agentlab.IsCheckpoint(f.Path) })
	addRows(a, dir+"artifacts.jsonl", firstRows, artifacts, err)
	addRows(a, dir+"checkpoint.jsonl", firstRows, checkpoint, err)
	b.try(ctx, dir+agentlab.ArtifactLog, func(ctx context.Context) error { return b.agentLog(ctx, dir+agentlab.ArtifactLog, j.ID) })
}

func (b *collector) agentLog(ctx context.Context, name, jobID string) error {
	size, err := b.cfg.Logs.LogSize(ctx, jobID)
	if err != nil {
		return err
	}
	skip := max(size-maxTail-tailMargin, 0)
	r, err := b.cfg.Logs.Log(ctx, jobID, skip, false)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	return b.archive.tail(name, skip, io.LimitReader(r, size-skip)) // a runner may write faster than this reads
}

func (b *collector) aboutSandbox(ctx context.Context, dir string, sb agentlab.Sandbox) {
	a := b.archive
	a.doc(dir+"sandbox.json", sb)
	events, err := b.cfg.Rows.Events(ctx, agentlab.EventFilter{SandboxVMID: sb.VMID, Limit: maxRows + 1, Tail: true})
	addRows(a, dir+"events.jsonl", newestRows, eventLines(events), err)
	denied, err := b.cfg.Egress.List(ctx, agentlab.EgressFilter{VMID: sb.VMID, UID: sb.UID, Denied: true, Limit: maxRows + 1, Tail: true})
	addRows(a, dir+"egress-denials.jsonl", newestRows, denied, err)
	snapshots, err := b.cfg.Rows.Snapshots(ctx, agentlab.SnapshotFilter{SandboxUID: sb.UID})
	addRows(a, dir+"snapshots.jsonl", newestRows, snapshots, err)
	if sb.State == agentlab.SandboxDestroyed {
		return
	}
	ref := backend.RefOf(sb)
	b.try(ctx, dir+"instance.json", func(ctx context.Context) error {
		in, err := b.cfg.Fleet.Of(sb.Backend).Inspect(ctx, ref)
		if err == nil {
			a.doc(dir+"instance.json", in)
		}
		return err
	})
	b.try(ctx, dir+"console.log", func(ctx context.Context) error { return b.console(ctx, dir+"console.log", sb) })
}

func (b *collector) console(ctx context.Context, name string, sb agentlab.Sandbox) error {
	on := b.cfg.Fleet.Of(sb.Backend)
	if on.Console == nil {
		return agentlab.Errorf(agentlab.CodeUnsupported, "the backend does not store the console: %s", on.Info().ConsoleHint)
	}
	r, err := on.Console.ConsoleLog(ctx, backend.RefOf(sb), false)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	return b.archive.tail(name, 0, io.LimitReader(r, maxConsole)) // a guest may write faster than this reads
}

// installation collects what concerns all sandboxes.
func (b *collector) installation(ctx context.Context) error {
	a := b.archive
	a.doc("config.json", b.cfg.Settings)
	checks, err := b.cfg.Checks(ctx)
	addRows(a, "checks.jsonl", firstRows, checks.Checks, err)
	sandboxes, err := b.cfg.Rows.Sandboxes(ctx, agentlab.SandboxFilter{Limit: maxRows + 1})
	addRows(a, "sandboxes.jsonl", firstRows, sandboxes, err)
	jobs, err := b.cfg.Rows.Jobs(ctx, agentlab.JobFilter{Limit: maxRows + 1})
	slices.Reverse(jobs)
	addRows(a, "jobs.jsonl", newestRows, jobs, err)
	b.counts(ctx)
	events, err := b.cfg.Rows.Events(ctx, agentlab.EventFilter{Limit: maxRows + 1, Tail: true})
	addRows(a, "events.jsonl", newestRows, eventLines(events), err)
	denied, err := b.cfg.Egress.List(ctx, agentlab.EgressFilter{Denied: true, Limit: maxRows + 1, Tail: true})
	addRows(a, "egress-denials.jsonl", newestRows, denied, err)
	snapshots, err := b.cfg.Rows.Snapshots(ctx, agentlab.SnapshotFilter{})
	addRows(a, "snapshots.jsonl", newestRows, snapshots, err)
	workspaces, err := b.cfg.Rows.Workspaces(ctx)
	addRows(a, "workspaces.jsonl", newestRows, workspaces, err)
	sessions, err := b.cfg.Rows.Sessions(ctx)
	addRows(a, "sessions.jsonl", newestRows, sessions, err)
	b.try(ctx, "instances.jsonl", func(ctx context.Context) error {
		var list []fleet.Instance
		var failed []error
		for _, on := range b.cfg.Fleet.All() {
			found, err := on.List(ctx)
			for _, in := range found {
				list = append(list, fleet.Instance{Instance: in, Backend: on.Name()})
			}
			failed = append(failed, err)
		}
		slices.SortFunc(list, func(x, y fleet.Instance) int { return cmp.Compare(x.Ref.UID, y.Ref.UID) })
		addRows(a, "instances.jsonl", firstRows, list, nil)
		return errors.Join(failed...)
	})
	b.try(ctx, "daemon.log", func(context.Context) error {
		r, skip, err := openLog(b.cfg.LogFile)
		if err != nil {
			return err
		}
		defer func() { _ = r.Close() }()
		return a.tail("daemon.log", skip, io.LimitReader(r, maxTail+tailMargin))
	})
	return nil
}

// counts adds how many sandboxes and jobs there are, because their lists are
// limited.
func (b *collector) counts(ctx context.Context) {
	sandboxes, err := b.cfg.Rows.CountSandboxes(ctx)
	b.archive.fail("counts.json", err)
	jobs, err := b.cfg.Rows.CountJobs(ctx)
	b.archive.fail("counts.json", err)
	b.archive.doc("counts.json", map[string]any{"sandboxes": sandboxes, "jobs": jobs})
}
