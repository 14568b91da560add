package supervisor

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
	"github.com/agentlab-vm/agentlab/internal/sockpath"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// dialPath is the path of a request for a stream to a port of the guest.
func dialPath(port uint16) string { return pathDial + "?port=" + strconv.Itoa(int(port)) }

// client calls the supervisor of the VM in a directory.
type client string

// maxAnswer is the maximum size of a JSON answer, in bytes.
const maxAnswer = 1 << 20

func (c client) status(ctx context.Context, wait string) (status, error) {
	return c.call(ctx, http.MethodGet, pathStatus+"?wait="+wait, nil)
}

func (c client) stop(ctx context.Context, grace time.Duration) error {
	_, err := c.call(ctx, http.MethodPost, pathStop+"?grace="+url.QueryEscape(grace.String()), nil)
	return err
}

func (c client) setNetwork(ctx context.Context, n agentlab.Network) error {
	_, err := c.call(ctx, http.MethodPut, pathNetwork, n)
	return err
}

func (c client) recordEgress(ctx context.Context, r agentlab.EgressRecord) error {
	_, err := c.call(ctx, http.MethodPost, pathEgress, r)
	return err
}

// call sends in, unless it is nil, as JSON.
func (c client) call(ctx context.Context, method, path string, in any) (status, error) {
	var st status
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return st, agentlab.Errorf(agentlab.CodeInternal, "encode a request: %w", err)
		}
	}
	conn, resp, err := c.do(ctx, method, path, "", body)
	if err != nil {
		return st, err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	err = json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&st)
	if err != nil {
		return st, agentlab.Errorf(agentlab.CodeUnavailable, "invalid response of the supervisor: %w", err)
	}
	return st, nil
}

// stream upgrades a connection to a stream to the guest.
func (c client) stream(ctx context.Context, path string) (net.Conn, error) {
	conn, _, err := c.do(ctx, http.MethodPost, path, streamUpgrade, nil)
	return conn, err
}

// do makes one request on a new connection, and returns the connection with the
// header of a successful response.
func (c client) do(ctx context.Context, method, path, upgrade string, body []byte) (net.Conn, *http.Response, error) {
	conn, err := sockpath.Dial(ctx, filepath.Join(string(c), fileSock))
	if err != nil {
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox's supervisor does not answer: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	resp, br, err := exchange(ctx, conn, method, path, upgrade, body)
	if !stop() {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "calling the sandbox's supervisor: %w", context.Cause(ctx))
	}
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return stream.Unread(conn, br), resp, nil
}

func exchange(ctx context.Context, conn net.Conn, method, path, upgrade string, body []byte) (*http.Response, *bufio.Reader, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://supervisor"+path, bytes.NewReader(body))
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
		return nil, nil, agentlab.Errorf(agentlab.CodeUnsupported, "the sandbox's supervisor is from an older version of AgentLab").
			WithHint("stop the sandbox and start it again")
	}
	var e apiError
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&e); err != nil || e.Code == "" {
		return broken(os.ErrInvalid)
	}
	return nil, nil, &agentlab.Error{Code: e.Code, Message: e.Message, Hint: e.Hint}
}
