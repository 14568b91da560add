package agentcmd

import (
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab/internal/redact"
)

// logFile is the agent's log. It is redacted and of limited size, and writing
// to it never fails, because an agent must not end because of a full disk.
type logFile struct {
	mu   sync.Mutex
	red  *redact.Writer
	sink *logSink
}

type logSink struct {
	f    *os.File
	left int64
}

func openLog(p Plan) (*logFile, error) {
	f, err := os.OpenFile(p.LogFile, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	sink := &logSink{f: f, left: p.LogBytes - st.Size()}
	return &logFile{sink: sink, red: p.redactor().Writer(sink)}, nil
}

func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = l.red.Write(p) // the sink never fails
	return len(p), nil
}

// end writes the buffered output and closes the file.
func (l *logFile) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.red.Flush()
	_ = l.sink.f.Close()
}

func (s *logSink) Write(p []byte) (int, error) {
	if s.left <= 0 {
		return len(p), nil
	}
	n := int(min(int64(len(p)), s.left))
	if s.left -= int64(n); s.left == 0 {
		_, _ = s.f.Write(append(p[:n:n], "\n[agentlab: the log limit is reached; the rest is dropped]\n"...))
	} else if _, err := s.f.Write(p[:n]); err != nil {
		_, _ = fmt.Fprintf(s.f, "\n[agentlab: the log is cut here: %v]\n", err)
		s.left = 0
	}
	return len(p), nil
}

// keyWatch finds out whether the log of an agent says that the model rejects its key.
type keyWatch struct{ rejected atomic.Bool }

// of returns log, watched.
func (k *keyWatch) of(a agent, log io.Writer) io.Writer {
	if a.rejected == nil {
		return log
	}
	return &watchedLog{log: log, lines: lines{max: 4 << 10, each: func(line []byte, _ bool) error {
		if a.rejected.MatchString(string(line)) {
			k.rejected.Store(true)
		}
		return nil
	}}}
}

// watchedLog is a log whose lines are read, too. It is safe for concurrent use, as the log.
type watchedLog struct {
	log   io.Writer
	mu    sync.Mutex
	lines lines
}

func (w *watchedLog) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, _ = w.lines.Write(p) // its function never fails
	return w.log.Write(p)
}

// output copies an agent's standard output and error to the log. An agent
// whose output is rendered has one pipe for each, others one for both, which
// keeps their order.
type output struct {
	stdout, stderr *os.File // the agent's ends
	readers        []*os.File
	done           chan struct{}
}

func newOutput(log io.Writer, render func(io.Writer) io.WriteCloser) (*output, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	o := &output{stdout: w, stderr: w, readers: []*os.File{r}, done: make(chan struct{})}
	var wg sync.WaitGroup
	if render == nil {
		wg.Go(func() { _, _ = io.Copy(log, r) })
	} else {
		r2, w2, err := os.Pipe()
		if err != nil {
			_ = r.Close()
			_ = w.Close()
			return nil, err
		}
		o.stderr, o.readers = w2, append(o.readers, r2)
		whole := &lines{max: 64 << 10, each: func(line []byte, _ bool) error {
			_, err := log.Write(append(line, '\n'))
			return err
		}}
		for src, dst := range map[*os.File]io.WriteCloser{r: render(log), r2: whole} {
			wg.Go(func() {
				_, _ = io.Copy(dst, src)
				_ = dst.Close()
			})
		}
	}
	go func() {
		wg.Wait()
		close(o.done)
	}()
	return o, nil
}

// started closes the agent's ends in this process.
func (o *output) started() {
	_ = o.stdout.Close()
	if o.stderr != o.stdout {
		_ = o.stderr.Close()
	}
}

// drain waits until all output is in the log, for at most d: a process that
// escaped may keep the pipe open.
func (o *output) drain(d time.Duration) {
	select {
	case <-o.done:
	case <-time.After(d):
		for _, r := range o.readers {
			_ = r.SetReadDeadline(time.Now())
		}
		<-o.done
	}
	for _, r := range o.readers {
		_ = r.Close()
	}
}
