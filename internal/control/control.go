// Package control is the controller's client of a guest's control server
// (package guestapi, "Guest control").
//
// The guest is hostile. Every response is bounded in size and time and is checked
// before it is returned. Text of the guest becomes one short printable line.
package control

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/sshkey"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// Limits of a guest's response.
const (
	maxHead    = 16 << 10 // bytes of status line and header
	maxBody    = 256 << 10
	maxMessage = 300 // bytes of an error's text
)

// readBuffer is the size of the buffer for a response in bytes; it is small, because
// hundreds of guests wait with their answers.
const readBuffer = 1 << 10

// Timeouts of the calls, in addition to the caller's context.
const (
	healthTimeout   = 10 * time.Second
	identityTimeout = 60 * time.Second
	startTimeout    = 60 * time.Second // until a command or terminal is started
	sshKeyTimeout   = 90 * time.Second
	powerTimeout    = 20 * time.Second
	freezeTimeout   = 2 * time.Minute // all that processes have written may still be in memory
	thawTimeout     = time.Minute
	syncTimeout     = 2 * time.Minute
)

// What begins a request with an identity, and a response that accepts a request.
// The end of a stream that passes it on can recognise them.
const (
	SetsIdentity = http.MethodPut + " " + guestapi.PathIdentity + " "
	Accepts      = "HTTP/1.1 200 "
)

// Dial opens a new stream to a guest's control server.
type Dial func(ctx context.Context) (net.Conn, error)

// Client is a client of one guest. It has no open connection between calls and is
// safe for concurrent use.
//
// Errors are *agentlab.Error with the codes of the dial function, and:
// unavailable if the response is incomplete or invalid, timeout if there is none,
// and invalid, not_found, busy, conflict, limit or internal as the guest's control
// server returned them.
type Client struct{ dial Dial }

// New returns a Client that opens streams with dial.
func New(dial Dial) *Client { return &Client{dial: dial} }

// Health returns the progress of the guest's boot.
func (c *Client) Health(ctx context.Context) (guestapi.Health, error) {
	var h guestapi.Health
	err := c.call(ctx, healthTimeout, http.MethodGet, guestapi.PathHealth, nil, &h)
	return checkHealth(h, err)
}

// Prepare makes a guest without identity ready to be saved as a template.
func (c *Client) Prepare(ctx context.Context, req guestapi.PrepareRequest) error {
	return c.call(ctx, identityTimeout, http.MethodPost, guestapi.PathPrepare, req, nil)
}

// SetIdentity sets the guest's identity, with a new SSH host key unless it has one.
// It is idempotent: a guest that has this identity keeps its host key.
func (c *Client) SetIdentity(ctx context.Context, id guestapi.Identity) (guestapi.Health, error) {
	var h guestapi.Health
	if id.HostKey == nil {
		id.HostKey = &guestapi.HostKey{}
		id.HostKey.Private, id.HostKey.Public = sshkey.New()
	}
	err := c.call(ctx, identityTimeout, http.MethodPut, guestapi.PathIdentity, id, &h)
	if err == nil && h.Identity != id.UID {
		err = invalidReply("it took the identity %q", agentlab.OneLine(h.Identity, maxMessage))
	}
	return checkHealth(h, err)
}

// SSHKey authorizes a public key, starts the guest's sshd, and returns the data
// that verifies it.
func (c *Client) SSHKey(ctx context.Context, req guestapi.SSHKeyRequest) (guestapi.SSHKeyResponse, error) {
	var resp guestapi.SSHKeyResponse
	err := c.call(ctx, sshKeyTimeout, http.MethodPost, guestapi.PathSSHKey, req, &resp)
	if err != nil {
		return guestapi.SSHKeyResponse{}, err
	}
	if err := asInvalidReply(guestcheck.SSHKey(resp)); err != nil {
		return guestapi.SSHKeyResponse{}, err
	}
	return resp, nil
}

// Mount makes the guest mount the volume of its workspace. It is idempotent. Code
// not_found means that the guest has no such disk, and conflict that the volume has no
// file system or a damaged one.
func (c *Client) Mount(ctx context.Context, req guestapi.WorkspaceRequest) (guestapi.Workspace, error) {
	var w guestapi.Workspace
	if err := c.call(ctx, guestapi.MountTimeout, http.MethodPut, guestapi.PathWorkspace, req, &w); err != nil {
		return guestapi.Workspace{}, err
	}
	if err := asInvalidReply(guestcheck.Workspace(w)); err != nil {
		return guestapi.Workspace{}, err
	}
	return w, nil
}

