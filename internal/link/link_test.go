package link

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	testguard "github.com/agentlab-vm/agentlab/test/guard"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestYamuxConfigIsValid(t *testing.T) {
	for _, keep := range []bool{true, false} {
		if err := yamux.VerifyConfig(yamuxConfig(keep)); err != nil {
			t.Error(err)
		}
	}
}

// echo serves every stream of g by sending back what arrives.
func echo(g *GuestLink) {
	for {
		c, err := g.Accept()
		if err != nil {
			return
		}
		go func() {
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}()
	}
}

func startHost(t *testing.T, s *serial) (*HostLink, *end) {
	e := s.host()
	h := Host(t.Context(), e)
	t.Cleanup(func() { _ = h.Close() })
	return h, e
}

func startGuest(t *testing.T, s *serial) (*GuestLink, *end) {
	e := s.guest()
	g := Guest(e)
	done := make(chan struct{})
	go func() { defer close(done); echo(g) }()
	t.Cleanup(func() { _ = g.Close(); <-done })
	return g, e
}

// tryEcho sends p on a new stream and wants it back.
func tryEcho(ctx context.Context, h *HostLink, p []byte) error {
	if err := h.WaitUp(ctx); err != nil {
		return err
	}
	c, err := h.Dial(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(testguard.Patience)); err != nil {
		return err
	}
	werr := make(chan error, 1)
	go func() {
		_, err := c.Write(p)
		werr <- err
	}()
	got := make([]byte, len(p))
	_, rerr := io.ReadFull(c, got)
	if rerr != nil {
		_ = c.Close()
	}
	if err := errors.Join(<-werr, rerr); err != nil {
		return err
	}
	if !bytes.Equal(got, p) {
		return errors.New("what came back differs")
	}
	return nil
}

// untilEcho repeats tryEcho: after a restart the first tries may meet a
// session that is just being dropped.
func untilEcho(ctx context.Context, t *testing.T, h *HostLink, p []byte) {
	t.Helper()
	for {
		err := tryEcho(ctx, h, p)
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("the link never recovered: %v", err)
		}
	}
}

// nasty returns n bytes rich in esc and in what looks like records.
func nasty(n int) []byte {
	var b bytes.Buffer
	for b.Len() < n {
		b.Write([]byte{esc, esc, recSync, esc, escData, 'x', esc, recReset})
		b.Write(record(recSync, newNonce()))
		b.Write(record(recAck, newNonce()))
		_ = binary.Write(&b, binary.BigEndian, rand.Uint64())
	}
	return b.Bytes()[:n]
}

