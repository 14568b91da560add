package daemon

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"sync"

	"github.com/agentlab-vm/agentlab"
)

// Bounds of the daemon's own log.
const (
	logBytes = 8 << 20 // of one file
	logFiles = 3       // agentlabd.log, .1 and .2
)

// logFile is a file that is moved to .1 when it is full. A line is never
// split, and a log that cannot be written stops nothing.
type logFile struct {
	path string
	max  int64

	mu   sync.Mutex
	f    *os.File
	size int64
}

func openLog(path string, maxBytes int64) (*logFile, error) {
	l := &logFile{path: path, max: maxBytes}
	if err := l.open(); err != nil {
		e := agentlab.Errorf(agentlab.CodeDenied, "cannot write the daemon's log: %w", err)
		return nil, e.WithHint("make %s writable", path)
	}
	return l, nil
}

func (l *logFile) open() error {
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	l.f, l.size = f, st.Size()
	return nil
}

// Write appends p, which is one or more whole lines.
func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		return 0, fs.ErrClosed
	}
	if l.size > 0 && l.size+int64(len(p)) > l.max {
		l.rotate()
	}
	n, err := l.f.Write(p)
	l.size += int64(n)
	return n, err
}

// rotate begins a new file. Where that is not possible the old one goes on,
// and it is tried again when as much has been written once more.
func (l *logFile) rotate() {
	l.size = 0
	for i := logFiles - 1; i > 0; i-- {
		from := l.path
		if i > 1 {
			from += "." + strconv.Itoa(i-1)
		}
		if err := os.Rename(from, l.path+"."+strconv.Itoa(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
	old := l.f
	if l.open() == nil {
		_ = old.Close()
	}
}

// Close closes the file. Later writes fail.
func (l *logFile) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		return nil
	}
	err := l.f.Close()
	l.f = nil
	return err
}
