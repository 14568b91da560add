package bounded

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/time/rate"
)

// OldSuffix is the suffix of a log's older half.
const OldSuffix = ".1"

// Log appends to a file of bounded size. At half of its size the file becomes
// the older half (NAME.1) and replaces the previous one, so at least the
// newest half is always kept. Data above a rate of perSecond bytes, with a
// burst of one half, is dropped and counted in the log.
type Log struct {
	mu      sync.Mutex
	path    string
	half    int64
	rate    *rate.Limiter
	f       *os.File
	size    int64
	dropped int64
	closed  bool
	now     func() time.Time
}

// OpenLog opens or creates the log at path, of at most size bytes. perSecond 0
// means no limit.
func OpenLog(path string, size int64, perSecond float64, now func() time.Time) (*Log, error) {
	limit := rate.Inf
	if perSecond > 0 {
		limit = rate.Limit(perSecond)
	}
	l := &Log{path: path, half: size / 2, rate: rate.NewLimiter(limit, int(size/2)), now: now}
	return l, l.open()
}

func (l *Log) open() error {
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return err
	}
	l.f, l.size = f, st.Size()
	return nil
}

// Write never fails and waits only for the disk, because its log must not
// delay a writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(p)
	if l.closed || n == 0 {
		return n, nil
	}
	if !l.rate.AllowN(l.now(), n) || l.f == nil && l.open() != nil { // as at the last call
		l.dropped += int64(n)
		return n, nil
	}
	if before := l.dropped; before > 0 {
		if l.dropped = 0; !l.append(fmt.Appendf(nil, "\n[%d bytes dropped]\n", before)) {
			l.dropped = before + int64(n)
			return n, nil
		}
	}
	if !l.append(p) {
		l.dropped += int64(n)
	}
	return n, nil
}

// append writes p, to the next half if it does not fit into this one, and
// reports whether it did. Data that cannot be written, because of a full disk
// or a lack of file descriptors, is lost; later writes work again.
func (l *Log) append(p []byte) bool {
	if int64(len(p)) > l.half {
		p = p[int64(len(p))-l.half:]
	}
	if l.size+int64(len(p)) > l.half && l.size > 0 {
		_ = l.f.Close()
		l.f = nil
		renamed := os.Rename(l.path, l.path+OldSuffix)
		if l.open() != nil || renamed != nil {
			return false
		}
	}
	n, err := l.f.Write(p)
	l.size += int64(n)
	return err == nil
}

// Close closes the file; later writes have no effect.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.f == nil {
		return nil
	}
	f := l.f
	l.f = nil
	return f.Close()
}
