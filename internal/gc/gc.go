// Package gc deletes data whose retention period has ended: artifacts and logs of ended jobs,
// expired tokens, old events and egress records, and the rows of jobs and sandboxes that ended
// long ago. It writes events about what it deleted.
//
// It deletes in an order in which the next pass finds everything that a crash
// leaves: files before the row of their job, and a sandbox's row only after the
// sandbox is deleted from the backend.
package gc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Store is what the collector needs of the database. The semantics are those
// of package store.
type Store interface {
	Jobs(ctx context.Context, f agentlab.JobFilter) ([]agentlab.Job, error)
	Sandboxes(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	Artifacts(ctx context.Context, jobID string) ([]agentlab.Artifact, error)
	DeleteJob(ctx context.Context, id string) error
	DeleteSandbox(ctx context.Context, vmid int) error
	DeleteExpiredTokens(ctx context.Context, now time.Time) (int, error)
	DeleteEventsBefore(ctx context.Context, t time.Time) (int, error)
	DeleteEgressBefore(ctx context.Context, t time.Time) (int, error)
	DeleteMessagesBefore(ctx context.Context, t time.Time) (int, error)
	AppendEvents(ctx context.Context, evs ...agentlab.Event) error
}

// Files are the artifacts and logs on disk.
type Files interface {
	// Delete removes artifacts with their rows, log and repository bundle of
	// a job; it succeeds if there are none.
	Delete(ctx context.Context, jobID string) error
	// DeleteOutputs removes the artifacts with their rows that are not in the
	// bundle of the job, and returns them.
	DeleteOutputs(ctx context.Context, jobID string) ([]agentlab.Artifact, error)
}

// Sweeper is a service that removes what crashes left behind and what belongs
// to no known job. It returns how much it removed.
type Sweeper interface {
	Sweep(ctx context.Context, known func(ctx context.Context, jobID string) (bool, error)) (int, error)
}

// Installation is the state directory with its database; *recovery.Installation
// implements it.
type Installation interface {
	// Check returns an error if the database is not that of the state
	// directory. Nothing is swept then.
	Check(ctx context.Context) error
}

// Jobs is the job service; *job.Service implements it.
type Jobs interface {
	// Known reports whether a job exists or is being created. What belongs to
	// no known job is deleted.
	Known(ctx context.Context, jobID string) (bool, error)
}

// Snapshots is the sandbox service.
type Snapshots interface {
	// ExpireSnapshots deletes the snapshots that were saved before a time,
	// except those that are kept, and returns their number.
	ExpireSnapshots(ctx context.Context, before time.Time) (int, error)
}

// Workspaces is the workspace service; *workspace.Service implements it.
type Workspaces interface {
	// ExpireTrash requests the deletion of the workspaces that were moved to the
	// trash before a time, and returns their number.
	ExpireTrash(ctx context.Context, before time.Time) (int, error)
}

// Profiles is the profile library; *profile.Library implements it.
type Profiles interface {
	// ArtifactTTL returns how long the artifacts of a job with that profile
	// are kept; 0 means Config.Artifacts.
	ArtifactTTL(profile string) time.Duration
}

// Time watches the clock; *hostclock.Watch implements it.
type Time interface {
	// Hold returns an error while the time now may be wrong. Nothing is
	// deleted then.
	Hold(now time.Time) error
}

// Config is what a Collector needs.
type Config struct {
	Store Store
	Files Files

	Sweepers     []Sweeper
	Installation Installation // nil: not checked

	Snapshots  Snapshots  // nil: there are none
	Workspaces Workspaces // nil: there are none

	Jobs     Jobs
	Profiles Profiles // nil: no profile has a retention of its own
	Time     Time     // nil: the time is always right

	Artifacts   time.Duration // retention of artifacts and logs of an ended job; default 30 days
	Bundles     time.Duration // retention of job bundles, if it is longer than that of the other artifacts
	Events      time.Duration // retention of events; default 30 days
	Egress      time.Duration // retention of egress records; default 30 days
	Rows        time.Duration // retention of the rows of destroyed sandboxes, and of ended jobs whose sandbox is destroyed; default 90 days
	SnapshotAge time.Duration // retention of snapshots that are not kept; default 30 days
	Trash       time.Duration // how long deleted workspaces stay in the trash; default 14 days

	Every time.Duration // between two passes; default 1 h

	Clock  func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Collector deletes old data. Its methods are not safe for concurrent use.
type Collector struct {
	cfg   Config
	clock func() time.Time
	log   *slog.Logger

	// emptied caches jobs without files, so that old jobs need no work in
	// each pass.
	emptied map[string]bool
	trimmed map[string]bool // likewise, jobs with nothing but their bundle
}

// New returns a Collector.
func New(cfg Config) *Collector {
	const day = 24 * time.Hour
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&cfg.Artifacts, 30*day)
	def(&cfg.Events, 30*day)
	def(&cfg.Egress, 30*day)
	def(&cfg.Rows, 90*day)
	def(&cfg.SnapshotAge, 30*day)
	def(&cfg.Trash, 14*day)
	def(&cfg.Every, time.Hour)
	c := &Collector{cfg: cfg, clock: cfg.Clock, log: cfg.Logger, emptied: map[string]bool{}, trimmed: map[string]bool{}}
	if c.clock == nil {
		c.clock = time.Now
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Run makes a pass at once and then every Config.Every, until ctx ends. It
// logs a failed pass; the next pass tries again.
func (c *Collector) Run(ctx context.Context) error {
	t := time.NewTicker(c.cfg.Every)
	defer t.Stop()
	for {
		if _, err := c.Pass(ctx); err != nil && ctx.Err() == nil {
			c.log.Error("garbage collection is incomplete", "err", err)
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// Deleted counts what a pass deleted.
type Deleted struct {
	Artifacts int `json:"artifacts,omitempty"` // jobs whose artifacts and log were deleted
	Files     int `json:"files,omitempty"`     // files of crashes, unclaimed bundles, files of unknown jobs
	Jobs      int `json:"jobs,omitempty"`
	Sandboxes int `json:"sandboxes,omitempty"`
	Snapshots int `json:"snapshots,omitempty"`
	Tokens    int `json:"tokens,omitempty"`
	Events    int `json:"events,omitempty"`
	Egress    int `json:"egress,omitempty"` // egress records
	Messages  int `json:"messages,omitempty"`

	Workspaces int `json:"workspaces,omitempty"`
}

// Pass deletes all that is due now, or nothing while Config.Time says so. What fails is skipped and part of the
// error; the rest is deleted.
func (c *Collector) Pass(ctx context.Context) (Deleted, error) {
	var d Deleted
	var errs []error
	now := c.clock().UTC()
	if c.cfg.Time != nil {
		if err := c.cfg.Time.Hold(now); err != nil {
			return d, err
		}
	}
	for _, part := range []func(context.Context, time.Time, *Deleted) error{c.jobs, c.files, c.snapshots, c.workspaces, c.sandboxes, c.tokens, c.events, c.messages, c.egress} {
		if ctx.Err() != nil {
			break
		}
		errs = append(errs, part(ctx, now, &d))
	}
	if d != (Deleted{}) {
		errs = append(errs, c.emitEvent(context.WithoutCancel(ctx), d))
	}
	return d, errors.Join(append(errs, ctx.Err())...)
}

// endedJob is the data of a final job for a pass.
type endedJob struct {
	id, profile string
	parent      string // of an attempt: its job
	at          time.Time
}

const page = 200

// endedJobs lists the jobs that have ended.
func (c *Collector) endedJobs(ctx context.Context) ([]endedJob, error) {
	var out []endedJob
	f := agentlab.JobFilter{Limit: page, Statuses: []agentlab.JobStatus{
		agentlab.JobCompleted, agentlab.JobFailed, agentlab.JobTimeout, agentlab.JobCancelled,
	}}
	for {
		jobs, err := c.cfg.Store.Jobs(ctx, f)
		if err != nil {
			return nil, err
		}
		for _, j := range jobs {
			out = append(out, endedJob{j.ID, j.Profile, j.ParentID, j.FinishedAt})
		}
		if len(jobs) < page {
			return out, nil
		}
		f.Before = jobs[len(jobs)-1].Key()
	}
}

// jobs deletes artifacts and logs, and later the job itself.
func (c *Collector) jobs(ctx context.Context, now time.Time, d *Deleted) error {
	jobs, err := c.endedJobs(ctx)
	if err != nil {
		return err
	}
	used, err := c.jobsInUse(ctx)
	if err != nil {
		return err
	}
	open, err := c.openJobs(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, j := range jobs {
		if open[j.parent] { // which takes over the files of its attempts at its end
			continue
		}
		age := now.Sub(j.at)
		old := age >= c.cfg.Rows && !used[j.id]
		ttl := c.artifactTTL(j.profile)
		var err error
		switch {
		case !old && (c.emptied[j.id] || age < ttl):
		case !old && age < c.cfg.Bundles:
			err = c.trim(ctx, j.id, d)
		default:
			err = c.job(ctx, j.id, old, d)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", j.id, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// openJobs returns the jobs that have not ended.
func (c *Collector) openJobs(ctx context.Context) (map[string]bool, error) {
	list, err := c.cfg.Store.Jobs(ctx, agentlab.JobFilter{Statuses: []agentlab.JobStatus{agentlab.JobQueued, agentlab.JobRunning}})
	open := map[string]bool{}
	for _, j := range list {
		open[j.ID] = true
	}
	return open, err
}

// jobsInUse returns the jobs with a sandbox that is not DESTROYED: a kept sandbox
// needs the row of its job when it boots again.
func (c *Collector) jobsInUse(ctx context.Context) (map[string]bool, error) {
	list, err := c.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{})
	used := map[string]bool{}
	for _, sb := range list {
		used[sb.JobID] = true
	}
	return used, err
}

func (c *Collector) artifactTTL(profile string) time.Duration {
	if c.cfg.Profiles != nil {
		if ttl := c.cfg.Profiles.ArtifactTTL(profile); ttl > 0 {
			return ttl
		}
	}
	return c.cfg.Artifacts
}

// trim deletes the artifacts of one job that are not in its bundle.
func (c *Collector) trim(ctx context.Context, id string, d *Deleted) error {
	if c.trimmed[id] {
		return nil
	}
	rows, err := c.cfg.Files.DeleteOutputs(ctx, id)
	if err != nil {
		return err
	}
	c.trimmed[id] = true
	if len(rows) == 0 {
		return nil
	}
	d.Artifacts++
	var bytes int64
	for _, a := range rows {
		bytes += a.Size
	}
	e := agentlab.NewEvent(agentlab.EventGC, map[string]any{"artifacts": len(rows), "bytes": bytes, "bundle": true},
		"deleted %d artifacts of job %s, %d bytes, by retention; its bundle is kept", len(rows), id, bytes)
	return c.cfg.Store.AppendEvents(ctx, e.About(0, id))
}

// job deletes the files of one job and, when it is old, its row.
func (c *Collector) job(ctx context.Context, id string, old bool, d *Deleted) error {
	rows, err := c.cfg.Store.Artifacts(ctx, id)
	if err != nil {
		return err
	}
	// The log has no row, so Delete is called even if there are no
	// artifacts.
	if err := c.cfg.Files.Delete(ctx, id); err != nil {
		return err
	}
	c.emptied[id] = true
	if len(rows) > 0 {
		d.Artifacts++
		var bytes int64
		checkpoint, only := false, ""
		for _, a := range rows {
			bytes += a.Size
			if agentlab.IsCheckpoint(a.Path) { // an ended job with a result has none
				checkpoint, only = true, "; the job has no result, and its checkpoint was among them"
			}
		}
		e := agentlab.NewEvent(agentlab.EventGC, map[string]any{"artifacts": len(rows), "bytes": bytes, "checkpoint": checkpoint},
			"deleted %d artifacts of job %s, %d bytes, by retention%s", len(rows), id, bytes, only)
		if err := c.cfg.Store.AppendEvents(ctx, e.About(0, id)); err != nil {
			return err
		}
	}
	if !old {
		return nil
	}
	if err := c.cfg.Store.DeleteJob(ctx, id); err != nil {
		return err
	}
	delete(c.emptied, id)
	delete(c.trimmed, id)
	d.Jobs++
	return nil
}

func (c *Collector) files(ctx context.Context, _ time.Time, d *Deleted) error {
	if c.cfg.Installation != nil {
		if err := c.cfg.Installation.Check(ctx); err != nil {
			return err
		}
	}
	var errs []error
	for _, s := range c.cfg.Sweepers {
		n, err := s.Sweep(ctx, c.cfg.Jobs.Known)
		d.Files += n
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// sandboxes deletes old rows of destroyed sandboxes.
func (c *Collector) sandboxes(ctx context.Context, now time.Time, d *Deleted) error {
	list, err := c.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{States: []agentlab.SandboxState{agentlab.SandboxDestroyed}})
	if err != nil {
		return err
	}
	var errs []error
	for _, sb := range list {
		if now.Sub(sb.UpdatedAt) < c.cfg.Rows {
			continue
		}
		if err := c.cfg.Store.DeleteSandbox(ctx, sb.VMID); err != nil {
			errs = append(errs, err)
			continue
		}
		d.Sandboxes++
	}
	return errors.Join(errs...)
}

// snapshots deletes old snapshots.
func (c *Collector) snapshots(ctx context.Context, now time.Time, d *Deleted) (err error) {
	if c.cfg.Snapshots != nil {
		d.Snapshots, err = c.cfg.Snapshots.ExpireSnapshots(ctx, now.Add(-c.cfg.SnapshotAge))
	}
	return err
}

// workspaces empties the trash.
func (c *Collector) workspaces(ctx context.Context, now time.Time, d *Deleted) (err error) {
	if c.cfg.Workspaces != nil {
		d.Workspaces, err = c.cfg.Workspaces.ExpireTrash(ctx, now.Add(-c.cfg.Trash))
	}
	return err
}

func (c *Collector) tokens(ctx context.Context, now time.Time, d *Deleted) (err error) {
	d.Tokens, err = c.cfg.Store.DeleteExpiredTokens(ctx, now)
	return err
}

func (c *Collector) events(ctx context.Context, now time.Time, d *Deleted) (err error) {
	d.Events, err = c.cfg.Store.DeleteEventsBefore(ctx, now.Add(-c.cfg.Events))
	return err
}

// messages deletes the messages that are as old as events that are deleted.
func (c *Collector) messages(ctx context.Context, now time.Time, d *Deleted) (err error) {
	d.Messages, err = c.cfg.Store.DeleteMessagesBefore(ctx, now.Add(-c.cfg.Events))
	return err
}

func (c *Collector) egress(ctx context.Context, now time.Time, d *Deleted) (err error) {
	d.Egress, err = c.cfg.Store.DeleteEgressBefore(ctx, now.Add(-c.cfg.Egress))
	return err
}

// emitEvent writes an event with the result of a pass.
func (c *Collector) emitEvent(ctx context.Context, d Deleted) error {
	var data map[string]any
	text, err := json.Marshal(d)
	if err == nil {
		err = json.Unmarshal(text, &data)
	}
	if err != nil {
		return err
	}
	c.log.Info("garbage collected", "deleted", d)
	return c.cfg.Store.AppendEvents(ctx, agentlab.NewEvent(agentlab.EventGC, data, "deleted by retention: artifact files of %d jobs, %d leftovers, %d job records, %d sandboxes, %d snapshots, %d workspaces, %d tokens, %d events, %d messages, %d network records",
		d.Artifacts, d.Files, d.Jobs, d.Sandboxes, d.Snapshots, d.Workspaces, d.Tokens, d.Events, d.Messages, d.Egress))
}