func TestStreams(t *testing.T) {
	s := newSerial(64 << 10)
	h, _ := startHost(t, s)
	startGuest(t, s)
	ctx := testguard.Context(t)
	if err := h.WaitUp(ctx); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if err := tryEcho(ctx, h, nasty(i*50_000+1)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestDialBeforeUp(t *testing.T) {
	s := newSerial(1 << 10)
	h, _ := startHost(t, s)
	if _, err := h.Dial(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Fatalf("got %v, want unavailable", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.WaitUp(ctx); agentlab.CodeOf(err) != agentlab.CodeTimeout {
		t.Fatalf("got %v, want timeout", err)
	}
}

func TestGuestLong(t *testing.T) {
	// A host that waited long has filled the queue with SYNC records; the
	// guest that comes at last must still find the way.
	s := newSerial(512)
	h, _ := startHost(t, s)
	ctx := testguard.Context(t)
	for { // the queue is full
		s.toGuest.mu.Lock()
		n := len(s.toGuest.buf)
		s.toGuest.mu.Unlock()
		if n >= 2*(nonceLen+2) {
			break
		}
		if ctx.Err() != nil {
			t.Fatal("no SYNC is sent")
		}
		time.Sleep(time.Millisecond)
	}
	startGuest(t, s)
	untilEcho(ctx, t, h, nasty(1000))
}

// TestRestartAnywhere kills each side after every number of written bytes in
// the range that covers handshake, headers and data, and starts it again.
func TestRestartAnywhere(t *testing.T) {
	for _, side := range []string{"host", "guest"} {
		t.Run(side, func(t *testing.T) {
			for cut := 1; cut < 400; cut += 1 + cut/40 {
				restartAt(t, side, cut)
			}
		})
	}
}

func restartAt(t *testing.T, side string, cut int) {
	s := newSerial(256)
	ctx := testguard.Context(t)
	he, ge := s.host(), s.guest()
	if side == "host" {
		he.budget = cut
	} else {
		ge.budget = cut
	}
	h := newHost(ctx, he, time.Millisecond)
	g := Guest(ge)
	go echo(g)
	dead := h.done
	if side == "guest" {
		dead = g.done
	}
	for alive := true; alive; { // make traffic until the budget ends it
		tctx, cancel := context.WithTimeout(ctx, time.Second)
		go func() {
			select {
			case <-dead:
				cancel()
			case <-tctx.Done():
			}
		}()
		go func(h *HostLink) { _ = tryEcho(tctx, h, nasty(300)) }(h)
		select {
		case <-dead:
			alive = false
		case <-tctx.Done():
		}
		cancel()
	}
	if side == "host" {
		_ = h.Close()
		h = newHost(ctx, s.host(), time.Millisecond)
	} else {
		_ = g.Close()
		g = Guest(s.guest())
		go echo(g)
	}
	untilEcho(ctx, t, h, nasty(5000))
	_ = h.Close()
	_ = g.Close()
}

func TestStreamsEndWithTheirSession(t *testing.T) {
	s := newSerial(64 << 10)
	h, _ := startHost(t, s)
	g1, _ := startGuest(t, s)
	ctx := testguard.Context(t)
	if err := h.WaitUp(ctx); err != nil {
		t.Fatal(err)
	}
	c, err := h.Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_ = g1.Close()
	startGuest(t, s)
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Fatal("a stream of the dead guest delivered data")
	}
	untilEcho(ctx, t, h, []byte("again"))
}

func TestHostRestartEndsGuestStreams(t *testing.T) {
	s := newSerial(64 << 10)
	ctx := testguard.Context(t)
	h1 := Host(ctx, s.host())
	g := Guest(s.guest())
	defer func() { _ = g.Close() }()
	got := make(chan net.Conn, 1)
	go func() {
		if c, err := g.Accept(); err == nil {
			got <- c
		}
	}()
	if err := h1.WaitUp(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := h1.Dial(ctx); err != nil {
		t.Fatal(err)
	}
	c := <-got
	_ = h1.Close()
	h2 := Host(ctx, s.host())
	defer func() { _ = h2.Close() }()
	_ = c.SetReadDeadline(time.Now().Add(testguard.Patience))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, errSessionGone) {
		t.Fatalf("got %v: the host that opened it is gone", err)
	}
}

// TestGarbage puts noise in front of the guest's first word and in the middle
// of a session.
func TestGarbage(t *testing.T) {
	s := newSerial(1 << 20)
	noise := s.guest()
	_, _ = noise.Write(nasty(100_000))
	h, _ := startHost(t, s)
	startGuest(t, s)
	ctx := testguard.Context(t)
	untilEcho(ctx, t, h, nasty(10_000))
	_, _ = noise.Write(bytes.Repeat([]byte{0x7f}, 1000))
	untilEcho(ctx, t, h, nasty(10_000))
}

// TestStuckGuest has a guest that acknowledges and then never reads: callers
// get their deadlines, Close does not hang.
func TestStuckGuest(t *testing.T) {
	s := newSerial(128)
	h, _ := startHost(t, s)
	ge := s.guest()
	ctx := testguard.Context(t)
	buf := make([]byte, nonceLen+2)
	if _, err := io.ReadFull(ge, buf); err != nil {
		t.Fatal(err)
	}
	_, _ = ge.Write(append([]byte{esc, recAck}, buf[2:]...))
	if err := h.WaitUp(ctx); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	for {
		c, err := h.Dial(short)
		if err != nil {
			if agentlab.CodeOf(err) != agentlab.CodeTimeout {
				t.Fatalf("got %v, want timeout", err)
			}
			break
		}
		go func() { _, _ = c.Write(make([]byte, 1000)) }()
	}
	_ = h.Close()
}

func TestStreamLimit(t *testing.T) {
	s := newSerial(64 << 10)
	h, _ := startHost(t, s)
	startGuest(t, s)
	ctx := testguard.Context(t)
	if err := h.WaitUp(ctx); err != nil {
		t.Fatal(err)
	}
	for range maxStreams {
		if _, err := h.Dial(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Dial(ctx); agentlab.CodeOf(err) != agentlab.CodeBusy {
		t.Fatalf("got %v, want busy", err)
	}
}

func TestEndOfContextAndConn(t *testing.T) {
	s := newSerial(1 << 10)
	ctx, cancel := context.WithCancel(t.Context())
	h := Host(ctx, s.host())
	cancel()
	<-h.done
	if h.Err() == nil {
		t.Fatal("no reason given")
	}
	_ = h.Close()
	e := s.host()
	h = Host(t.Context(), e)
	_ = e.Close()
	<-h.done
	_ = h.Close()
}

func TestGuard(t *testing.T) {
	frame := func(typ byte, flags uint16, id, length uint32) []byte {
		b := []byte{0, typ}
		b = binary.BigEndian.AppendUint16(b, flags)
		b = binary.BigEndian.AppendUint32(b, id)
		return binary.BigEndian.AppendUint32(b, length)
	}
	data := append(frame(frameData, 0, 1, 3), "abc"...)
	for _, tc := range []struct {
		name string
		in   []byte
		ok   bool
	}{
		{"data", data, true},
		{"ack", frame(frameWindow, flagACK, 1, 0), true},
		{"ping answer", frame(framePing, flagACK, 0, 7), true},
		{"go away", frame(frameGoAway, 0, 0, 0), true},
		{"stream of the guest", frame(frameWindow, flagSYN, 2, 0), false},
		{"stream by data", frame(frameData, flagSYN, 2, 0), false},
		{"ping", frame(framePing, flagSYN, 0, 7), false},
		{"version", append([]byte{1}, data[1:]...), false},
		{"type", frame(4, 0, 0, 0), false},
		{"huge", frame(frameData, 0, 1, window+1), false},
		{"huge window", frame(frameWindow, 0, 1, window+1), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			all := append(append([]byte{}, data...), tc.in...)
			for cut := range all { // wherever the chunks end
				var g guard
				one, err := g.take(bytes.Clone(all[:cut]))
				if len(one) != 0 && len(one) != len(data) {
					t.Fatalf("cut at %d: %d bytes are let through", cut, len(one))
				}
				var two []byte
				if err == nil {
					two, err = g.take(bytes.Clone(all[cut:]))
				}
				if (err == nil) != tc.ok {
					t.Fatalf("cut at %d: %v", cut, err)
				}
				if tc.ok && !bytes.Equal(append(bytes.Clone(one), two...), all) {
					t.Fatalf("cut at %d: %x and %x of %x", cut, one, two, all)
				}
			}
		})
	}
}

// FuzzDecoder checks that data survives escaping however it is cut, and that
// a record after any garbage is found.
func FuzzDecoder(f *testing.F) {
	f.Add([]byte("hello\xc1S\xc1\x00\xc1R"), uint16(3))
	f.Add(nasty(200), uint16(77))
	f.Fuzz(func(t *testing.T, p []byte, cut uint16) {
		n := newNonce()
		wire := append(append([]byte{}, p...), record(recSync, n)...) // garbage, then a record
		wire = append(wire, escape(nil, p)...)                        // then data
		want := sha256.Sum256(p)
		var d decoder
		var got []byte
		var seen bool
		at := min(int(cut), len(wire))
		for _, part := range [][]byte{wire[:at], wire[at:]} {
			d.feed(bytes.Clone(part), func(b []byte) { got = append(got, b...) },
				func(kind byte, m nonce) {
					got, seen = nil, kind == recSync && m == n
				})
		}
		if !seen || sha256.Sum256(got) != want {
			t.Fatalf("seen %v, got %q, want %q", seen, got, p)
		}
	})
}

// FuzzHost lets a guest say anything after a proper handshake.
func FuzzHost(f *testing.F) {
	f.Add([]byte{0, 1, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0}, true)
	f.Add([]byte{0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0, 2, 'h', 'i'}, true)
	f.Add(nasty(300), false)
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0}, false) // a header, and nothing of what it announces
	f.Fuzz(func(t *testing.T, p []byte, escaped bool) {
		s := newSerial(1 << 20)
		ge := s.guest()
		ctx := testguard.Context(t)
		h := Host(ctx, s.host())
		buf := make([]byte, nonceLen+2)
		if _, err := io.ReadFull(ge, buf); err != nil {
			t.Fatal(err)
		}
		_, _ = ge.Write(append([]byte{esc, recAck}, buf[2:]...))
		if err := h.WaitUp(ctx); err != nil {
			t.Fatal(err)
		}
		c, err := h.Dial(ctx)
		if escaped {
			p = escape(nil, p)
		}
		_, _ = ge.Write(p)
		if err == nil {
			_ = c.SetDeadline(time.Now().Add(time.Millisecond))
			_, _ = c.Read(make([]byte, 100)) // the guest must not stretch it for ever
			_ = c.Close()
		}
		_ = h.Close()
		_ = ge.Close()
	})
}

func BenchmarkEcho(b *testing.B) {
	s := newSerial(64 << 10)
	h := Host(b.Context(), s.host())
	g := Guest(s.guest())
	go echo(g)
	ctx := b.Context()
	if err := h.WaitUp(ctx); err != nil {
		b.Fatal(err)
	}
	p := nasty(1 << 20)
	b.SetBytes(2 << 20)
	for b.Loop() {
		if err := tryEcho(ctx, h, p); err != nil {
			b.Fatal(err)
		}
	}
	_ = h.Close()
	_ = g.Close()
}
