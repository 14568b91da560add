//go:build linux

package guestd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

const (
	// pingEvery is the interval of pings on an idle stream, so that a lost
	// client is noticed even while the process reads no input.
	pingEvery = 10 * time.Second
	// drainIdle limits the wait for output of a process that has exited
	// while another process keeps its output open.
	drainIdle = 200 * time.Millisecond
	drainMax  = 5 * time.Second
	pipeMax   = 1 << 20     // bytes that a pipe can hold
	lingerMax = time.Minute // for a client that is slow to read
)

func (s *Server) handleExec(w http.ResponseWriter, r *http.Request) {
	var req guestapi.ExecRequest
	if !decode(w, r, &req) {
		return
	}
	a, err := s.account(req.User)
	if err != nil {
		fail(w, err)
		return
	}
	s.awaitStaged(r.Context(), a)
	env := s.secretEnv(a)
	maps.Copy(env, req.Env)
	req.Env = env
	cmd, err := s.command(req, a)
	if err != nil {
		fail(w, err)
		return
	}
	c, end := s.openStream(w, r)
	if c == nil {
		return
	}
	defer end()
	if req.TTY {
		s.execTTY(c, cmd, a, stream.WindowSize{Rows: req.Rows, Cols: req.Cols})
	} else {
		s.execPipes(c, cmd)
	}
}

// openStream returns a client on the request's connection, which end closes.
// It returns nil after an error, which it has answered.
func (s *Server) openStream(w http.ResponseWriter, r *http.Request) (c *client, end func()) {
	conn, in, ok := upgrade(w, r, guestapi.StreamProtocol)
	if !ok {
		return nil, nil
	}
	s.wg.Add(1)
	c = newClient(s.ctx, conn, in)
	return c, func() {
		c.close()
		s.wg.Done()
	}
}

// upgrade changes the request's connection to a stream of the protocol. After an
// error it has answered the request.
func upgrade(w http.ResponseWriter, r *http.Request, protocol string) (net.Conn, *bufio.Reader, bool) {
	if r.Header.Get("Upgrade") != protocol {
		fail(w, agentlab.Errorf(agentlab.CodeInvalid, "an Upgrade to %s is needed", protocol))
		return nil, nil, false
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		fail(w, err)
		return nil, nil, false
	}
	_ = conn.SetDeadline(time.Time{})
	_, err = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+
		protocol+"\r\n\r\n")
	if err != nil {
		_ = conn.Close()
		return nil, nil, false
	}
	return conn, rw.Reader, true
}

// client is the far end of an upgraded connection.
type client struct {
	conn   net.Conn
	in     *stream.Reader
	out    *stream.Writer
	server context.Context
	gone   context.Context // done when the client or the server has ended
	cut    context.CancelFunc
	exited bool // the exit status was sent
	wg     sync.WaitGroup
}

func newClient(ctx context.Context, conn net.Conn, in io.Reader) *client {
	c := &client{conn: conn, in: stream.NewReader(in), out: stream.NewWriter(conn), server: ctx}
	c.gone, c.cut = context.WithCancel(ctx)
	c.wg.Go(func() {
		t := time.NewTicker(pingEvery)
		defer t.Stop()
		for {
			select {
			case <-c.gone.Done():
				return
			case <-t.C:
				if c.out.Frame(stream.Ping, nil) != nil {
					c.cut()
				}
			}
		}
	})
	return c
}

// receive passes every frame to fn until the client disconnects or fn fails.
func (c *client) receive(fn func(stream.Type, []byte) error) {
	c.wg.Go(func() {
		defer c.cut()
		for {
			t, p, err := c.in.Next()
			if err != nil || fn(t, p) != nil {
				return
			}
		}
	})
}

func (c *client) exit(st stream.ExitStatus) { c.exited = c.out.JSON(stream.Exit, st) == nil }

// close closes the connection and waits for the goroutines of newClient and
// receive.
func (c *client) close() {
	c.cut()
	if c.exited {
		c.linger()
	}
	_ = c.conn.Close()
	_ = c.conn.SetDeadline(time.Unix(1, 0)) // wakes readers that Close does not
	c.wg.Wait()
}

// linger drops what the client still sends, until the client has closed the connection.
// It may send input that the command did not read. A TCP connection that is closed
// with unread data is reset, and then the client loses the output and the exit status
// that have not reached it.
func (c *client) linger() {
	_ = c.conn.SetReadDeadline(time.Now().Add(lingerMax))
	stop := context.AfterFunc(c.server, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_ = stream.CloseWrite(c.conn)
	c.wg.Wait()
	_, _ = io.Copy(io.Discard, c.conn)
}

// waitAsync runs cmd.Wait; the channel is closed when the process has ended.
func waitAsync(cmd *exec.Cmd) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait() // its outcome is in cmd.ProcessState
	}()
	return done
}

