// Package client is the typed Go client of AgentLab's control API. It uses
// HTTP and JSON to the daemon's unix socket, or with a token over TCP.
//
// Every method takes a context and returns when it ends. Every error is, or
// wraps, an *agentlab.Error: with the code, hint and field of the daemon's
// response, or with code unavailable when no daemon responds.
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// Body is a stream of bytes from the daemon. Read returns an error if the
// stream is truncated. The caller closes it.
type Body = io.ReadCloser

// maxErrorBytes limits how much of an error response is read.
const maxErrorBytes = 64 << 10

// Client calls one daemon. It is safe for concurrent use and keeps idle
// connections open for ten seconds.
type Client struct {
	socket string // the daemon's unix socket; "" means that it is reached over TCP
	host   string // host:port of a daemon over TCP
	tls    *tls.Config
	token  string
	http   *http.Client

	version atomic.Pointer[string] // of the daemon, since its first response
}

// New returns a client of the daemon that listens on the unix socket at path.
// It does not connect.
func New(path string) *Client {
	c := &Client{socket: path}
	c.http = c.transport()
	return c
}

func (c *Client) transport() *http.Client {
	return &http.Client{
		Transport: &http.Transport{ // without a proxy; dial does TLS itself
			DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) },
			MaxIdleConnsPerHost:    4,
			IdleConnTimeout:        10 * time.Second,
			DisableCompression:     true, // usually a local socket
			MaxResponseHeaderBytes: 64 << 10,
		},
		// The daemon never redirects; another server must not get the token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// newRequest returns a request with the client's token, if it has one.
func (c *Client) newRequest(ctx context.Context, method, path string, query url.Values, body io.Reader) (*http.Request, error) {
	host := c.host
	if host == "" {
		host = "agentlabd"
	}
	u := url.URL{Scheme: "http", Host: host, Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), body)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%w", err)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	return req, nil
}

// Socket returns the path of the daemon's socket; "" for a daemon over TCP.
func (c *Client) Socket() string { return c.socket }

// DaemonVersion returns the version of the daemon in its last response, "" if the
// daemon does not send it; ok is false without a response.
func (c *Client) DaemonVersion() (version string, ok bool) {
	v := c.version.Load()
	if v == nil {
		return "", false
	}
	return *v, true
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

func (c *Client) dial(ctx context.Context) (net.Conn, error) {
	if c.host != "" {
		return c.dialRemote(ctx)
	}
	conn, err := sockpath.Dial(ctx, c.socket)
	if err == nil {
		if err := checkPeer(conn, c.socket); err != nil {
			_ = conn.Close()
			return nil, err
		}
		return conn, nil
	}
	if ctx.Err() != nil {
		return nil, err
	}
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		return nil, err
	}
	return nil, &agentlab.Error{
		Code: agentlab.CodeUnavailable, Message: "no daemon is running on " + c.socket,
		Hint: "start it: agentlab daemon start", Err: err,
	}
}

// Ping connects to the daemon. Codes: unavailable if none is running, denied
// if another user runs it.
func (c *Client) Ping(ctx context.Context) error {
	conn, err := c.dial(ctx)
	if err != nil {
		return err
	}
	return conn.Close()
}

// checkPeer rejects a socket whose listener is neither the client's user nor
// root: calls contain tasks, source code and secrets.
func checkPeer(conn net.Conn, socket string) error {
	peer, err := sockpath.PeerOf(conn)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeDenied, "cannot determine which user listens on %s: %w", socket, err)
	}
	return checkUID(peer.UID, socket)
}

func checkUID(uid uint32, socket string) error {
	if uid == 0 || int(uid) == os.Geteuid() {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeDenied, "the daemon on %s runs as user %d, not as you or root", socket, uid).
		WithHint("set AGENTLAB_HOME to a directory of your own, or --socket to the socket of your own daemon")
}

// request makes a call and returns the response if its status is 2xx. elems
// are the elements of the path below /v1.
func (c *Client) request(ctx context.Context, method string, query url.Values, body io.Reader, contentType string, elems ...string) (*http.Response, error) {
	p, err := join(elems...)
	if err != nil {
		return nil, err
	}
	req, err := c.newRequest(ctx, method, p, query, body)
	if err != nil {
		return nil, err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, callError(ctx, err)
	}
	version := resp.Header.Get(api.VersionHeader)
	c.version.Store(&version)
	if resp.StatusCode/100 != 2 {
		defer func() { _ = resp.Body.Close() }()
		return nil, errorOf(resp)
	}
	return resp, nil
}

// jsonBody encodes the body of a request; nil has none.
func jsonBody(in any) (body io.Reader, contentType string, err error) {
	if in == nil {
		return nil, "", nil
	}
	p, err := json.Marshal(in)
	if err != nil {
		return nil, "", agentlab.Errorf(agentlab.CodeInvalid, "%w", err)
	}
	return bytes.NewReader(p), "application/json", nil
}

// none is the result of a call whose response has no content.
type none struct{}

