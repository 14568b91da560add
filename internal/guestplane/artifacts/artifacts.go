// Package artifacts is the guest service for the files of a job: its log, its uploads,
// and the repository that was given to it.
package artifacts

import (
	"context"
	"errors"
	"io"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Store stores files of guests; *artifact.Service implements it.
type Store interface {
	// Put stores a file of a job, replacing one of the same path.
	Put(ctx context.Context, jobID, path string, r io.Reader) (agentlab.Artifact, error)
	// LogSize returns how many bytes of the job's agent log are stored.
	LogSize(ctx context.Context, jobID string) (int64, error)
	// Log reads the log from offset to its current end.
	Log(ctx context.Context, jobID string, offset int64, follow bool) (io.ReadCloser, error)
	// AppendLog adds p to the log at offset, which must not be beyond its
	// end; bytes that are already stored are skipped. full means that the
	// quota is used up.
	AppendLog(ctx context.Context, jobID string, offset int64, p []byte) (size int64, full bool, err error)
	// RepoBundle opens the git bundle given for the job.
	RepoBundle(ctx context.Context, jobID string) (rc io.ReadSeekCloser, size int64, err error)
}

// maxChunk is the maximum size of one log append, in bytes.
const maxChunk = 1 << 20

// Service returns the guest service.
func Service(store Store) guestplane.Service {
	s := &service{store: store}
	return guestplane.Service{Name: "artifacts", Routes: []guestplane.Route{
		{Method: "POST", Path: guestapi.PathLog, Token: guestplane.RunnerAtWork, Body: maxChunk, Serve: s.appendLog},
		{Method: "GET", Path: guestapi.PathRepo, Token: guestplane.RunnerAtWork, Serve: s.repo},
		{Method: "PUT", Path: guestapi.PathUpload + "{path...}", Token: guestplane.UploaderAtWork, Body: guestplane.AnyBody, Serve: s.upload},
	}}
}

type service struct {
	store Store
	logs  lock.Keyed[string] // by job: one log append at a time
}

// appendLog appends to the agent log the part of a chunk that can be redacted:
// an end that may be the beginning of a secret is left for the next call,
// unless the runner says that nothing follows. Secrets are masked in place, so
// the offsets of runner and controller stay the same.
func (s *service) appendLog(c *guestplane.Call) (any, error) {
	offset, err := c.QueryInt("offset", 1<<50)
	if err != nil {
		return nil, err
	}
	final, err := c.QueryInt("final", 1)
	if err != nil {
		return nil, err
	}
	p, err := c.Read()
	if err != nil {
		return nil, err
	}
	unlock, err := s.logs.Lock(c.Context(), c.JobID) // the size must not change between the read and the append
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := c.Recheck(); err != nil {
		return nil, err
	}
	size, err := s.store.LogSize(c.Context(), c.JobID)
	if err != nil {
		return nil, err
	}
	if offset > size || offset+int64(len(p)) <= size {
		// An empty append reports whether the quota is used up.
		held, full, err := s.store.AppendLog(c.Context(), c.JobID, size, nil)
		return guestapi.LogAck{Size: held, Full: full}, err
	}
	red, err := c.JobRedactor()
	if err != nil {
		return nil, err
	}
	before, err := s.logTail(c.Context(), c.JobID, size)
	if err != nil {
		return nil, err
	}
	p = p[size-offset:]
	settled := len(p)
	if final == 1 {
		red.MaskEnd(before, p)
	} else {
		settled = red.Mask(before, p)
	}
	size, full, err := s.store.AppendLog(c.Context(), c.JobID, size, p[:settled])
	return guestapi.LogAck{Size: size, Full: full}, err
}

// logTail reads as much of the end of a job's log as redaction needs.
func (s *service) logTail(ctx context.Context, jobID string, size int64) ([]byte, error) {
	log, err := s.store.Log(ctx, jobID, max(size-redact.Context, 0), false)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	return io.ReadAll(io.LimitReader(log, redact.Context))
}

func (s *service) repo(c *guestplane.Call) (any, error) {
	f, size, err := s.store.RepoBundle(c.Context(), c.JobID)
	if err != nil {
		return nil, err
	}
	return &guestplane.Stream{Body: f, Size: size}, nil
}

// redactedUploads are the text files that the runner itself writes. The rest
// is the agent's work, which must not be changed.
var redactedUploads = []string{agentlab.ArtifactLog, "report.json"}

func (s *service) upload(c *guestplane.Call) (any, error) {
	p := c.Request.PathValue("path")
	if err := agentlab.ValidateArtifactPath(p); err != nil {
		return nil, err
	}
	red, err := c.JobRedactor()
	if err != nil {
		return nil, err
	}
	p = red.String(p) // names are also stored, listed and logged
	src := &uploadBody{r: c.Request.Body, atEnd: c.Recheck}
	var in io.Reader = src
	if slices.Contains(redactedUploads, p) {
		in = red.Reader(src)
	}
	a, err := s.store.Put(c.Context(), c.JobID, p, in)
	if src.err != nil {
		err = guestplane.BodyError(src.err)
	}
	if err != nil {
		return nil, err
	}
	return guestapi.UploadAck{Path: a.Path, Size: a.Size, SHA256: a.SHA256}, nil
}

// uploadBody records that an upload failed on the guest's side. An error of
// atEnd is a failure too.
type uploadBody struct {
	r     io.Reader
	atEnd func() error
	err   error
}

func (s *uploadBody) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if errors.Is(err, io.EOF) {
		if end := s.atEnd(); end != nil {
			err = end
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}