// Unmount makes the guest write the workspace to its volume and unmount it. It is
// idempotent. Code busy means that processes use it; the text names some.
func (c *Client) Unmount(ctx context.Context) error {
	return c.call(ctx, guestapi.MountTimeout, http.MethodDelete, guestapi.PathWorkspace, nil, nil)
}

// Freeze makes the guest write its workspace to the volume, and freeze the file system
// for at most the whole seconds in limit, which is at most guestapi.MaxFreezeSeconds. It
// returns when the file system is frozen. Code conflict means that no workspace is
// mounted.
func (c *Client) Freeze(ctx context.Context, limit time.Duration) error {
	return c.call(ctx, freezeTimeout, http.MethodPut, guestapi.PathFreeze, guestapi.FreezeRequest{Seconds: int(limit / time.Second)}, nil)
}

// Thaw ends a freeze. held is whether it has lasted until now, as the guest says. It is
// idempotent.
func (c *Client) Thaw(ctx context.Context) (held bool, err error) {
	var t guestapi.Thawed
	err = c.call(ctx, thawTimeout, http.MethodDelete, guestapi.PathFreeze, nil, &t)
	return t.Held && err == nil, err
}

// Sync makes the guest write what it has in memory to all its disks.
func (c *Client) Sync(ctx context.Context) error {
	return c.call(ctx, syncTimeout, http.MethodPost, guestapi.PathSync, nil, nil)
}

// Power asks the guest's init to "poweroff" or "reboot", and returns when the
// guest has started to do so.
func (c *Client) Power(ctx context.Context, action string) error {
	return c.call(ctx, powerTimeout, http.MethodPost, guestapi.PathPower, guestapi.PowerRequest{Action: action}, nil)
}

// Exec starts a command. The connection carries frames of package stream.
// Closing it ends the command and all processes of its session.
func (c *Client) Exec(ctx context.Context, req guestapi.ExecRequest) (net.Conn, error) {
	return c.upgrade(ctx, guestapi.PathExec, guestapi.StreamProtocol, req)
}

// Rehearse runs "true" in a shell, and waits for its end: the guest then has in
// memory what it reads for a command.
func (c *Client) Rehearse(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	conn, err := c.Exec(ctx, guestapi.ExecRequest{Command: []string{"sh", "-c", "/bin/true; exit"}})
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	frames := stream.NewReader(io.LimitReader(conn, maxBody))
	for {
		t, _, err := frames.Next()
		switch {
		case err != nil:
			return invalidReply("its command did not end: %w", cmp.Or(ctx.Err(), err))
		case t == stream.Exit:
			return nil
		}
	}
}

// Attach connects to a terminal. The connection carries frames of package stream.
// Closing it leaves the terminal running.
func (c *Client) Attach(ctx context.Context, req guestapi.AttachRequest) (net.Conn, error) {
	return c.upgrade(ctx, guestapi.PathAttach, guestapi.StreamProtocol, req)
}

// Listeners returns the TCP ports on which processes of the guest listen. The guest
// answers when they are not those of state, or after the whole seconds in wait.
func (c *Client) Listeners(ctx context.Context, state string, wait time.Duration) (guestapi.Listeners, error) {
	var l guestapi.Listeners
	req := guestapi.ListenersRequest{State: state, Seconds: min(int(wait/time.Second), guestapi.MaxListenersSeconds)}
	if err := c.call(ctx, wait+healthTimeout, http.MethodPost, guestapi.PathListeners, req, &l); err != nil {
		return guestapi.Listeners{}, err
	}
	if err := asInvalidReply(guestcheck.Listeners(l)); err != nil {
		return guestapi.Listeners{}, err
	}
	return l, nil
}

// DialPort opens a TCP connection to a port of the guest that may be bound to its
// loopback only. The connection has CloseWrite if that of the dial function has.
func (c *Client) DialPort(ctx context.Context, port uint16) (net.Conn, error) {
	return c.upgrade(ctx, guestapi.PathDial, guestapi.TCPProtocol, guestapi.DialRequest{Port: port})
}

