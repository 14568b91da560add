package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Exec runs a command in a sandbox. The connection speaks internal/stream's
// frames and is the caller's to close.
func (c *Client) Exec(ctx context.Context, sandbox string, req guestapi.ExecRequest) (net.Conn, error) {
	if req.Command == nil {
		req.Command = []string{}
	}
	p, err := join("sandboxes", sandbox, "exec")
	if err != nil {
		return nil, err
	}
	return c.upgrade(ctx, p, nil, guestapi.StreamProtocol, req)
}

// Attach joins a terminal of a sandbox. The connection speaks
// internal/stream's frames and is the caller's to close.
func (c *Client) Attach(ctx context.Context, sandbox string, req guestapi.AttachRequest) (net.Conn, error) {
	p, err := join("sandboxes", sandbox, "attach")
	if err != nil {
		return nil, err
	}
	return c.upgrade(ctx, p, nil, guestapi.StreamProtocol, req)
}

// Dial opens a TCP connection to a port in a sandbox. It has CloseWrite.
func (c *Client) Dial(ctx context.Context, sandbox string, port uint16) (net.Conn, error) {
	p, err := join("sandboxes", sandbox, "dial")
	if err != nil {
		return nil, err
	}
	q := url.Values{"port": {strconv.Itoa(int(port))}}
	return c.upgrade(ctx, p, q, api.TCPProtocol, nil)
}

// upgrade makes a POST whose connection becomes a stream. ctx bounds the call
// up to the answer, not the stream.
func (c *Client) upgrade(ctx context.Context, path string, query url.Values, protocol string, in any) (_ net.Conn, err error) {
	var body []byte
	if in != nil {
		if body, err = json.Marshal(in); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%w", err)
		}
	}
	req, err := c.newRequest(ctx, http.MethodPost, path, query, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", protocol)
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, callError(ctx, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	up, err := handshake(conn, req, protocol)
	if !stop() && err == nil { // ctx ended just after the answer
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = conn.Close()
		return nil, callError(ctx, err)
	}
	return up, nil
}

// handshake sends req and wants 101. Bytes that came behind the answer are
// the first of the stream.
func handshake(conn net.Conn, req *http.Request, protocol string) (net.Conn, error) {
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer func() { _ = resp.Body.Close() }()
		return nil, errorOf(resp)
	}
	if got := resp.Header.Get("Upgrade"); got != protocol {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "the daemon speaks %q on this stream, not %q", got, protocol)
	}
	return &upgraded{Conn: conn, r: r}, nil
}

// upgraded reads through the buffer that the answer was read with.
type upgraded struct {
	net.Conn
	r *bufio.Reader
}

func (u *upgraded) Read(p []byte) (int, error) { return u.r.Read(p) }

// CloseWrite tells the other end that nothing more comes; reading goes on.
func (u *upgraded) CloseWrite() error {
	if hc, ok := u.Conn.(interface{ CloseWrite() error }); ok {
		return hc.CloseWrite()
	}
	return u.Conn.Close()
}
