package fake

import (
	"context"
	"io"
	"sync"
)

// maxConsole is the maximum size of a console log in bytes.
const maxConsole = 16 << 10

// console is the bounded log of a VM's console.
type console struct {
	mu     sync.Mutex
	buf    []byte
	start  int64 // offset of buf[0] since the beginning
	closed bool
	more   chan struct{} // closed and replaced when there is more; nil if no reader waits
}

func (c *console) line(s string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.buf = append(append(c.buf, s...), '\r', '\n')
	if over := len(c.buf) - maxConsole; over > 0 {
		c.buf = append([]byte(nil), c.buf[over:]...)
		c.start += int64(over)
	}
	c.wake()
}

func (c *console) wake() {
	if c.more != nil {
		close(c.more)
		c.more = nil
	}
}

func (c *console) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.buf)
}

func (c *console) restore(s string) { c.buf = []byte(s) }

func (c *console) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.wake()
}

func (c *console) reader(ctx context.Context, follow bool) io.ReadCloser {
	ctx, cancel := context.WithCancel(ctx)
	return &consoleReader{c: c, ctx: ctx, cancel: cancel, follow: follow}
}

type consoleReader struct {
	c      *console
	ctx    context.Context
	cancel context.CancelFunc
	follow bool
	at     int64
}

// Read reads on; with follow it waits for more.
func (r *consoleReader) Read(p []byte) (int, error) {
	for {
		r.c.mu.Lock()
		r.at = max(r.at, r.c.start)
		if n := copy(p, r.c.buf[r.at-r.c.start:]); n > 0 || len(p) == 0 {
			r.at += int64(n)
			r.c.mu.Unlock()
			return n, nil
		}
		if !r.follow || r.c.closed {
			r.c.mu.Unlock()
			return 0, io.EOF
		}
		if r.c.more == nil {
			r.c.more = make(chan struct{})
		}
		more := r.c.more
		r.c.mu.Unlock()
		select {
		case <-more:
		case <-r.ctx.Done():
			return 0, io.EOF
		}
	}
}

// Close ends a waiting Read.
func (r *consoleReader) Close() error {
	r.cancel()
	return nil
}
