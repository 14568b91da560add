package stream_test

import (
	"bufio"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// duplex is a connection of two pipes, which has a half close.
type duplex struct {
	net.Conn // what is written
	in       net.Conn
}

func (d duplex) Read(p []byte) (int, error)        { return d.in.Read(p) }
func (d duplex) SetReadDeadline(t time.Time) error { return d.in.SetReadDeadline(t) }
func (d duplex) CloseWrite() error                 { return d.Conn.Close() }
func (d duplex) Close() error                      { return errors.Join(d.Conn.Close(), d.in.Close()) }

func pair(half bool) (a, b net.Conn) {
	a, b = net.Pipe()
	if !half {
		return a, b
	}
	c, d := net.Pipe()
	return duplex{a, c}, duplex{d, b}
}

// spliced returns the outer ends of two connections that are spliced, and when
// Splice has returned.
func spliced(half bool) (near, far net.Conn, done chan struct{}) {
	near, a := pair(half)
	far, b := pair(half)
	done = make(chan struct{})
	go func() {
		defer close(done)
		stream.Splice(a, b)
	}()
	return near, far, done
}

func say(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Errorf("say %q: %v", text, err)
	}
}

// heard reads until the other end has ended.
func heard(c net.Conn) string {
	b, _ := io.ReadAll(c) // an error is an end too
	return string(b)
}

func TestSplice(t *testing.T) {
	for name, run := range map[string]func(t *testing.T, near, far net.Conn){
		"near ends, far answers": func(t *testing.T, near, far net.Conn) {
			go func() {
				say(t, near, "question")
				_ = stream.CloseWrite(near)
			}()
			if got := heard(far); got != "question" {
				t.Errorf("far heard %q", got)
			}
			go func() { say(t, far, "answer"); _ = far.Close() }()
			if got := heard(near); got != "answer" {
				t.Errorf("near heard %q", got)
			}
		},
		"far ends while near writes": func(t *testing.T, near, far net.Conn) {
			go func() { say(t, far, "exit 3"); _ = far.Close() }()
			if got := heard(near); got != "exit 3" {
				t.Errorf("near heard %q", got)
			}
			for range 100 {
				say(t, near, strings.Repeat("x", 1000)) // does not fail
			}
			_ = near.Close()
		},
		"far takes nothing more, but speaks": func(t *testing.T, near, far net.Conn) {
			_ = far.(duplex).in.Close()
			say(t, near, "lost")
			say(t, near, "lost too")
			go func() { say(t, far, "why"); _ = far.Close() }()
			if got := heard(near); got != "why" {
				t.Errorf("near heard %q", got)
			}
			_ = near.Close()
		},
		"near is gone": func(_ *testing.T, near, far net.Conn) {
			_ = near.Close()
			_ = heard(far)
			_ = far.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far, done := spliced(true)
				start := time.Now()
				run(t, near, far)
				<-done
				if d := time.Since(start); d != 0 {
					t.Errorf("it took %v", d)
				}
			})
		})
	}
}

// A connection whose reading fails ends the other one's input, too.
func TestSplicePassesOnAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, a := pair(true)
		far, b := pair(true)
		go stream.Splice(a, b)
		_ = a.SetReadDeadline(time.Now())
		if got := heard(far); got != "" {
			t.Errorf("heard %q", got)
		}
		_ = far.Close()
	})
}

// When near is reset, nothing can be answered: far is closed, also if it never
// ends by itself.
func TestSpliceClosesFarWhenNearIsReset(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	near, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	say(t, a, "not read, so that a close is a reset")
	far, b := pair(true)
	done := make(chan struct{})
	go func() { defer close(done); stream.Splice(a, b) }()
	_ = near.Close()
	select {
	case <-done:
	case <-time.After(guard.Patience):
		t.Error("the idle far side is not closed")
		_ = far.Close()
		<-done
	}
}

// near has 5 s to close, however silent or talkative it is.
func TestSpliceLingers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far, done := spliced(true)
		start := time.Now()
		_ = far.Close()
		if got := heard(near); got != "" {
			t.Errorf("heard %q", got)
		}
		<-done
		if d := time.Since(start); d != 5*time.Second {
			t.Errorf("it took %v", d)
		}
	})
}

// Without a half close, an end of one is an end of both.
func TestSpliceWithoutHalfClose(t *testing.T) {
	synctest.Test(t, func(*testing.T) {
		near, far, done := spliced(false)
		_ = near.Close()
		_ = heard(far)
		<-done
		near, far, done = spliced(false)
		_ = far.Close()
		_ = heard(near)
		<-done
	})
}

func TestReadError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(true)
		go say(t, b, "head\nbody")
		r := bufio.NewReader(a)
		if line, err := r.ReadString('\n'); line != "head\n" || err != nil {
			t.Fatalf("%q, %v", line, err)
		}
		c := stream.Unread(a, r)
		if err := stream.CloseWrite(c); err != nil {
			t.Error(err)
		}
		go func() { say(t, b, " and more"); _ = b.Close() }()
		if got := heard(c); got != "body and more" {
			t.Errorf("heard %q", got)
		}
		if c := stream.Unread(a, r); c != a {
			t.Error("wrapped, with nothing to give")
		}
	})
}
