package backendtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/control"
)

// connections checks the connections to and from a guest. A connection stays
// open after its context has ended.
func (s *suite) connections(ref backend.Ref) {
	ctx, cancel := context.WithCancel(s.ctx())
	defer cancel()
	conn, err := s.d.DialControl(ctx, ref)
	s.ok("DialControl", err)
	defer conn.Close()
	l, err := s.d.ListenGuest(ctx, ref)
	s.ok("ListenGuest", err)
	defer l.Close()
	cancel()

	s.ok("a connection to the guest", s.deadlineWorks(conn))
	_, err = control.New(func(context.Context) (net.Conn, error) { return conn, nil }).Health(s.ctx())
	s.ok("health on a connection whose context has ended", err)

	served := make(chan error, 1)
	go func() { served <- s.serveClosed(l) }()
	out, code := s.exec(ref, "curl", "-s", "--max-time", "10", s.d.Info().ControllerURL+"/probe")
	_ = l.Close()
	s.ok("a connection from the guest", <-served)
	if code != 0 || out != "late" {
		s.Errorf("curl: exit code %d, answer %q", code, out)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		s.Errorf("Accept of a closed listener: %v", err)
	}
}

// serveClosed serves one connection after its listener was closed.
func (s *suite) serveClosed(l net.Listener) error {
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := errors.Join(l.Close(), s.deadlineWorks(conn)); err != nil {
		return err
	}
	if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
		return err
	}
	_, err = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nlate")
	return err
}

// deadlineWorks checks addresses and deadlines, which http.Server needs.
func (s *suite) deadlineWorks(conn net.Conn) error {
	if conn.RemoteAddr() == nil || conn.LocalAddr() == nil {
		return errors.New("it has no addresses")
	}
	if err := conn.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
		return err
	}
	_, err := conn.Read(make([]byte, 1))
	if e, ok := errors.AsType[net.Error](err); !ok || !e.Timeout() {
		return fmt.Errorf("a read after its deadline: %w", err)
	}
	return conn.SetReadDeadline(time.Now().Add(s.cfg.Patience))
}
