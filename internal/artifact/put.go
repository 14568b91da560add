package artifact

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gabriel-vasile/mimetype"

	"github.com/agentlab-vm/agentlab"
)

// usage is the storage used by a job, counted during its uploads.
type usage struct {
	refs     int
	files    map[string]int64 // sizes by path
	bytes    int64            // sum of files
	inflight int64
	commit   sync.Mutex // held while the rows are read, and while a file and its row change together
}

// acquire returns the usage of a job, which its first upload reads from the
// store; release drops it after the last upload.
func (s *Service) acquire(ctx context.Context, jobID string) (*usage, error) {
	s.mu.Lock()
	u := s.jobs[jobID]
	if u == nil {
		u = &usage{}
		s.jobs[jobID] = u
	}
	u.refs++
	s.mu.Unlock()
	if err := s.readUsage(ctx, jobID, u); err != nil {
		s.release(jobID, u)
		return nil, err
	}
	return u, nil
}

// readUsage reads the rows of a job into u, if no upload has done it. It does
// not hold s.mu in the meantime, which wakeLog takes after a commit.
func (s *Service) readUsage(ctx context.Context, jobID string, u *usage) error {
	u.commit.Lock()
	defer u.commit.Unlock()
	if u.files != nil {
		return nil
	}
	rows, err := s.store.Artifacts(ctx, jobID)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	u.files = map[string]int64{}
	for _, a := range rows {
		if agentlab.IsCheckpoint(a.Path) {
			a.Size = 0 // it does not count
		}
		u.files[a.Path] = a.Size
		u.bytes += a.Size
	}
	return nil
}

func (s *Service) release(jobID string, u *usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u.refs--; u.refs == 0 {
		delete(s.jobs, jobID)
	}
}

// reserve adds n bytes of an upload to p, or returns an error. The current
// file at p is replaced by the upload and does not count.
func (s *Service) reserve(u *usage, p string, n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u.bytes-u.files[p]+u.inflight+n > s.limits.JobBytes {
		return agentlab.Errorf(agentlab.CodeLimit, "the artifacts of the job exceed %d bytes", s.limits.JobBytes)
	}
	u.inflight += n
	return nil
}

func (s *Service) settle(u *usage, reserved int64, p string, size int64, stored bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	u.inflight -= reserved
	if stored {
		u.bytes += size - u.files[p]
		u.files[p] = size
	}
}

// putsPerFile is how many uploads a job may make per allowed artifact:
// uploading the same file repeatedly would cause unlimited work.
const putsPerFile = 10

// checkpointPause is the minimum time between two uploads of a job's checkpoint.
const checkpointPause = time.Second

// countPut counts an upload. Checkpoints are limited by their rate, so that they
// never use up the uploads of the result.
func (s *Service) countPut(jobID, p string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if agentlab.IsCheckpoint(p) {
		now := s.clock()
		if last, ok := s.checkpoints[jobID]; ok && now.Sub(last).Abs() < checkpointPause {
			return agentlab.Errorf(agentlab.CodeBusy, "the last checkpoint of the job was less than %s ago", checkpointPause)
		}
		s.checkpoints[jobID] = now
		return nil
	}
	if most := putsPerFile * s.limits.JobFiles; s.puts[jobID] >= most {
		return agentlab.Errorf(agentlab.CodeLimit, "the job has already made %d uploads", most)
	}
	s.puts[jobID]++
	return nil
}

func (s *Service) checkCount(u *usage, p string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := u.files[p]; ok || agentlab.IsCheckpoint(p) {
		return nil
	}
	n := len(u.files)
	for _, name := range []string{agentlab.ArtifactCheckpoint, agentlab.ArtifactIncrement} {
		if _, ok := u.files[name]; ok {
			n--
		}
	}
	if n >= s.limits.JobFiles {
		return agentlab.Errorf(agentlab.CodeLimit, "the job already has %d artifacts", n)
	}
	return nil
}

