package link

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

const (
	esc      = 0xC1 // never occurs in UTF-8 text, so that text does not become longer
	escData  = 0x00 // esc escData means the data byte esc
	recSync  = 'S'
	recAck   = 'A'
	recReset = 'R'

	nonceLen = 32       // hex digits
	chunk    = 32 << 10 // bytes read or written at once

	keepAliveEvery = 15 * time.Second
	// peerTimeout limits the wait for the answer to a ping or a write; it
	// is long because an emulated guest on a busy host is slow.
	peerTimeout = 45 * time.Second
)

var errSessionGone = errors.New("link: the session has ended")

type nonce [nonceLen]byte

func newNonce() (n nonce) {
	var b [nonceLen / 2]byte
	_, _ = rand.Read(b[:]) // never fails
	hex.Encode(n[:], b[:])
	return n
}

func record(kind byte, n nonce) []byte {
	return append([]byte{esc, kind}, n[:]...)
}

// escape appends p to dst with every esc escaped.
func escape(dst, p []byte) []byte {
	for {
		i := bytes.IndexByte(p, esc)
		if i < 0 {
			return append(dst, p...)
		}
		dst = append(append(dst, p[:i+1]...), escData)
		p = p[i+1:]
	}
}

// decoder splits received bytes into data and records. Its zero value is ready
// to use.
type decoder struct {
	state byte // 0: data; esc: after an esc; else the kind of the record being read
	n     nonce
	got   int
}

// feed decodes p in place and calls data with the bytes between records (valid
// during the call) and rec with each record, in order. An unknown or broken
// record is skipped.
func (d *decoder) feed(p []byte, data func([]byte), rec func(kind byte, n nonce)) {
	out := p[:0]
	flush := func() {
		if len(out) > 0 {
			data(out)
		}
		out = p[:0]
	}
	for len(p) > 0 {
		if d.state == 0 {
			i := bytes.IndexByte(p, esc)
			if i < 0 {
				out = append(out, p...)
				break
			}
			out = append(out, p[:i]...)
			p, d.state = p[i+1:], esc
			continue
		}
		b := p[0]
		p = p[1:]
		switch {
		case b == esc:
			d.state = esc // the interrupted record is invalid
		case d.state != esc:
			d.n[d.got] = b
			if d.got++; d.got == nonceLen {
				kind := d.state
				d.state = 0
				flush()
				rec(kind, d.n)
				out = p[:0]
			}
		case b == escData:
			out, d.state = append(out, esc), 0
		case b == recSync || b == recAck:
			d.state, d.got = b, 0
		case b == recReset:
			d.state = 0
			flush()
			rec(recReset, nonce{})
			out = p[:0]
		default:
			d.state = 0
		}
	}
	flush()
}

// writer owns the writing half of the byte stream. It writes in one goroutine,
// so that no caller blocks in a write that the peer does not read.
type writer struct {
	w    io.Writer
	done <-chan struct{}
	data chan writeReq
	wake chan struct{}

	mu    sync.Mutex
	reset bool
	rec   []byte // newest SYNC or ACK to send; it replaces an older one
}

type writeReq struct {
	conn *sessConn
	buf  *[]byte
	err  chan error // buffered
}

var bufPool = sync.Pool{New: func() any { b := make([]byte, 0, chunk+chunk/8); return &b }}

func newWriter(w io.Writer, done <-chan struct{}) *writer {
	return &writer{w: w, done: done, data: make(chan writeReq), wake: make(chan struct{}, 1)}
}

// control queues a record; it never blocks. Records overtake queued data.
func (w *writer) control(kind byte, n nonce) {
	w.mu.Lock()
	if kind == recReset {
		w.reset = true
	} else {
		w.rec = record(kind, n)
	}
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *writer) flushControl() error {
	w.mu.Lock()
	var p []byte
	if w.reset {
		p = append(p, esc, recReset)
	}
	p = append(p, w.rec...)
	w.reset, w.rec = false, nil
	w.mu.Unlock()
	if len(p) == 0 {
		return nil
	}
	_, err := w.w.Write(p)
	return err
}

func (w *writer) run() error {
	for {
		select {
		case <-w.done:
			return nil
		case <-w.wake:
			if err := w.flushControl(); err != nil {
				return err
			}
		case req := <-w.data:
			if err := w.flushControl(); err != nil {
				return err
			}
			err := errSessionGone
			if !req.conn.isClosed() {
				_, err = w.w.Write(*req.buf)
			}
			*req.buf = (*req.buf)[:0]
			bufPool.Put(req.buf)
			req.err <- err
			if err != nil && !errors.Is(err, errSessionGone) {
				return err
			}
		}
	}
}

// sessConn is the connection of one yamux session. It ends with the session,
// while the byte stream below stays open.
type sessConn struct {
	w      *writer
	pr     *io.PipeReader
	pw     *io.PipeWriter
	once   sync.Once
	closed chan struct{}
}

func newSessConn(w *writer) *sessConn {
	c := &sessConn{w: w, closed: make(chan struct{})}
	c.pr, c.pw = io.Pipe()
	return c
}

func (c *sessConn) isClosed() bool {
	select {
	case <-c.closed:
		return true
	default:
		return false
	}
}

// deliver passes received bytes to the session; it returns when they were read
// or the session has ended.
func (c *sessConn) deliver(p []byte) { _, _ = c.pw.Write(p) }

func (c *sessConn) Read(p []byte) (int, error) { return c.pr.Read(p) }

func (c *sessConn) Write(p []byte) (int, error) {
	total := 0
	for len(p) > 0 {
		n := min(len(p), chunk)
		buf := bufPool.Get().(*[]byte)
		*buf = escape(*buf, p[:n])
		req := writeReq{conn: c, buf: buf, err: make(chan error, 1)}
		select {
		case c.w.data <- req:
		case <-c.closed:
			return total, errSessionGone
		case <-c.w.done:
			return total, io.ErrClosedPipe
		}
		select {
		case err := <-req.err:
			if err != nil {
				return total, err
			}
		case <-c.closed:
			return total, errSessionGone
		case <-c.w.done:
			return total, io.ErrClosedPipe
		}
		total += n
		p = p[n:]
	}
	return total, nil
}

// Close closes the session's connection. Queued bytes that the writer has not
// started to write are dropped.
func (c *sessConn) Close() error {
	c.once.Do(func() {
		close(c.closed)
		_ = c.pr.CloseWithError(io.EOF)
		_ = c.pw.CloseWithError(io.EOF)
	})
	return nil
}

// silentLog drops yamux's log, because a guest controls its content on the
// host.
type silentLog struct{}

func (silentLog) Print(...any)          {}
func (silentLog) Printf(string, ...any) {}
func (silentLog) Println(...any)        {}

// yamuxConfig returns the configuration of one end of a session. When the guest closes a
// stream, the host may not have read all of it yet, because its client is slow: only the
// host, which does not trust the guest, forgets streams that the other end does not close.
func yamuxConfig(host bool) *yamux.Config {
	c := yamux.DefaultConfig()
	c.EnableKeepAlive = host
	c.KeepAliveInterval = keepAliveEvery
	c.ConnectionWriteTimeout = peerTimeout
	c.StreamCloseTimeout = 0
	if host {
		c.StreamCloseTimeout = 30 * time.Second
	}
	c.LogOutput = nil
	c.Logger = silentLog{}
	return c
}
