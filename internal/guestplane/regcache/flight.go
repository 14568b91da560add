package regcache

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
)

// flight is one download. Guests that want the same object share it: they read
// from its file while it is written. The last byte is held back until the object
// is complete and verified.
type flight struct {
	cancel context.CancelFunc
	ended  chan struct{} // closed when the download has ended
	begun  chan struct{} // closed when the answer is known, or after a failure

	// Set before begun is closed.
	status int // of the upstream; 200, or what is passed on; 304: the stored object is valid
	meta   meta
	size   int64 // -1: not known
	body   []byte
	failed error // before the answer

	mu      sync.Mutex
	draft   *draft // nil if it is not stored
	written int64
	rest    io.Reader // what follows written, if it cannot be written; for one reader
	done    bool
	err     error // why it is not complete
	changed chan struct{}
	readers int
}

func newFlight(cancel context.CancelFunc) *flight {
	return &flight{cancel: cancel, ended: make(chan struct{}), begun: make(chan struct{}), changed: make(chan struct{})}
}

// join adds a reader. It returns false if the last one has left, or if only one can have
// the rest of the content.
func (f *flight) join() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.readers < 0 || f.rest != nil {
		return false
	}
	f.readers++
	return true
}

// leave removes a reader. Without readers the download is cancelled.
func (f *flight) leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.readers--; f.readers == 0 {
		f.readers = -1
		f.cancel()
		f.release()
	}
}

// over records that the download has ended.
func (f *flight) over() {
	close(f.ended)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.release()
}

// release closes the file if neither the download nor a reader uses it.
func (f *flight) release() {
	select {
	case <-f.ended:
	default:
		return
	}
	if f.readers < 0 && f.draft != nil {
		_ = f.draft.file.Close()
	}
}

func (f *flight) update(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
	close(f.changed)
	f.changed = make(chan struct{})
}

// errTaken is the error of a reader of a download that cannot be stored and that
// another guest reads.
var errTaken = errors.New("the download cannot be shared, because it cannot be stored")

// reader reads the content of a flight from its beginning.
type reader struct {
	f   *flight
	ctx context.Context
	pos int64
	own io.Reader // the rest, for this reader only
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	for {
		if r.own != nil {
			return r.own.Read(p)
		}
		f := r.f
		f.mu.Lock()
		visible, d, changed := f.written, f.draft, f.changed
		if !f.done && f.rest == nil {
			visible-- // the last byte is held back
		}
		switch {
		case f.err != nil:
			err := f.err
			f.mu.Unlock()
			return 0, err
		case r.pos < visible:
			f.mu.Unlock()
			n, err := d.file.ReadAt(p[:min(int64(len(p)), visible-r.pos)], d.off+r.pos)
			r.pos += int64(n)
			if n > 0 {
				err = nil
			}
			return n, err
		case f.done:
			f.mu.Unlock()
			return 0, io.EOF
		case f.rest != nil:
			r.own, f.rest = f.rest, eofReader{}
			f.mu.Unlock()
			continue
		}
		f.mu.Unlock()
		select {
		case <-changed:
		case <-r.ctx.Done():
			return 0, context.Cause(r.ctx)
		}
	}
}

// eofReader is the rest that another reader has taken.
type eofReader struct{}

// Read implements io.Reader.
func (eofReader) Read([]byte) (int, error) { return 0, errTaken }

// receive copies the body of an answer to the draft, and verifies it. most is the
// maximum size of a stored object.
func (f *flight) receive(ctx context.Context, body io.Reader, want digest, most int64, count func(int64)) error {
	sum := want.hash()
	buf := make([]byte, 64<<10)
	for {
		n, err := body.Read(buf)
		if n > 0 {
			count(int64(n))
			_, _ = sum.Write(buf[:n])
			if werr := f.write(buf[:n], most); werr != nil {
				return f.handOver(ctx, buf[:n], body, func(p []byte, end bool) error {
					count(int64(len(p)))
					_, _ = sum.Write(p)
					if end {
						return want.verify(sum)
					}
					return nil
				})
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			if f.size >= 0 && f.size != f.written {
				return io.ErrUnexpectedEOF
			}
			return want.verify(sum)
		default:
			return err
		}
	}
}

func (f *flight) write(p []byte, most int64) error {
	if f.draft == nil || f.written+int64(len(p)) > most {
		return errTaken
	}
	if err := f.draft.st.space.Keep(); err != nil {
		return err
	}
	if _, err := f.draft.file.WriteAt(p, f.draft.off+f.written); err != nil {
		return err
	}
	f.update(func() { f.written += int64(len(p)) })
	return nil
}

// handOver gives the rest of a body that cannot be stored to one reader, and waits
// until it has read it. The last part is held back until check, which gets each part
// and the end, accepts it.
func (f *flight) handOver(ctx context.Context, first []byte, body io.Reader, check func(part []byte, end bool) error) error {
	pr, pw := io.Pipe()
	f.update(func() { f.rest = pr })
	stop := context.AfterFunc(ctx, func() { _ = pw.CloseWithError(context.Cause(ctx)) })
	defer stop()
	held := append([]byte(nil), first...)
	var err error
	for buf := make([]byte, 64<<10); err == nil; {
		n, rerr := body.Read(buf)
		end := errors.Is(rerr, io.EOF)
		if err = check(buf[:n], end); err == nil && n > 0 {
			_, err = pw.Write(held)
			held = append(held[:0], buf[:n]...)
		}
		if err == nil && end {
			_, err = pw.Write(held)
		}
		if err == nil {
			err = rerr
		}
	}
	if errors.Is(err, io.EOF) {
		_ = pw.Close()
	} else {
		_ = pw.CloseWithError(err)
	}
	return errTaken
}

// fail ends the flight before its answer.
func (f *flight) fail(err error) {
	f.failed = err
	close(f.begun)
}

// begin publishes the answer.
func (f *flight) begin(resp *http.Response, m meta) {
	f.status, f.meta, f.size = resp.StatusCode, m, resp.ContentLength
	close(f.begun)
}
