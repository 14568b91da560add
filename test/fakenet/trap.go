package fakenet

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// Answer is what a Responder says, on every protocol.
const Answer = "agentlab fake internet"

// answerLimit bounds one connection of a Responder.
const answerLimit = guard.Patience

// Responder answers whatever is said to it: TLS with a certificate for the
// name that was asked for, HTTP with a page, anything else with Answer. It is
// what stands at every address that a guest must not reach, so that a leak is
// an answer and no mere silence.
type Responder struct {
	// Heard is called with the names in connections: TLS server names and
	// HTTP Hosts. nil is allowed.
	Heard func(name string)

	ca    *CA
	mu    sync.Mutex
	certs map[string]*tls.Certificate
}

// NewResponder returns a Responder.
func NewResponder(heard func(name string)) (*Responder, error) {
	ca, err := NewCA()
	if err != nil {
		return nil, err
	}
	return &Responder{Heard: heard, ca: ca, certs: map[string]*tls.Certificate{}}, nil
}

// ServeStream answers one connection. The caller closes it.
func (r *Responder) ServeStream(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(answerLimit))
	b := bufio.NewReader(conn)
	first, err := b.Peek(1)
	if err != nil {
		return
	}
	if first[0] != 0x16 {
		r.plain(conn, b)
		return
	}
	c := tls.Server(&buffered{Conn: conn, r: b}, &tls.Config{GetCertificate: r.certificate, MinVersion: tls.VersionTLS12})
	if c.Handshake() == nil {
		r.plain(c, bufio.NewReader(c))
	}
	_ = c.Close()
}

// plain answers HTTP, or anything that begins with a line.
func (r *Responder) plain(conn net.Conn, b *bufio.Reader) {
	line, err := b.Peek(max(1, min(b.Buffered(), 512)))
	if err != nil {
		return
	}
	if !bytes.HasPrefix(line, []byte("GET ")) {
		_, _ = io.WriteString(conn, Answer+"\r\n")
		return
	}
	req, err := http.ReadRequest(b)
	if err != nil {
		return
	}
	r.heard(req.Host)
	_, _ = io.WriteString(conn, "HTTP/1.1 200 "+Answer+"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}

// ServePackets answers every datagram of a connection.
func (r *Responder) ServePackets(conn net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		if _, err := conn.Read(buf); err != nil {
			return
		}
		if _, err := io.WriteString(conn, Answer); err != nil {
			return
		}
	}
}

func (r *Responder) heard(name string) {
	if host, _, err := net.SplitHostPort(name); err == nil {
		name = host
	}
	if r.Heard != nil && name != "" {
		r.Heard(name)
	}
}

func (r *Responder) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	r.heard(hello.ServerName)
	name := hello.ServerName
	if name == "" {
		name = "nobody.example.com"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.certs[name]; c != nil {
		return c, nil
	}
	c, err := r.ca.Issue(name)
	if err != nil {
		return nil, err
	}
	r.certs[name] = &c
	return &c, nil
}

// buffered is a connection whose first bytes were looked at.
type buffered struct {
	net.Conn
	r *bufio.Reader
}

func (b *buffered) Read(p []byte) (int, error) { return b.r.Read(p) }

// ProbeWorld makes the Net the reference world of the probe table: its names
// resolve, and every address, public or not, answers on every port.
func (n *Net) ProbeWorld() error {
	trap, err := NewResponder(func(name string) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.outside.Names = append(n.outside.Names, strings.ToLower(name))
	})
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.trap = trap
	for _, name := range probetest.ReferenceNames() {
		n.zone[canonical(name.Name)] = name.Addrs
		if len(name.Later) > 0 {
			n.later[canonical(name.Name)] = name.Later
		}
	}
	return nil
}

// Outside returns what came to this Net since it was made, or since the last
// ForgetOutside.
func (n *Net) Outside() probe.Outside {
	n.mu.Lock()
	defer n.mu.Unlock()
	return probe.Outside{Flows: slices.Clone(n.outside.Flows), Names: slices.Clone(n.outside.Names)}
}

// ForgetOutside resets Outside, and the answers of names that change.
func (n *Net) ForgetOutside() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.outside = probe.Outside{}
	clear(n.asked)
}
