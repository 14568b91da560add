//go:build linux

package guestd

import (
	"context"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

const (
	replayBytes  = 256 << 10
	maxTerminals = 32
	// slowClientWait limits how long a terminal's program waits for its fastest
	// client, so that a client that hangs does not block it for long.
	slowClientWait = time.Second
)

type terminals struct {
	mu   sync.Mutex
	open map[string]*terminal
}

// terminal is a shell on a terminal that stays when its clients disconnect.
type terminal struct {
	ptmx *os.File
	pid  int
	done <-chan struct{} // closed when the shell has ended

	mu     sync.Mutex
	cond   *sync.Cond // any change below
	ring   []byte     // the recent output, between one and two times replayBytes
	total  int64      // bytes of output so far
	read   map[*client]int64
	exited bool
	status stream.ExitStatus
}

func (s *Server) handleAttach(w http.ResponseWriter, r *http.Request) {
	var req guestapi.AttachRequest
	if !decode(w, r, &req) {
		return
	}
	if req.Session == "" {
		req.Session = "main"
	}
	if !made(req.Session, 1, 64, lower+"ABCDEFGHIJKLMNOPQRSTUVWXYZ._-") {
		fail(w, agentlab.Errorf(agentlab.CodeInvalid, "%q is not a session name", req.Session).WithField("session"))
		return
	}
	a, err := s.account("")
	if err != nil {
		fail(w, err)
		return
	}
	s.awaitStaged(r.Context(), a)
	t, err := s.terminal(req, a)
	if err != nil {
		fail(w, err)
		return
	}
	c, end := s.openStream(w, r)
	if c == nil {
		return
	}
	defer end()
	if req.Rows > 0 && req.Cols > 0 {
		setSize(t.ptmx, stream.WindowSize{Rows: req.Rows, Cols: req.Cols})
	}
	c.receive(ttyInput(t.ptmx, t.pid, t.done))
	t.serve(c)
}

// terminal returns the named terminal, and creates it if there is none.
func (s *Server) terminal(req guestapi.AttachRequest, a account) (*terminal, error) {
	s.terms.mu.Lock()
	defer s.terms.mu.Unlock()
	if t := s.terms.open[req.Session]; t != nil {
		return t, nil
	}
	if len(s.terms.open) >= maxTerminals {
		return nil, agentlab.Errorf(agentlab.CodeLimit, "%d terminals are open", maxTerminals)
	}
	cmd, err := s.command(guestapi.ExecRequest{TTY: true, Term: req.Term, Env: s.secretEnv(a)}, a)
	if err != nil {
		return nil, err
	}
	ptmx, err := s.startTTY(cmd, a, stream.WindowSize{Rows: req.Rows, Cols: req.Cols})
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "%s", startFailure(cmd, err).Error)
	}
	t := &terminal{ptmx: ptmx, pid: cmd.Process.Pid, done: waitAsync(cmd), read: make(map[*client]int64)}
	t.cond = sync.NewCond(&t.mu)
	s.terms.open[req.Session] = t
	s.wg.Go(func() {
		stop := context.AfterFunc(s.ctx, func() { killSession(s.ctx, t.pid, s.cfg.Grace) })
		defer stop()
		drain(t, ptmx, t.done)
		<-t.done
		s.terms.mu.Lock()
		delete(s.terms.open, req.Session)
		s.terms.mu.Unlock()
		t.mu.Lock()
		t.exited, t.status = true, exitStatus(cmd.ProcessState)
		t.cond.Broadcast()
		t.mu.Unlock()
		_ = ptmx.Close()
	})
	return t, nil
}

// Write stores output of the terminal. It waits for a short time while even
// the fastest client is almost a whole ring behind.
func (t *terminal) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ring = append(t.ring, p...)
	if len(t.ring) > 2*replayBytes {
		t.ring = append(t.ring[:0], t.ring[len(t.ring)-replayBytes:]...)
	}
	t.total += int64(len(p))
	t.cond.Broadcast()
	if !t.allSlow() {
		return len(p), nil
	}
	late := false
	timer := time.AfterFunc(slowClientWait, func() {
		t.mu.Lock()
		late = true
		t.cond.Broadcast()
		t.mu.Unlock()
	})
	defer timer.Stop()
	for t.allSlow() && !late {
		t.cond.Wait()
	}
	return len(p), nil
}

// allSlow reports whether there are clients and all of them are too slow.
func (t *terminal) allSlow() bool {
	for _, at := range t.read {
		if t.total-at < replayBytes/2 {
			return false
		}
	}
	return len(t.read) > 0
}

// serve shows the terminal to c, from the oldest output kept, until the shell
// ends or c disconnects. A client that falls too far behind misses output.
func (t *terminal) serve(c *client) {
	stop := context.AfterFunc(c.gone, func() {
		t.mu.Lock()
		t.cond.Broadcast()
		t.mu.Unlock()
	})
	defer stop()
	buf := make([]byte, 0, 32<<10)
	t.mu.Lock()
	defer t.mu.Unlock()
	at := t.total - int64(min(replayBytes, len(t.ring)))
	defer func() {
		delete(t.read, c)
		t.cond.Broadcast()
	}()
	for {
		t.read[c] = at
		t.cond.Broadcast()
		for at == t.total && !t.exited && c.gone.Err() == nil {
			t.cond.Wait()
		}
		if c.gone.Err() != nil {
			return
		}
		oldest := t.total - int64(len(t.ring))
		at = max(at, oldest)
		if at == t.total && t.exited {
			st := t.status
			t.mu.Unlock()
			c.exit(st)
			t.mu.Lock()
			return
		}
		off := int(at - oldest)
		buf = append(buf[:0], t.ring[off:min(len(t.ring), off+cap(buf))]...)
		t.mu.Unlock()
		err := c.out.Frame(stream.Stdout, buf)
		t.mu.Lock()
		at += int64(len(buf))
		if err != nil {
			return
		}
	}
}