// checkTop rejects paths below the files that the runner and the controller
// store themselves: an agent that stores agent.log/x would otherwise make
// agent.log a directory.
func checkTop(p string) error {
	top, _, deeper := strings.Cut(p, "/")
	var why string
	switch {
	case deeper && slices.Contains([]string{agentlab.ArtifactLog, "report.json", "result.bundle", "changes.diff", "console.log", agentlab.ArtifactCheckpoint, agentlab.ArtifactIncrement}, top):
		why = top + " is a file"
	case !deeper && top == "outputs":
		why = "outputs is a directory"
	default:
		return nil
	}
	return agentlab.Errorf(agentlab.CodeInvalid, "%q is not an artifact path: %s", p, why).WithField("path")
}

// Put atomically stores the content of r as the artifact of the job with the
// path, replacing an earlier one. Codes: invalid (path or job ID), limit (a
// quota), conflict (a parent of the path is a file, or the path is a
// directory), no_space; an error of r is returned unchanged.
func (s *Service) Put(ctx context.Context, jobID, p string, r io.Reader) (agentlab.Artifact, error) {
	var none agentlab.Artifact
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return none, err
	}
	if err := agentlab.ValidateArtifactPath(p); err != nil {
		return none, err
	}
	if err := checkTop(p); err != nil {
		return none, err
	}
	u, err := s.acquire(ctx, jobID)
	if err != nil {
		return none, err
	}
	defer s.release(jobID, u)
	if err := errors.Join(s.checkCount(u, p), s.countPut(jobID, p)); err != nil {
		return none, err
	}
	t, err := s.newTemp(s.files, tmpDir)
	if err != nil {
		return none, err
	}
	defer t.discard()
	c := &counter{ctx: ctx, s: s, u: u, path: p, r: r, limit: s.limits.FileBytes, counts: !agentlab.IsCheckpoint(p)}
	if !c.counts {
		c.limit = s.limits.CheckpointBytes
	}
	stored := false
	defer func() { s.settle(u, c.reserved, p, c.reserved, stored) }()
	sum, mime, err := t.fill(c)
	if c.err != nil {
		return none, c.err
	}
	if err != nil {
		return none, fault(err, "store %s", p)
	}
	a := agentlab.Artifact{JobID: jobID, Path: p, Size: c.n, SHA256: sum, MIME: mime, CreatedAt: s.clock().UTC()}
	u.commit.Lock()
	defer u.commit.Unlock()
	if err := s.checkCount(u, p); err != nil { // another upload may have been faster
		return none, err
	}
	if err := s.setAfter(ctx, &a); err != nil {
		return none, err
	}
	if err := s.place(t, a); err != nil {
		return none, err
	}
	stored = true
	// The file is in place, so its row is written even if the caller has
	// disconnected.
	err = s.store.PutArtifact(context.WithoutCancel(ctx), a, s.storedEvents(u, a)...)
	return a, err
}

// setAfter makes the time of a part of a checkpoint later than that of the other part
// also if the clock was set back: readers use an increment only if it is not older
// than the full bundle.
func (s *Service) setAfter(ctx context.Context, a *agentlab.Artifact) error {
	if !agentlab.IsCheckpoint(a.Path) {
		return nil
	}
	rows, err := s.store.Artifacts(ctx, a.JobID)
	for _, other := range rows {
		if agentlab.IsCheckpoint(other.Path) && other.Path != a.Path && !a.CreatedAt.After(other.CreatedAt) {
			a.CreatedAt = other.CreatedAt.Add(time.Nanosecond)
		}
	}
	return err
}

// storedEvents returns the event for a new artifact. A replaced artifact has
// no event, because a guest could otherwise grow the database without limit.
func (s *Service) storedEvents(u *usage, a agentlab.Artifact) []agentlab.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := u.files[a.Path]; known {
		return nil
	}
	e := agentlab.NewEvent(agentlab.EventArtifactStored, map[string]any{"size": a.Size}, "artifact %s stored, %d bytes", a.Path, a.Size).About(0, a.JobID)
	e.Time = a.CreatedAt
	return []agentlab.Event{e}
}

