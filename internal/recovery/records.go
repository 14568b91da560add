// Package recovery keeps what a lost database is made of again: backups, records
// of jobs, and the id that ties a database to its state directory. It is also the
// command that repairs the database while no daemon runs.
package recovery

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// Records are copies of the rows of jobs, one file each, so that a database
// can be rebuilt from the state directory. They are written after the commit
// and never read by a daemon that has its database. After a crash between the
// two, the next start writes the missing record.
type Records struct {
	cfg RecordsConfig

	mu   sync.Mutex
	due  map[string]bool
	wake chan struct{} // has a value if due is not empty
}

// RecordsConfig is what Records need.
type RecordsConfig struct {
	Dir    string
	Store  *store.Store
	Keep   time.Duration // retention of records of unknown jobs
	Clock  func() time.Time
	Logger *slog.Logger
}

// NewRecords returns Records of which none is due.
func NewRecords(cfg RecordsConfig) *Records {
	r := &Records{cfg: cfg, due: map[string]bool{}, wake: make(chan struct{}, 1)}
	cfg.Store.Subscribe(func(c agentlab.Commit) {
		for _, e := range c.Events {
			if e.JobID != "" {
				r.changed(e.JobID)
			}
		}
	})
	return r
}

func recordFile(dir, jobID string) string { return filepath.Join(dir, jobID+".json") }

// refusedSuffix is the suffix of a record that a repair renamed because the
// store rejected it.
const refusedSuffix = ".refused"

// readRecord returns the record of a job; ok is false if there is no usable
// one.
func readRecord(dir, jobID string) (j agentlab.Job, ok bool) {
	return parseRecord(recordFile(dir, jobID), jobID)
}

func parseRecord(path, jobID string) (j agentlab.Job, ok bool) {
	text, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(text, &j) != nil {
		return agentlab.Job{}, false
	}
	return j, j.ID == jobID && j.Status.Valid() && !j.CreatedAt.IsZero()
}

// recordOf returns the job whose record has that name, refused or not.
func recordOf(name string) (jobID string, ok bool) {
	jobID, ok = strings.CutSuffix(strings.TrimSuffix(name, refusedSuffix), ".json")
	return jobID, ok && agentlab.ValidateJobID(jobID) == nil
}

// recorded lists the jobs that have a record, with the time of its file. The
// record itself may be damaged, or renamed by a repair that was killed before
// it added the job. A job with both files is listed twice.
func recorded(dir string) ([]artifact.RecoveredJob, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fsfault.At(dir, err)
	}
	var out []artifact.RecoveredJob
	for _, e := range entries {
		id, ok := recordOf(e.Name())
		if !ok {
			continue
		}
		st, err := e.Info()
		if err != nil {
			return nil, fsfault.At(filepath.Join(dir, e.Name()), err)
		}
		at := st.ModTime().UTC()
		out = append(out, artifact.RecoveredJob{JobID: id, Oldest: at, Newest: at})
	}
	return out, nil
}

// changed records that the row of a job has changed. It is quick.
func (r *Records) changed(jobID string) {
	r.mu.Lock()
	r.due[jobID] = true
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run writes records until ctx ends, missing ones first.
func (r *Records) Run(ctx context.Context) error {
	if err := r.catchUp(ctx); err != nil && ctx.Err() == nil {
		r.cfg.Logger.Error("the records of jobs were not completed", "err", err)
	}
	for {
		select {
		case <-r.wake:
			r.writeDue(ctx)
		case <-ctx.Done():
			return nil
		}
	}
}

// Close writes the records that are missing or old. A commit is visible before Changed
// is called for it, and guests report the ends of jobs until the driver is closed. So it
// compares all records with their rows. It never fails: the next start writes the rest.
func (r *Records) Close() error {
	ctx := context.Background()
	if err := r.catchUp(ctx); err != nil {
		r.cfg.Logger.Error("the records of jobs were not completed", "err", err)
	}
	r.writeDue(ctx)
	return nil
}

// writeDue writes the records that are due.
func (r *Records) writeDue(ctx context.Context) {
	r.mu.Lock()
	due := r.due
	r.due = map[string]bool{}
	r.mu.Unlock()
	for id := range due {
		j, err := r.cfg.Store.Job(ctx, id)
		if err == nil {
			err = durable.ReplaceJSON(recordFile(r.cfg.Dir, id), j, durable.Content)
		}
		if err != nil && ctx.Err() == nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
			r.cfg.Logger.Error("the record of a job was not written", "job", id, "err", err)
		}
	}
}

// catchUp marks the records as due that are missing or older than their row.
func (r *Records) catchUp(ctx context.Context) error {
	const page = 200
	f := agentlab.JobFilter{Limit: page}
	for {
		jobs, err := r.cfg.Store.Jobs(ctx, f)
		if err != nil {
			return err
		}
		for _, j := range jobs {
			st, err := os.Stat(recordFile(r.cfg.Dir, j.ID))
			if err != nil || st.ModTime().Before(j.UpdatedAt) {
				r.changed(j.ID)
			}
			f.Before = j.Key()
		}
		if len(jobs) < page {
			return nil
		}
	}
}

// Sweep deletes the records of unknown jobs whose retention has ended. It does
// not count them: each is a copy.
func (r *Records) Sweep(ctx context.Context, known func(context.Context, string) (bool, error)) (int, error) {
	entries, err := os.ReadDir(r.cfg.Dir)
	if err != nil {
		return 0, fsfault.At(r.cfg.Dir, err)
	}
	now := r.cfg.Clock()
	var errs []error
	for _, e := range entries {
		id, ok := recordOf(e.Name())
		st, err := e.Info()
		if !ok || err != nil || now.Sub(st.ModTime()) < r.cfg.Keep {
			continue
		}
		exists, err := known(ctx, id)
		if err == nil && !exists {
			err = os.Remove(filepath.Join(r.cfg.Dir, e.Name()))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return 0, errors.Join(errs...)
}