// send makes a call and decodes the response as a T.
func send[T any](ctx context.Context, c *Client, method string, query url.Values, body io.Reader, contentType string, elems ...string) (out T, err error) {
	resp, err := c.request(ctx, method, query, body, contentType, elems...)
	if err != nil {
		return out, err
	}
	defer func() { _ = resp.Body.Close() }()
	if _, empty := any(out).(none); !empty {
		err = json.NewDecoder(resp.Body).Decode(&out)
	}
	_, _ = io.Copy(io.Discard, resp.Body) // so that the connection can be reused
	if err != nil {
		return out, callError(ctx, fmt.Errorf("reading the daemon's response: %w", err))
	}
	return out, nil
}

// get makes a GET call.
func get[T any](ctx context.Context, c *Client, query url.Values, elems ...string) (T, error) {
	return send[T](ctx, c, http.MethodGet, query, nil, "", elems...)
}

// post makes a POST call with in, unless it is nil, as JSON.
func post[T any](ctx context.Context, c *Client, in any, elems ...string) (out T, err error) {
	body, contentType, err := jsonBody(in)
	if err != nil {
		return out, err
	}
	return send[T](ctx, c, http.MethodPost, nil, body, contentType, elems...)
}

// del makes a DELETE call.
func del[T any](ctx context.Context, c *Client, elems ...string) (T, error) {
	return send[T](ctx, c, http.MethodDelete, nil, nil, "", elems...)
}

// stream makes a GET call whose response is raw bytes.
func (c *Client) stream(ctx context.Context, query url.Values, elems ...string) (Body, error) {
	return c.raw(ctx, http.MethodGet, query, elems...)
}

// raw makes a call whose response is raw bytes.
func (c *Client) raw(ctx context.Context, method string, query url.Values, elems ...string) (Body, error) {
	resp, err := c.request(ctx, method, query, nil, "", elems...)
	if err != nil {
		return nil, err
	}
	return &body{ctx: ctx, ReadCloser: resp.Body}, nil
}

// body is a response whose read errors are *agentlab.Error.
type body struct {
	ctx context.Context
	io.ReadCloser
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = callError(b.ctx, fmt.Errorf("the daemon's response was cut off: %w", err))
	}
	return n, err
}

// callError adds a code to the error of a failed call. If the caller's context
// has ended, it returns the cause of that.
func callError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		return e
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err // without the synthetic URL
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "the daemon does not respond: %w", err).
		WithHint("check the daemon: agentlab daemon status; agentlab daemon logs")
}

// errorOf returns the error in the response to a failed call.
func errorOf(resp *http.Response) error {
	var e api.Error
	err := json.NewDecoder(io.LimitReader(resp.Body, maxErrorBytes)).Decode(&e)
	if err != nil || e.Code == "" {
		return agentlab.Errorf(agentlab.CodeInternal, "the daemon responded with %s", resp.Status).
			WithHint("check that it is an AgentLab daemon of this version: agentlab daemon status")
	}
	return fromWire(e)
}

func fromWire(e api.Error) *agentlab.Error {
	return &agentlab.Error{Code: agentlab.Code(e.Code), Message: e.Detail, Hint: e.Hint, Field: e.Field}
}

// maxPage is the maximum length of a page.
const maxPage = 10000

// pages yields the pages of a list from cursor on, until they have limit items;
// limit 0 means all. A pair with an error is the last one.
func pages[T any](ctx context.Context, c *Client, query url.Values, limit int, cursor string, elems ...string) iter.Seq2[api.List[T], error] {
	return func(yield func(api.List[T], error) bool) {
		q := maps.Clone(query)
		if q == nil {
			q = url.Values{}
		}
		for left := limit; ; {
			set(q, "limit", min(left, maxPage))
			set(q, "cursor", cursor)
			page, err := get[api.List[T]](ctx, c, q, elems...)
			cursor = page.Next
			if limit != 0 {
				left -= len(page.Items)
			}
			if !yield(page, err) || err != nil || cursor == "" || limit != 0 && left <= 0 {
				return
			}
		}
	}
}

// list returns the items of pages as one page.
func list[T any](ctx context.Context, c *Client, query url.Values, limit int, cursor string, elems ...string) (api.List[T], error) {
	all := api.List[T]{Items: []T{}}
	for page, err := range pages[T](ctx, c, query, limit, cursor, elems...) {
		if err != nil {
			return all, err
		}
		all.Items, all.Next = append(all.Items, page.Items...), page.Next
	}
	return all, nil
}

// items yields the items of pages, each of which is requested when it is needed.
func items[T any](ctx context.Context, c *Client, query url.Values, limit int, cursor string, elems ...string) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for page, err := range pages[T](ctx, c, query, limit, cursor, elems...) {
			for _, item := range page.Items {
				if !yield(item, nil) {
					return
				}
			}
			if err != nil {
				var zero T
				yield(zero, err)
			}
		}
	}
}

// set adds a parameter to a query, unless v is the zero value.
func set[T comparable](q url.Values, key string, v T) {
	var zero T
	if v != zero {
		q.Set(key, fmt.Sprint(v))
	}
}

// join returns the path of elements below /v1; url.URL escapes it later. It
// refuses an element that would become none or several.
func join(elems ...string) (string, error) {
	for _, e := range elems {
		if e == "" || e == "." || e == ".." || strings.Contains(e, "/") {
			return "", agentlab.Errorf(agentlab.CodeInvalid, "%q is not a name or an ID", e)
		}
	}
	return "/v1/" + strings.Join(elems, "/"), nil
}
