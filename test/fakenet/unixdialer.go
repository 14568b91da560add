package fakenet

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// UnixDialer is a gate.Dialer that asks another process to dial: each connection
// is one to the unix socket at Path, on which it writes "NETWORK ADDR\n" and
// reads "ok\n" or "err TEXT\n". Afterwards the connection carries the bytes of a
// TCP stream unchanged, and each UDP datagram (or the data of an ICMP echo
// request or reply) with its length as a prefix of two bytes in big-endian
// order.
type UnixDialer struct {
	Path string
}

// maxDialLine is the maximum length of one line of the dial protocol, in
// bytes.
const maxDialLine = 1024

// DialContext implements gate.Dialer. If the other process refuses, the error
// has agentlab.CodeUnavailable and its text.
func (u UnixDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if strings.ContainsAny(network, " \n") || strings.Contains(addr, "\n") {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not an address", network+" "+addr)
	}
	conn, err := sockpath.Dial(ctx, u.Path)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	err = handshake(conn, network+" "+addr)
	if !stop() {
		return nil, ctx.Err() // conn is closed or will be
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	if strings.HasPrefix(network, "udp") || network == "icmp" {
		return NewDatagramConn(conn), nil
	}
	return conn, nil
}

// DialPrivate implements gate.PrivateDialer.
func (u UnixDialer) DialPrivate(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	return u.DialContext(ctx, "tcp", to.String())
}

// DialHost implements gate.PrivateDialer.
func (u UnixDialer) DialHost(ctx context.Context, port uint16) (net.Conn, error) {
	return u.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
}

func handshake(conn net.Conn, request string) error {
	if _, err := io.WriteString(conn, request+"\n"); err != nil {
		return err
	}
	line, err := ReadDialLine(conn)
	if err != nil {
		return err
	}
	if line == "ok" {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "%s", strings.TrimPrefix(line, "err "))
}

// ReadDialLine reads one line of the dial protocol, without its end, and not
// a byte more, because what follows belongs to the connection.
func ReadDialLine(r io.Reader) (string, error) {
	var line []byte
	var b [1]byte
	for len(line) < maxDialLine {
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		line = append(line, b[0])
	}
	return "", errors.New("a line of the dial protocol is too long")
}

// DatagramConn carries datagrams on a stream, each with its length as a prefix
// of two bytes in big-endian order. Reads must not be concurrent.
type DatagramConn struct {
	net.Conn
	write sync.Mutex
	read  struct {
		buf  [2]byte
		have int // bytes of the next length that were read before a deadline
		left int // bytes of a partially read datagram that are missing; 0 between datagrams
		body []byte
	}
}

// NewDatagramConn returns a DatagramConn on a stream.
func NewDatagramConn(stream net.Conn) *DatagramConn { return &DatagramConn{Conn: stream} }

// Read reads one datagram; the part that does not fit into p is lost. A read
// that a deadline ends can be repeated without data loss.
func (c *DatagramConn) Read(p []byte) (int, error) {
	r := &c.read
	if r.left == 0 {
		for r.have < len(r.buf) {
			n, err := c.Conn.Read(r.buf[r.have:])
			r.have += n
			if err != nil && r.have < len(r.buf) {
				return 0, err
			}
		}
		r.left = int(binary.BigEndian.Uint16(r.buf[:]))
		r.body = make([]byte, 0, r.left)
	}
	for r.left > 0 {
		n, err := c.Conn.Read(r.body[len(r.body):cap(r.body)])
		r.body, r.left = r.body[:len(r.body)+n], r.left-n
		if err != nil && r.left > 0 {
			return 0, err
		}
	}
	r.have = 0
	n := copy(p, r.body)
	r.body = nil
	return n, nil
}

// Write sends p as one datagram of at most 65535 bytes.
func (c *DatagramConn) Write(p []byte) (int, error) {
	if len(p) > 0xffff {
		return 0, agentlab.Errorf(agentlab.CodeInvalid, "%d bytes are more than a datagram holds", len(p))
	}
	c.write.Lock()
	defer c.write.Unlock()
	framed := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(p)), uint16(len(p)))
	n, err := c.Conn.Write(append(framed, p...))
	return max(n-2, 0), err
}
