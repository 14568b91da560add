package artifact

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// logTopic is a log that is being written or followed.
type logTopic struct {
	refs  int
	write sync.Mutex

	mu      sync.Mutex
	changed chan struct{} // closed at every change, then replaced
}

func logFile(jobID string) string { return jobID + ".log" }

const logFullNote = "\n[agentlab: the log quota is reached; the rest is not stored]\n"

func (s *Service) topic(jobID string) *logTopic {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.topics[jobID]
	if t == nil {
		t = &logTopic{changed: make(chan struct{})}
		s.topics[jobID] = t
	}
	t.refs++
	return t
}

func (s *Service) untopic(jobID string, t *logTopic) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.refs--; t.refs == 0 {
		delete(s.topics, jobID)
	}
}

func (t *logTopic) wait() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changed
}

func (t *logTopic) wake() {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.changed)
	t.changed = make(chan struct{})
}

// LogSize returns how many bytes of a job's agent log are stored.
func (s *Service) LogSize(_ context.Context, jobID string) (int64, error) {
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return 0, err
	}
	st, err := s.logs.Lstat(logFile(jobID))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fault(err, "look at the agent log")
	}
	return st.Size(), nil
}

// AppendLog adds p, whose first byte is byte offset of the log. Bytes that are
// already stored are skipped, so a repeated call changes nothing; an offset
// beyond the end has code conflict. size is the length afterwards. full means
// that the quota is used up and no more is stored, which is not an error.
func (s *Service) AppendLog(_ context.Context, jobID string, offset int64, p []byte) (size int64, full bool, err error) {
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return 0, false, err
	}
	if offset < 0 {
		return 0, false, agentlab.Errorf(agentlab.CodeInvalid, "the offset is negative").WithField("offset")
	}
	t := s.topic(jobID)
	defer s.untopic(jobID, t)
	t.write.Lock()
	defer t.write.Unlock()
	f, err := s.logs.OpenFile(logFile(jobID), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return 0, false, fault(err, "open the agent log")
	}
	defer func() { err = errors.Join(err, fault(f.Close(), "write the agent log")) }()
	st, err := f.Stat()
	if err != nil {
		return 0, false, fault(err, "look at the agent log")
	}
	size = st.Size()
	if size >= s.limits.LogBytes {
		return size, true, nil
	}
	if offset > size {
		return size, false, agentlab.Errorf(agentlab.CodeConflict, "the log ends at %d, before %d", size, offset).WithField("offset")
	}
	p = p[min(int64(len(p)), size-offset):]
	if len(p) == 0 {
		return size, false, nil
	}
	if err := s.room(); err != nil {
		return size, false, err
	}
	if full = size+int64(len(p)) >= s.limits.LogBytes; full {
		p = append(p[:s.limits.LogBytes-size:s.limits.LogBytes-size], logFullNote...)
	}
	n, err := f.WriteAt(p, size)
	if n > 0 {
		t.wake()
	}
	return size + int64(n), full, fault(err, "write the agent log")
}

// wakeLog makes readers that follow a job's log check again whether the job
// has ended.
func (s *Service) wakeLog(jobID string) {
	s.mu.Lock()
	t := s.topics[jobID]
	s.mu.Unlock()
	if t != nil {
		t.wake()
	}
}

// Log returns a reader of a job's agent log from offset. Without follow it
// ends at the current end of the log; otherwise Read waits for more until the
// job or ctx has ended. It checks whether the job has ended at the end of the
// log, at wakeLog, and about every second.
func (s *Service) Log(ctx context.Context, jobID string, offset int64, follow bool) (io.ReadCloser, error) {
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return nil, err
	}
	if offset < 0 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "the offset is negative").WithField("offset")
	}
	ctx, cancel := context.WithCancel(ctx)
	return &logReader{ctx: ctx, cancel: cancel, s: s, jobID: jobID, off: offset, last: !follow, t: s.topic(jobID)}, nil
}

type logReader struct {
	ctx    context.Context
	cancel context.CancelFunc
	s      *Service
	jobID  string
	t      *logTopic
	f      *os.File // nil until the log exists
	off    int64
	last   bool // the next read finds the final end
	once   sync.Once
}

const followPoll = time.Second

func (r *logReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		changed := r.t.wait() // before the read, so that no change is missed
		n, err := r.poll(p)
		if n > 0 || err != nil {
			return n, err
		}
		if r.last {
			return 0, io.EOF
		}
		j, err := r.s.store.Job(r.ctx, r.jobID)
		if err != nil {
			return 0, err
		}
		if r.last = j.Status.Final(); r.last {
			continue
		}
		select {
		case <-changed:
		case <-time.After(followPoll):
		case <-r.ctx.Done():
			return 0, r.ctx.Err()
		}
	}
}

func (r *logReader) poll(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	if r.f == nil {
		f, err := openRegular(r.s.logs, logFile(r.jobID))
		if errors.Is(err, fs.ErrNotExist) {
			return 0, nil
		}
		if err != nil {
			return 0, fault(err, "open the agent log")
		}
		r.f = f
	}
	n, err := r.f.ReadAt(p, r.off)
	r.off += int64(n)
	if n > 0 || err == io.EOF {
		return n, nil
	}
	return 0, fault(err, "read the agent log")
}

// Close ends a waiting Read.
func (r *logReader) Close() error {
	r.cancel()
	var err error
	r.once.Do(func() {
		r.s.untopic(r.jobID, r.t)
		if r.f != nil {
			err = r.f.Close()
		}
	})
	return err
}
