//go:build linux

package control_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"net"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// ending is a listener whose connections say when the guest ends them.
type ending struct {
	net.Listener
	ended chan struct{}
}

func (l ending) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return &endingConn{Conn: c, ended: sync.OnceFunc(func() { close(l.ended) })}, err
}

type endingConn struct {
	net.Conn
	ended func()
}

func (c *endingConn) Close() error      { defer c.ended(); return c.Conn.Close() }
func (c *endingConn) CloseWrite() error { defer c.ended(); return stream.CloseWrite(c.Conn) }

// overTCP serves the control server of g over TCP with TLS, as in a guest that has an
// address. It returns a client for one connection, and when the guest has ended that.
func (g *guest) overTCP(t *testing.T) (*control.Client, <-chan struct{}) {
	t.Helper()
	public, controller, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, own, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := link.ListenTLS(tcp, public, own)
	if err != nil {
		t.Fatal(err)
	}
	l := ending{accepted, make(chan struct{})}
	served := make(chan struct{})
	go func() { defer close(served); _ = g.server.Serve(l) }()
	t.Cleanup(func() { _ = l.Close(); <-served })
	return control.New(func(ctx context.Context) (net.Conn, error) {
		raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", tcp.Addr().String())
		if err != nil {
			return nil, err
		}
		return link.DialTLS(ctx, raw, controller)
	}), l.ended
}

// A client that still sends input when the command has ended receives the output and the
// exit status. Over TCP they would be lost if the guest closed the connection with
// unread input.
func TestExecEndsBeforeItsInput(t *testing.T) {
	g := newGuest(t, nil)
	c, ended := g.overTCP(t)
	conn, err := c.Exec(guard.Context(t), sh("head -c 300000 /dev/zero; exit 7"))
	if err != nil {
		t.Fatal(err)
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		w := stream.NewWriter(conn)
		for data := make([]byte, stream.MaxPayload); w.Frame(stream.Stdin, data) == nil; {
		}
	}()
	select { // most of the output is in the guest's kernel, because it is not read here
	case <-ended:
	case <-guard.Context(t).Done():
		t.Fatal("the guest does not end the connection")
	}
	p := follow(t, conn)
	out, _, st := p.result(t)
	_ = conn.Close()
	<-written
	if len(out) != 300_000 || st.Code != 7 {
		t.Errorf("exit %+v, %d bytes", st, len(out))
	}
}