// execPipes runs cmd with separate standard streams.
func (s *Server) execPipes(c *client, cmd *exec.Cmd) {
	var ours, theirs []*os.File
	closeAll := func(files []*os.File) {
		for _, f := range files {
			_ = f.Close()
		}
	}
	defer func() { closeAll(ours) }()
	for i := range 3 {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(theirs)
			c.exit(stream.ExitStatus{Code: 126, Error: err.Error()})
			return
		}
		if i == 0 {
			r, w = w, r
		}
		ours, theirs = append(ours, r), append(theirs, w)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs[0], theirs[1], theirs[2]
	err := s.startCmd(cmd)
	closeAll(theirs)
	if err != nil {
		c.exit(startFailure(cmd, err))
		return
	}
	done := waitAsync(cmd)
	stdin := ours[0]
	c.receive(func(t stream.Type, p []byte) error {
		switch t {
		case stream.Stdin: // it is not an error if the process has closed its input
			_, _ = stdin.Write(p)
		case stream.StdinEOF:
			_ = stdin.Close()
		case stream.Signal:
			signalByName(cmd.Process.Pid, done, string(p))
		}
		return nil
	})
	var out sync.WaitGroup
	out.Go(func() { drain(c.out.Data(stream.Stdout), ours[1], done) })
	out.Go(func() { drain(c.out.Data(stream.Stderr), ours[2], done) })
	s.finish(c, cmd, done, &out, func() { closeAll(ours) })
}

// execTTY runs cmd on a new terminal.
func (s *Server) execTTY(c *client, cmd *exec.Cmd, a account, size stream.WindowSize) {
	ptmx, err := s.startTTY(cmd, a, size)
	if err != nil {
		c.exit(startFailure(cmd, err))
		return
	}
	defer func() { _ = ptmx.Close() }()
	done := waitAsync(cmd)
	c.receive(ttyInput(ptmx, cmd.Process.Pid, done))
	var out sync.WaitGroup
	out.Go(func() { drain(c.out.Data(stream.Stdout), ptmx, done) })
	s.finish(c, cmd, done, &out, func() { _ = ptmx.Close() })
}

// finish waits for the process and its output and sends its exit status, or
// kills it if the client disconnects first.
func (s *Server) finish(c *client, cmd *exec.Cmd, done <-chan struct{}, out *sync.WaitGroup, closeOut func()) {
	drained := make(chan struct{})
	go func() { out.Wait(); close(drained) }()
	select {
	case <-done:
		select {
		case <-drained:
			c.exit(exitStatus(cmd.ProcessState))
			return
		case <-c.gone.Done():
		}
	case <-c.gone.Done():
	}
	_ = c.conn.Close()
	killSession(s.ctx, cmd.Process.Pid, s.cfg.Grace)
	<-done
	closeOut()
	<-drained
}

// drain copies f to w until its end. Once done is closed, which is when the
// process has exited, it copies the available output and does not wait for more. It
// copies all that the process has written, however slowly w takes it.
func drain(w io.Writer, f output, done <-chan struct{}) {
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-done:
			_ = f.SetReadDeadline(time.Now().Add(drainIdle))
		case <-stop:
		}
	}()
	buf := make([]byte, 32<<10)
	var until time.Time
	rest := pipeMax // what the process may have left in f
	for {
		select {
		case <-done:
			if until.IsZero() {
				until = time.Now().Add(drainMax)
			}
			if rest <= 0 && time.Now().After(until) {
				return
			}
			_ = f.SetReadDeadline(time.Now().Add(drainIdle))
		default:
		}
		n, err := f.Read(buf)
		if n > 0 {
			if _, werr := w.Write(buf[:n]); werr != nil {
				return
			}
		}
		if !until.IsZero() {
			rest -= n
		}
		if err == nil || (errors.Is(err, os.ErrDeadlineExceeded) && until.IsZero()) {
			continue // the first deadline only signals that the process has ended
		}
		return
	}
}

// output is the end of a pipe or terminal from which the output of a process is read.
type output interface {
	io.Reader
	SetReadDeadline(t time.Time) error
}

// startTTY starts cmd on a new terminal that belongs to a.
func (s *Server) startTTY(cmd *exec.Cmd, a account, size stream.WindowSize) (*os.File, error) {
	if cmd.Err != nil {
		return nil, cmd.Err
	}
	ptmx, tty, err := pty.Open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = tty.Close() }()
	setSize(ptmx, size)
	if os.Geteuid() == 0 {
		if err := tty.Chown(int(a.uid), -1); err != nil {
			_ = ptmx.Close()
			return nil, err
		}
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr.Setctty = true
	if err := s.startCmd(cmd); err != nil {
		_ = ptmx.Close()
		return nil, err
	}
	return ptmx, nil
}

func setSize(ptmx *os.File, size stream.WindowSize) {
	if size.Rows == 0 || size.Cols == 0 {
		size = stream.WindowSize{Rows: 24, Cols: 80}
	}
	_ = pty.Setsize(ptmx, &pty.Winsize{Rows: size.Rows, Cols: size.Cols})
}

// ttyInput returns the handler of the frames for a process on a terminal.
func ttyInput(ptmx *os.File, pid int, done <-chan struct{}) func(stream.Type, []byte) error {
	return func(t stream.Type, p []byte) error {
		switch t {
		case stream.Stdin:
			_, _ = ptmx.Write(p)
		case stream.StdinEOF:
			_, _ = ptmx.Write([]byte{0x04}) // end of file, as typed
		case stream.Resize:
			var size stream.WindowSize
			if err := json.Unmarshal(p, &size); err != nil {
				return err
			}
			setSize(ptmx, size) // the kernel notifies the programs
		case stream.Signal:
			signalByName(pid, done, string(p))
		}
		return nil
	}
}
