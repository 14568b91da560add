package prober

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// connect opens the TCP connection of a probe, which is closed when ctx ends.
func (p *prober) connect(ctx context.Context, a *attempt) (*receivingConn, func(), error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(a.host, a.port))
	if err != nil {
		return nil, nil, err
	}
	a.res.Connected = true
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	return &receivingConn{Conn: conn}, func() { stop(); _ = conn.Close() }, nil
}

// receivingConn is a connection that records whether its peer sent data.
type receivingConn struct {
	net.Conn
	first []byte
}

func (h *receivingConn) Read(b []byte) (int, error) {
	n, err := h.Conn.Read(b)
	if len(h.first) == 0 {
		h.first = append(h.first, b[:n]...)
	}
	return n, err
}

// received records the data of the peer.
func (a *attempt) received(b []byte) error {
	if len(b) == 0 {
		return io.EOF
	}
	a.res.Reached = true
	line, _, _ := strings.Cut(string(b), "\n")
	a.res.Answer = agentlab.OneLine(strings.TrimRight(line, "\r"), maxAnswer)
	return nil
}

// exchange sends text on a new TCP connection and waits for any answer.
func (p *prober) exchange(ctx context.Context, a *attempt, text string) error {
	conn, done, err := p.connect(ctx, a)
	if err != nil {
		return err
	}
	defer done()
	_, werr := io.WriteString(conn, text)
	buf := make([]byte, 512)
	n, err := conn.Read(buf) // a peer may answer and close before it has read everything
	if n > 0 {
		return a.received(buf[:n])
	}
	return errors.Join(werr, err)
}

func (p *prober) tcp(ctx context.Context, a *attempt) error { return p.exchange(ctx, a, probeText) }

func (p *prober) http(ctx context.Context, a *attempt) error {
	if strings.ContainsAny(a.Name, "\r\n") {
		return errors.New("a Host has no line breaks")
	}
	if a.Name == "" {
		return p.exchange(ctx, a, "GET / HTTP/1.0\r\n\r\n")
	}
	return p.exchange(ctx, a, "GET / HTTP/1.1\r\nHost: "+a.Name+"\r\nConnection: close\r\n\r\n")
}

// tls also counts an alert as an answer, because it came from the target.
func (p *prober) tls(ctx context.Context, a *attempt) error {
	conn, done, err := p.connect(ctx, a)
	if err != nil {
		return err
	}
	defer done()
	c := tls.Client(conn, &tls.Config{
		ServerName:         a.Name,
		InsecureSkipVerify: true, //nolint:gosec // the probe only tests whether a server answers
		MinVersion:         tls.VersionTLS12,
	})
	err = c.HandshakeContext(ctx)
	if len(conn.first) == 0 {
		if err == nil {
			err = io.EOF
		}
		return err
	}
	a.res.Reached = true
	a.res.Answer = "TLS alert"
	if state := c.ConnectionState(); err == nil && len(state.PeerCertificates) > 0 {
		a.res.Answer = agentlab.OneLine(fmt.Sprintf("TLS certificate of %v", state.PeerCertificates[0].DNSNames), maxAnswer)
	}
	return nil
}

// datagram sends a datagram, repeats it after half of the time, and waits for
// any answer.
func (p *prober) datagram(ctx context.Context, a *attempt, payload []byte) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "udp", net.JoinHostPort(a.host, a.port))
	if err != nil {
		return err
	}
	defer conn.Close()
	end, _ := ctx.Deadline()
	half := time.Now().Add(time.Until(end) / 2)
	buf := make([]byte, 2048)
	for _, until := range []time.Time{half, end} {
		if _, err = conn.Write(payload); err != nil {
			return err
		}
		_ = conn.SetReadDeadline(until)
		var n int
		if n, err = conn.Read(buf); err == nil {
			return a.received(buf[:n])
		}
		if reason(err) != "timeout" {
			return err
		}
	}
	return err
}

func (p *prober) udp(ctx context.Context, a *attempt) error {
	return p.datagram(ctx, a, []byte(probeText))
}

// quic sends a packet with an unsupported version, which every QUIC server
// must answer with its versions (RFC 9000 §6).
func (p *prober) quic(ctx context.Context, a *attempt) error {
	b := make([]byte, 1200)
	b[0] = 0xc0
	binary.BigEndian.PutUint32(b[1:], 0x1a2a3a4a)
	b[5] = 8
	copy(b[6:], "agentlab")
	b[14] = 8
	copy(b[15:], "probe-me")
	return p.datagram(ctx, a, b)
}