// call makes one request on a new stream.
func (c *Client) call(ctx context.Context, limit time.Duration, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	resp, conn, _, err := c.request(ctx, method, path, "", in)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := deadlineOn(ctx, conn)
	defer stop()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	switch {
	case err != nil:
		return connectionError(ctx, err)
	case len(body) > maxBody:
		return invalidReply("longer than %d bytes", maxBody)
	case resp.StatusCode != http.StatusOK:
		return guestError(resp.StatusCode, body)
	case out == nil:
		return nil
	}
	if guestcheck.Decode(body, out) != nil {
		return invalidReply("unexpected JSON")
	}
	return nil
}

// upgrade makes a request that turns its connection into a stream.
func (c *Client) upgrade(ctx context.Context, path, protocol string, in any) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	resp, conn, rd, err := c.request(ctx, http.MethodPost, path, protocol, in)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer func() { _ = conn.Close() }()
		stop := deadlineOn(ctx, conn)
		defer stop()
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
		if err != nil {
			return nil, connectionError(ctx, err)
		}
		return nil, guestError(resp.StatusCode, body)
	}
	if !strings.EqualFold(resp.Header.Get("Upgrade"), protocol) {
		_ = conn.Close()
		return nil, invalidReply("unexpected protocol in the Upgrade response")
	}
	return stream.Unread(conn, rd), nil
}

// request sends a request and reads the header of the response. The caller closes
// the connection.
func (c *Client) request(ctx context.Context, method, path, upgrade string, in any) (
	*http.Response, net.Conn, *bufio.Reader, error,
) {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return nil, nil, nil, agentlab.Errorf(agentlab.CodeInternal, "request to the guest: %w", err)
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path, bytes.NewReader(body))
	if err != nil {
		return nil, nil, nil, agentlab.Errorf(agentlab.CodeInternal, "request to the guest: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	if upgrade != "" {
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", upgrade)
	}
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	stop := deadlineOn(ctx, conn)
	limited := &io.LimitedReader{R: conn, N: maxHead}
	rd := bufio.NewReaderSize(limited, readBuffer)
	var text bytes.Buffer
	err = req.Write(&text)
	if err == nil {
		_, err = conn.Write(text.Bytes())
	}
	var resp *http.Response
	if err == nil {
		resp, err = http.ReadResponse(rd, req)
	}
	if !stop() && err == nil {
		err = context.Cause(ctx) // the deadline stays set
	}
	if err != nil {
		_ = conn.Close()
		return nil, nil, nil, connectionError(ctx, err)
	}
	limited.N = math.MaxInt64
	return resp, conn, rd, nil
}

// deadlineOn makes conn's calls return when ctx ends. The returned function undoes
// that, and reports false if ctx has ended.
func deadlineOn(ctx context.Context, conn net.Conn) func() bool {
	return context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
}

func connectionError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		code := agentlab.CodeTimeout
		if errors.Is(cause, context.Canceled) {
			code = agentlab.CodeUnavailable
		}
		return agentlab.Errorf(code, "the guest did not answer: %w", cause)
	}
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	// The text of a parse error may contain data of the guest.
	return &agentlab.Error{Code: agentlab.CodeUnavailable, Message: "cannot read the guest's response: " + agentlab.OneLine(err.Error(), maxMessage)}
}

func invalidReply(format string, args ...any) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "invalid response of the guest: "+format, args...)
}

// codes that a guest may return; any other becomes internal.
var codes = []agentlab.Code{
	agentlab.CodeInvalid, agentlab.CodeNotFound, agentlab.CodeBusy, agentlab.CodeConflict,
	agentlab.CodeLimit, agentlab.CodeUnavailable, agentlab.CodeDenied,
}

func guestError(status int, body []byte) error {
	var e guestapi.ErrorBody
	if guestcheck.Decode(body, &e) != nil || e.Message == "" {
		return invalidReply("status %d", status)
	}
	code := agentlab.Code(e.Code)
	if !slices.Contains(codes, code) {
		code = agentlab.CodeInternal
	}
	return agentlab.Errorf(code, "guest error: %s", agentlab.OneLine(e.Message, maxMessage))
}

// checkHealth rejects a response that agent-runner never sends.
func checkHealth(h guestapi.Health, err error) (guestapi.Health, error) {
	if err == nil {
		err = asInvalidReply(guestcheck.Health(h))
	}
	if err != nil {
		return guestapi.Health{}, err
	}
	return h, nil
}

// asInvalidReply converts the error of a rejected response.
func asInvalidReply(err error) error {
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		return invalidReply("%s", e.Message)
	}
	return err
}