// place moves a complete temporary file to its path. Its modification time is
// set to that of its row, so that Sweep can check that the two belong
// together.
func (s *Service) place(t *temp, a agentlab.Artifact) error {
	p := a.Path
	full := a.JobID + "/" + p
	dir := path.Dir(full)
	if err := s.files.MkdirAll(dir, 0o700); err != nil {
		return fault(err, "create the directory of %s", p)
	}
	if err := s.files.Chtimes(t.name, a.CreatedAt, a.CreatedAt); err != nil {
		return fault(err, "store %s", p)
	}
	if err := t.moveTo(full); err != nil {
		return fault(err, "store %s", p)
	}
	return fault(syncDir(s.files, dir), "store %s", p)
}

// counter reads an upload and enforces its quotas.
type counter struct {
	ctx  context.Context
	s    *Service
	u    *usage
	path string
	r    io.Reader
	n    int64
	err  error // why reading ended, if not by io.EOF

	limit    int64
	counts   bool  // towards the quota of the job
	reserved int64 // of the quota
}

func (c *counter) Read(p []byte) (n int, err error) {
	defer func() {
		if err != nil && err != io.EOF {
			c.err = err
		}
	}()
	if err := errors.Join(c.ctx.Err(), c.s.room()); err != nil {
		return 0, err
	}
	n, err = c.r.Read(p)
	if n > 0 {
		if c.n+int64(n) > c.limit {
			return 0, agentlab.Errorf(agentlab.CodeLimit, "the artifact exceeds %d bytes", c.limit)
		}
		if c.counts {
			if err := c.s.reserve(c.u, c.path, int64(n)); err != nil {
				return 0, err
			}
			c.reserved += int64(n)
		}
		c.n += int64(n)
	}
	return n, err
}

// temp is a temporary file.
type temp struct {
	s    *Service
	root *os.Root
	name string
	f    *os.File
	done bool
}

func (s *Service) newTemp(root *os.Root, dir string) (*temp, error) {
	name := path.Join(dir, ".up-"+agentlab.NewUID())
	s.mu.Lock()
	s.active[name] = true
	s.mu.Unlock()
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		s.forget(name)
		return nil, fault(err, "create a temporary file")
	}
	return &temp{s: s, root: root, name: name, f: f}, nil
}

func (s *Service) forget(name string) {
	s.mu.Lock()
	delete(s.active, name)
	s.mu.Unlock()
}

// sniffBytes is how many bytes mimetype reads.
const sniffBytes = 3072

// fill copies r to the file and syncs it to disk.
func (t *temp) fill(r io.Reader) (sum, mime string, err error) {
	a, err := summarize(io.TeeReader(r, t.f))
	if err == nil {
		err = t.f.Sync()
	}
	return a.SHA256, a.MIME, err
}

// summarize reads r to its end and returns size, hash and type.
func summarize(r io.Reader) (a agentlab.Artifact, err error) {
	h := sha256.New()
	head := &prefix{}
	a.Size, err = io.CopyBuffer(onlyWriter{io.MultiWriter(h, head)}, onlyReader{r}, make([]byte, 64<<10))
	a.SHA256, a.MIME = hex.EncodeToString(h.Sum(nil)), mimetype.Detect(head.p).String()
	return a, err
}

// These types hide ReadFrom and WriteTo from io.Copy, so that it uses its
// buffer.
type (
	onlyWriter struct{ io.Writer }
	onlyReader struct{ io.Reader }
)

type prefix struct{ p []byte }

func (x *prefix) Write(p []byte) (int, error) {
	x.p = append(x.p, p[:min(len(p), sniffBytes-len(x.p))]...)
	return len(p), nil
}

func (t *temp) moveTo(name string) error {
	if err := t.f.Close(); err != nil {
		return err
	}
	if err := t.root.Rename(t.name, name); err != nil {
		return err
	}
	t.done = true
	return nil
}

// discard removes the file, unless it was moved.
func (t *temp) discard() {
	if !t.done {
		_ = t.f.Close()
		_ = t.root.Remove(t.name) // Sweep removes it after an error
	}
	t.s.forget(t.name)
}

func syncDir(root *os.Root, dir string) error {
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return d.Sync()
}
