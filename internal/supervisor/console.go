package supervisor

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab/internal/bounded"
)

// followEvery is how often a followed console is polled.
const followEvery = 100 * time.Millisecond

// logReader reads a bounded log: first its older half, then the newer one. When
// following, it continues with new output, across changes of halves.
type logReader struct {
	ctx    context.Context
	cancel context.CancelFunc
	path   string
	follow bool
	f      *os.File // the file being read; nil before the first read
	newest bool     // f is the newer half
}

// Read returns io.EOF at the end, when ctx ends, and when the log's directory
// was removed.
func (r *logReader) Read(p []byte) (int, error) {
	for {
		if r.ctx.Err() != nil {
			return 0, io.EOF
		}
		if r.f == nil {
			if err := r.first(); err != nil {
				return 0, err
			}
		}
		if r.f != nil {
			// current is called before the read: if f is no longer the newer half,
			// the end that the read finds is final.
			current := r.newest && r.current()
			n, err := r.f.Read(p)
			if n > 0 || (err != nil && !errors.Is(err, io.EOF)) {
				return n, err
			}
			if !current {
				if err := r.next(); err != nil {
					return 0, err
				}
				continue
			}
		}
		if !r.follow || !r.exists() {
			return 0, io.EOF
		}
		if pause(r.ctx, followEvery) != nil {
			return 0, io.EOF
		}
	}
}

func (r *logReader) open(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fault(err, "cannot open the log")
	}
	if r.f != nil {
		_ = r.f.Close()
	}
	r.f = f
	return nil
}

func (r *logReader) first() error {
	if err := r.open(r.path + bounded.OldSuffix); err != nil || r.f != nil {
		return err
	}
	r.newest = true
	return r.open(r.path)
}

// next continues with the newer half.
func (r *logReader) next() error {
	old := r.f
	if err := r.open(r.path); err != nil {
		return err
	}
	if r.f == old { // the sandbox was removed, or one half is renamed and the next does not exist yet
		if !r.follow || !r.exists() || pause(r.ctx, followEvery/10) != nil {
			return io.EOF
		}
		return nil
	}
	r.newest = true
	return nil
}

// current reports whether the file being read still has the log's name.
func (r *logReader) current() bool {
	have, err1 := r.f.Stat()
	named, err2 := os.Stat(r.path)
	return err1 == nil && err2 == nil && os.SameFile(have, named)
}

// exists reports whether the log's directory exists.
func (r *logReader) exists() bool {
	_, err := os.Stat(filepath.Dir(r.path))
	return err == nil
}

// Close ends reading. It must not be called concurrently with Read: end the context
// for that.
func (r *logReader) Close() error {
	r.cancel()
	if r.f == nil {
		return nil
	}
	return r.f.Close()
}
