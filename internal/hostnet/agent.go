package hostnet

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// ServeAgent serves the network of this machine to a controller on another
// machine, over in and out (the streams of ssh), until the controller
// disconnects or ctx ends. The rules stay loaded then; whatever needs the
// agent is denied until the next agent runs.
func ServeAgent(ctx context.Context, in io.Reader, out io.Writer, cfg Config) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	mux, err := yamux.Server(rw{in, out, func() error { cancel(); return nil }}, muxConfig())
	if err != nil {
		return err
	}
	defer mux.Close()
	stop := context.AfterFunc(ctx, func() { _ = mux.Close() })
	defer stop()
	// One agent at a time: an old agent that still changes the rules would
	// revert changes of the new one.
	unlock, err := lockAgent(ctx, cfg.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	a := &agent{mux: mux, cfg: cfg}
	defer a.close() // before the next agent may begin
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for {
		stream, err := mux.AcceptStream()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		wg.Go(func() { a.serve(ctx, stream) })
	}
}

// agentLockTimeout is how long an agent waits for the previous one, which notices
// within this time that its controller is gone.
const agentLockTimeout = 30 * time.Second

// lockAgent waits until no other agent works on this machine.
func lockAgent(ctx context.Context, dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, agentLockTimeout)
	defer cancel()
	l, err := lock.Acquire(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return nil, err
	}
	return func() { _ = l.Unlock() }, nil
}

// agent serves one controller.
type agent struct {
	mux *yamux.Session
	cfg Config

	mu    sync.Mutex
	local *Local
}

func (a *agent) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.local != nil {
		_ = a.local.Close()
	}
}

// hello uses the controller's configuration of the bridge and its networks:
// all nodes have the same configuration.
func (a *agent) hello(c call) error {
	if c.Version != agentVersion {
		return agentlab.Errorf(agentlab.CodeUnsupported, "this agent uses version %d and the controller version %d", agentVersion, c.Version).
			WithHint("install the same agentlabd on both")
	}
	if c.Network == nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "the network is missing")
	}
	network := *c.Network
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.local != nil {
		return agentlab.Errorf(agentlab.CodeConflict, "hello was already sent")
	}
	cfg := a.cfg
	cfg.Network = func() (nft.Config, error) { return network, network.Validate() }
	a.local = New(cfg)
	a.local.Claim()
	return nil
}

// serve answers one call.
func (a *agent) serve(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	var c call
	if err := readCall(conn, &c); err != nil {
		_ = writeFrame(conn, answer{Failed: failureOf(err)})
		return
	}
	if c.Op == opHello {
		_ = writeFrame(conn, answer{Failed: failureOf(a.hello(c))})
		return
	}
	a.mu.Lock()
	l := a.local
	a.mu.Unlock()
	if l == nil {
		_ = writeFrame(conn, answer{Failed: failureOf(agentlab.Errorf(agentlab.CodeConflict, "hello must be the first call"))})
		return
	}
	if c.Op == opDial {
		guest, err := l.Dial(ctx, c.To)
		if writeFrame(conn, answer{Failed: failureOf(err)}) == nil && err == nil {
			stop := context.AfterFunc(ctx, func() { _ = guest.Close() })
			defer stop()
			stream.Splice(conn, guest)
		} else if err == nil {
			_ = guest.Close()
		}
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // the caller has given up if its end is closed
		_, _ = conn.Read(make([]byte, 1))
		cancel()
	}()
	out, err := a.do(ctx, l, c)
	out.Failed = failureOf(err)
	_ = writeFrame(conn, out)
}

func (a *agent) do(ctx context.Context, l *Local, c call) (out answer, err error) {
	switch c.Op {
	case opReady:
		err = l.Ready(ctx)
	case opPut:
		if len(c.Guests) != 1 {
			return out, agentlab.Errorf(agentlab.CodeInvalid, "only one guest can be added per call")
		}
		err = l.Put(ctx, c.Guests[0])
	case opRestore:
		err = l.Restore(ctx, c.Guests)
	case opDrop:
		err = l.Drop(ctx, c.ID)
	case opListen:
		err = a.listen(ctx, l, c)
	case opLease:
		out.Addr, err = l.Lease(ctx, c.MAC)
	case opRecords:
		out.Records, err = l.EgressLog(ctx, c.ID, c.After, c.Limit)
	default:
		err = agentlab.Errorf(agentlab.CodeUnsupported, "this agent does not support %q", c.Op)
	}
	return out, err
}

// listen forwards the connections of a guest to the controller.
func (a *agent) listen(ctx context.Context, l *Local, c call) error {
	ln, err := l.Listen(ctx, c.ID)
	if err != nil {
		return err
	}
	go func() {
		defer ln.Close()
		for {
			conn, err := ln.Accept()
			if err != nil {
				return // the next listener was opened, or the guest or this agent has ended
			}
			go a.pass(conn, c)
		}
	}()
	go func() { // a Local does not close connections that it has returned
		<-a.mux.CloseChan()
		_ = ln.Close()
	}()
	return nil
}

func (a *agent) pass(guest net.Conn, c call) {
	far, err := a.mux.Open()
	if err == nil {
		err = writeFrame(far, call{Op: opGuest, ID: c.ID})
	}
	if err != nil {
		_ = guest.Close()
		return
	}
	stream.Splice(guest, far)
}
