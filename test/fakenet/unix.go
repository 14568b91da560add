package fakenet

import (
	"errors"
	"io"
	"net"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// ServeUnix serves the dial protocol of UnixDialer on a unix socket, so
// that shims in other processes reach this Net. It returns at once; the socket
// lives until the Net is closed.
func (n *Net) ServeUnix(path string) error {
	l, err := sockpath.Listen(path, 0o600)
	if err != nil {
		return err
	}
	n.onClose(func() { _ = l.Close() })
	n.spawn(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			n.serve(conn, n.serveDial)
		}
	})
	return nil
}

func (n *Net) serveDial(conn net.Conn) {
	line, err := ReadDialLine(conn)
	if err != nil {
		return
	}
	network, addr, _ := strings.Cut(line, " ")
	inside, err := n.DialContext(n.ctx, network, addr)
	if err != nil {
		_, _ = io.WriteString(conn, "err "+strings.ReplaceAll(err.Error(), "\n", " ")+"\n")
		return
	}
	defer func() { _ = inside.Close() }()
	if _, err := io.WriteString(conn, "ok\n"); err != nil {
		return
	}
	outer := conn
	if strings.HasPrefix(network, "udp") || network == "icmp" {
		outer = NewDatagramConn(conn)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		pipe(inside, outer)
	}()
	pipe(outer, inside)
	<-done
}

// pipe copies one direction and passes the end of stream on. Datagrams have
// none: their flow ends as a whole.
func pipe(dst, src net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		size, err := src.Read(buf)
		if size > 0 {
			if _, err := dst.Write(buf[:size]); err != nil {
				break
			}
		}
		if err != nil {
			if half, ok := dst.(interface{ CloseWrite() error }); ok && errors.Is(err, io.EOF) && half.CloseWrite() == nil {
				return
			}
			break
		}
	}
	_ = dst.Close()
	_ = src.Close()
}
