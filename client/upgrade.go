package client

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// Exec runs a command in a sandbox. The connection uses the frames of
// internal/stream; the caller closes it.
func (c *Client) Exec(ctx context.Context, sandbox string, req guestapi.ExecRequest) (net.Conn, error) {
	if req.Command == nil {
		req.Command = []string{}
	}
	return c.upgrade(ctx, nil, guestapi.StreamProtocol, req, "sandboxes", sandbox, "exec")
}

// Attach connects to a terminal of a sandbox. The connection uses the frames of
// internal/stream; the caller closes it.
func (c *Client) Attach(ctx context.Context, sandbox string, req guestapi.AttachRequest) (net.Conn, error) {
	return c.upgrade(ctx, nil, guestapi.StreamProtocol, req, "sandboxes", sandbox, "attach")
}

// Dial opens a TCP connection to a port in a sandbox. It has CloseWrite.
func (c *Client) Dial(ctx context.Context, sandbox string, port uint16) (net.Conn, error) {
	q := url.Values{"port": {strconv.Itoa(int(port))}}
	return c.upgrade(ctx, q, api.TCPProtocol, nil, "sandboxes", sandbox, "dial")
}

// upgrade makes a POST call whose connection becomes a stream. ctx bounds the
// call up to the response, not the stream.
func (c *Client) upgrade(ctx context.Context, query url.Values, protocol string, in any, elems ...string) (net.Conn, error) {
	body, contentType, err := jsonBody(in)
	if err != nil {
		return nil, err
	}
	p, err := join(elems...)
	if err != nil {
		return nil, err
	}
	req, err := c.newRequest(ctx, http.MethodPost, p, query, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", protocol)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, callError(ctx, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	up, err := handshake(conn, req, protocol)
	if !stop() && err == nil { // ctx ended just after the response
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = conn.Close()
		return nil, callError(ctx, err)
	}
	return up, nil
}

// handshake sends req and expects status 101. Bytes after the response are the
// first of the stream.
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
		return nil, agentlab.Errorf(agentlab.CodeInternal, "the daemon uses protocol %q on this stream, not %q", got, protocol)
	}
	return stream.Unread(conn, r), nil
}
