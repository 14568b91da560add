// Package artifact stores the outputs and inputs of jobs: artifact files,
// agent logs, and git bundles of local repositories. The files are below one
// directory,
//
//	artifacts/<job_id>/<path>     artifacts, described by rows in the store
//	artifacts/.tmp/<random>       active uploads and deletions
//	logs/<job_id>.log             agent logs, append only
//	bundles/<bundle_id>.bundle uploaded repositories without a job
//	bundles/<job_id>.bundle       the repository of a job
//	*/.quarantine/<job_id>@<time> files without a row, of each of the three
//
// and are accessed only through os.Root, so that no name, link or race leads
// out of it. Names and contents come from guests and are untrusted; MIME types
// are detected here. Sweep removes what a crash leaves behind.
package artifact

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// Store stores the rows of artifacts and of their jobs.
type Store interface {
	// Job returns a job. The log of a final job does not grow.
	Job(ctx context.Context, id string) (agentlab.Job, error)
	// PutArtifact inserts the row or replaces the row with the same job and
	// path.
	PutArtifact(ctx context.Context, a agentlab.Artifact, evs ...agentlab.Event) error
	Artifacts(ctx context.Context, jobID string) ([]agentlab.Artifact, error)
	Artifact(ctx context.Context, jobID, path string) (agentlab.Artifact, error)
	// DeleteArtifacts deletes the rows with the paths, or without paths all
	// rows of the job.
	DeleteArtifacts(ctx context.Context, jobID string, paths ...string) error
	// Subscribe calls fn after each commit.
	Subscribe(fn func(agentlab.Commit))
}

// Limits are the limits on the files of one job. Zero means the default.
type Limits struct {
	FileBytes       int64         // one artifact; default 2 GiB
	JobBytes        int64         // all artifacts of a job; default 4 GiB
	JobFiles        int           // number of artifacts of a job; default 2000; the number of uploads, which may replace others, may be ten times as high
	CheckpointBytes int64         // one bundle of a checkpoint; default agentlab.MaxCheckpointBytes
	LogBytes        int64         // the agent log of a job; default 64 MiB
	BundleBytes     int64         // one uploaded git bundle; default 4 GiB
	BundleAge       time.Duration // how long a bundle waits for its job; default 1 h
	Quarantine      time.Duration // how long files without a row are kept; default 30 days
}

func (l Limits) withDefaults() Limits {
	def := func(v *int64, d int64) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&l.FileBytes, 2<<30)
	def(&l.JobBytes, 4<<30)
	def(&l.CheckpointBytes, agentlab.MaxCheckpointBytes)
	def(&l.LogBytes, 64<<20)
	def(&l.BundleBytes, 4<<30)
	if l.JobFiles <= 0 {
		l.JobFiles = 2000
	}
	if l.BundleAge <= 0 {
		l.BundleAge = time.Hour
	}
	if l.Quarantine <= 0 {
		l.Quarantine = 30 * 24 * time.Hour
	}
	return l
}

// Space checks the disk; *hostspace.Guard implements it.
type Space interface {
	// Keep returns code no_space while the disk is too full to store data.
	Keep() error
}

// Config is the configuration of a Service.
type Config struct {
	Dir    string // created if missing, with mode 0700
	Store  Store
	Limits Limits
	// Space is asked before every buffer is written; nil means that there
	// is always space.
	Space  Space
	Clock  func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Service stores files of jobs. It is safe for concurrent use.
type Service struct {
	store   Store
	limits  Limits
	room    func() error
	clock   func() time.Time
	log     *slog.Logger
	files   *os.Root // artifacts/
	logs    *os.Root
	bundles *os.Root

	mu          sync.Mutex
	jobs        map[string]*usage    // jobs with a running upload
	puts        map[string]int       // uploads of each job since the start of this process
	checkpoints map[string]time.Time // last upload of each job's checkpoint
	active      map[string]bool      // temporary files in use
	topics      map[string]*logTopic // logs with a reader or a writer
}

const tmpDir = ".tmp"

// New opens the directory and creates missing parts of it.
func New(cfg Config) (*Service, error) {
	s := &Service{
		store: cfg.Store, limits: cfg.Limits.withDefaults(), clock: cfg.Clock, log: cfg.Logger,
		jobs: map[string]*usage{}, puts: map[string]int{}, checkpoints: map[string]time.Time{}, active: map[string]bool{}, topics: map[string]*logTopic{},
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	s.room = func() error { return nil }
	if cfg.Space != nil {
		s.room = cfg.Space.Keep
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	for name, root := range map[string]**os.Root{"artifacts": &s.files, "logs": &s.logs, "bundles": &s.bundles} {
		dir := filepath.Join(cfg.Dir, name)
		err := os.MkdirAll(dir, 0o700)
		if err == nil {
			*root, err = os.OpenRoot(dir)
		}
		if err != nil {
			return nil, errors.Join(fault(err, "open the directory of %s", name), s.Close())
		}
	}
	if err := s.files.Mkdir(tmpDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, errors.Join(fault(err, "create the directory for uploads"), s.Close())
	}
	cfg.Store.Subscribe(func(c agentlab.Commit) {
		for _, e := range c.Events {
			if e.Kind == agentlab.EventJobStatus {
				s.wakeLog(e.JobID)
			}
		}
	})
	return s, nil
}

// Close closes the directories. Running calls fail.
func (s *Service) Close() error {
	var errs []error
	for _, r := range []*os.Root{s.files, s.logs, s.bundles} {
		if r != nil {
			errs = append(errs, r.Close())
		}
	}
	return errors.Join(errs...)
}

// Limits returns the limits in force.
func (s *Service) Limits() Limits { return s.limits }

// fault adds a code to an error of the file system.
func fault(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	var own *agentlab.Error
	if errors.As(err, &own) {
		return err
	}
	code, hint := agentlab.CodeInternal, ""
	switch {
	case fsfault.Full(err):
		code, hint = agentlab.CodeNoSpace, "free disk space in the state directory, or delete old jobs"
	case errors.Is(err, fs.ErrNotExist):
		code = agentlab.CodeNotFound
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, fs.ErrExist):
		code = agentlab.CodeConflict
	}
	e := agentlab.Errorf(code, format, args...)
	e.Err = err
	e.Hint = hint
	return e
}
