package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// DialControl implements backend.Driver.
func (d *Driver) DialControl(ctx context.Context, ref backend.Ref) (net.Conn, error) {
	return d.dial(ctx, ref, pathControl)
}

// DialGuest implements backend.Driver.
func (d *Driver) DialGuest(ctx context.Context, ref backend.Ref, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "port 0 cannot be dialled").WithField("port")
	}
	return d.dial(ctx, ref, pathDial+"?port="+strconv.Itoa(int(port)))
}

func (d *Driver) dial(ctx context.Context, ref backend.Ref, path string) (net.Conn, error) {
	if err := validRef(ref); err != nil {
		return nil, err
	}
	dir := d.dir(ref)
	c, err := shimClient(dir).stream(ctx, path)
	if err == nil {
		return c, nil
	}
	in, ierr := d.Inspect(ctx, ref)
	switch {
	case ierr != nil:
		return nil, ierr
	case in.Power != backend.PowerRunning:
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d is %s", ref.VMID, in.Power).WithHint("start it with 'agentlab sandbox start %d'", ref.VMID)
	}
	if agentlab.CodeOf(err) == agentlab.CodeTimeout { // to the caller, a guest that does not answer in time does not answer
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "%w", err)
	}
	return nil, err
}

// ListenGuest implements backend.Driver.
func (d *Driver) ListenGuest(_ context.Context, ref backend.Ref) (net.Listener, error) {
	if err := validRef(ref); err != nil {
		return nil, err
	}
	if _, err := d.load(ref); err != nil {
		return nil, err
	}
	return sockpath.Takeover(filepath.Join(d.dir(ref), fileGuestSock), 0o600)
}

// shimClient speaks to the shim of the sandbox in a directory.
type shimClient string

// maxShimAnswer bounds a JSON answer, in bytes.
const maxShimAnswer = 1 << 20

func (c shimClient) status(ctx context.Context, wait bool) (shimStatus, error) {
	path := pathStatus
	if wait {
		path += "?wait=1"
	}
	return c.call(ctx, http.MethodGet, path, nil)
}

func (c shimClient) stop(ctx context.Context, grace time.Duration) error {
	_, err := c.call(ctx, http.MethodPost, pathStop+"?grace="+url.QueryEscape(grace.String()), nil)
	return err
}

func (c shimClient) setNetwork(ctx context.Context, n agentlab.Network) error {
	body, err := json.Marshal(n)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "encode the network: %w", err)
	}
	_, err = c.call(ctx, http.MethodPut, pathNetwork, body)
	return err
}

func (c shimClient) call(ctx context.Context, method, path string, body []byte) (shimStatus, error) {
	var st shimStatus
	conn, resp, err := c.do(ctx, method, path, "", body)
	if err != nil {
		return st, err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	err = json.NewDecoder(io.LimitReader(resp.Body, maxShimAnswer)).Decode(&st)
	if err != nil {
		return st, agentlab.Errorf(agentlab.CodeUnavailable, "the supervisor's answer: %w", err)
	}
	return st, nil
}

// stream upgrades a connection to a stream to the guest.
func (c shimClient) stream(ctx context.Context, path string) (net.Conn, error) {
	conn, _, err := c.do(ctx, http.MethodPost, path, streamUpgrade, nil)
	return conn, err
}

// do makes one request on a connection of its own, and returns that with the
// head of a successful answer.
func (c shimClient) do(ctx context.Context, method, path, upgrade string, body []byte) (net.Conn, *http.Response, error) {
	conn, err := sockpath.Dial(ctx, filepath.Join(string(c), fileShimSock))
	if err != nil {
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox's supervisor does not answer: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	resp, br, err := exchange(ctx, conn, method, path, upgrade, body)
	if !stop() {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "asking the sandbox's supervisor: %w", context.Cause(ctx))
	}
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return unread(conn, br), resp, nil
}

func exchange(ctx context.Context, conn net.Conn, method, path, upgrade string, body []byte) (*http.Response, *bufio.Reader, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://shim"+path, bytes.NewReader(body))
	if err != nil {
		return nil, nil, agentlab.Errorf(agentlab.CodeInternal, "request to the supervisor: %w", err)
	}
	if upgrade != "" {
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", upgrade)
	}
	broken := func(err error) (*http.Response, *bufio.Reader, error) {
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox's supervisor does not answer: %w", err)
	}
	if err := req.Write(conn); err != nil {
		return broken(err)
	}
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		return broken(err)
	}
	want := http.StatusOK
	if upgrade != "" {
		want = http.StatusSwitchingProtocols
	}
	if resp.StatusCode == want {
		return resp, br, nil
	}
	if resp.StatusCode == http.StatusNotFound {
		return nil, nil, agentlab.Errorf(agentlab.CodeUnsupported, "the sandbox's supervisor is of an older AgentLab").
			WithHint("stop the sandbox and start it again")
	}
	var e shimError
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxShimAnswer)).Decode(&e); err != nil || e.Code == "" {
		return broken(os.ErrInvalid)
	}
	return nil, nil, &agentlab.Error{Code: e.Code, Message: e.Message, Hint: e.Hint}
}
