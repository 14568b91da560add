// Package client is the typed Go client of AgentLab's control API. It speaks
// HTTP and JSON to the daemon's unix socket, or with a token over TCP.
//
// Every method takes a context first and gives up when it ends. Every error
// is, or wraps, an *agentlab.Error: with the code, hint and field that the
// daemon gave, or with code unavailable when no daemon answers.
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// Body is a stream of bytes from the daemon. Read fails when it was cut
// short; the caller closes it.
type Body = io.ReadCloser

// maxErrorBytes bounds what is read of a failed call's body.
const maxErrorBytes = 64 << 10

// Client calls one daemon. It is safe for use by many goroutines and holds
// idle connections for a short time only.
type Client struct {
	socket string // of a daemon on this machine, else:
	host   string // host:port of one that answers over TCP
	tls    *tls.Config
	token  string
	http   *http.Client
}

// New returns a client of the daemon that listens on the unix socket at path.
// It does not connect yet.
func New(path string) *Client {
	c := &Client{socket: path}
	c.http = c.transport()
	return c
}

func (c *Client) transport() *http.Client {
	return &http.Client{
		Transport: &http.Transport{ // it uses no proxy, and dial does TLS itself
			DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) },
			MaxIdleConnsPerHost:    4,
			IdleConnTimeout:        10 * time.Second,
			DisableCompression:     true, // mostly it is a local socket
			MaxResponseHeaderBytes: 64 << 10,
		},
		// The daemon sends nobody elsewhere; whoever does is not given a token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// newRequest makes a request with the caller's token, if it needs one.
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

// Socket returns the path of the daemon's socket; "" when it is reached over
// TCP.
func (c *Client) Socket() string { return c.socket }

// Close lets go of idle connections.
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
		Code: agentlab.CodeUnavailable, Message: "no daemon answers on " + c.socket,
		Hint: "start it: agentlab daemon start", Err: err,
	}
}

// Ping tells whether a daemon that we may trust listens on the socket.
func (c *Client) Ping(ctx context.Context) error {
	conn, err := c.dial(ctx)
	if err != nil {
		return err
	}
	return conn.Close()
}

// checkPeer refuses a socket on which neither our own user nor root listens:
// it would be given tasks, source code and secrets.
func checkPeer(conn net.Conn, socket string) error {
	uid, err := peerUID(conn)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeDenied, "cannot tell who listens on %s: %w", socket, err)
	}
	return checkUID(uid, socket)
}

func checkUID(uid uint32, socket string) error {
	if uid == 0 || int(uid) == os.Geteuid() {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeDenied, "the daemon on %s is run by user %d, neither by you nor by root", socket, uid).
		WithHint("set AGENTLAB_HOME to a directory of your own, or --socket to the socket of your own daemon")
}

// peerUID asks the kernel who listens at the other end.
func peerUID(conn net.Conn) (uint32, error) {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return 0, errors.New("not a socket")
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, credErr); err != nil {
		return 0, err
	}
	return cred.Uid, nil
}

// request makes a call and returns the answer when its status is 2xx.
func (c *Client) request(ctx context.Context, method, path string, query url.Values, body io.Reader, contentType string) (*http.Response, error) {
	req, err := c.newRequest(ctx, method, path, query, body)
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
	if resp.StatusCode/100 != 2 {
		defer func() { _ = resp.Body.Close() }()
		return nil, errorOf(resp)
	}
	return resp, nil
}

// call makes a call with JSON in both directions. in and out may be nil.
func (c *Client) call(ctx context.Context, method, path string, query url.Values, in, out any) error {
	var body io.Reader
	contentType := ""
	if in != nil {
		p, err := json.Marshal(in)
		if err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "%w", err)
		}
		body, contentType = bytes.NewReader(p), "application/json"
	}
	resp, err := c.request(ctx, method, path, query, body, contentType)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if out != nil {
		err = json.NewDecoder(resp.Body).Decode(out)
	}
	_, _ = io.Copy(io.Discard, resp.Body) // so that the connection is used again
	if err != nil {
		return callError(ctx, fmt.Errorf("reading the daemon's answer: %w", err))
	}
	return nil
}

// stream makes a call whose answer is raw bytes.
func (c *Client) stream(ctx context.Context, path string, query url.Values) (Body, error) {
	resp, err := c.request(ctx, http.MethodGet, path, query, nil, "")
	if err != nil {
		return nil, err
	}
	return &body{ctx: ctx, ReadCloser: resp.Body}, nil
}

// body turns what breaks a stream off into one of our errors.
type body struct {
	ctx context.Context
	io.ReadCloser
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = callError(b.ctx, fmt.Errorf("the daemon's answer broke off: %w", err))
	}
	return n, err
}

// callError gives a failed call its code. The end of the caller's own context
// is left as it is, so that the caller knows it again.
func callError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		return e
	}
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err // without the made-up URL
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "the daemon does not answer: %w", err).
		WithHint("look at it: agentlab daemon status; agentlab daemon logs")
}

// errorOf reads the problem details of a failed call.
func errorOf(resp *http.Response) error {
	var e api.Error
	err := json.NewDecoder(io.LimitReader(resp.Body, maxErrorBytes)).Decode(&e)
	if err != nil || e.Code == "" {
		return agentlab.Errorf(agentlab.CodeInternal, "the daemon answered %s", resp.Status).
			WithHint("is it an AgentLab daemon of this version? agentlab daemon status")
	}
	return fromWire(e)
}

func fromWire(e api.Error) *agentlab.Error {
	return &agentlab.Error{Code: agentlab.Code(e.Code), Message: e.Detail, Hint: e.Hint, Field: e.Field}
}

// get is a call without a body that answers a T.
func get[T any](ctx context.Context, c *Client, path string, query url.Values) (T, error) {
	var out T
	err := c.call(ctx, http.MethodGet, path, query, nil, &out)
	return out, err
}

// post is a call with a body that answers a T.
func post[T any](ctx context.Context, c *Client, path string, in any) (T, error) {
	var out T
	err := c.call(ctx, http.MethodPost, path, nil, in, &out)
	return out, err
}

// pages reads the page that limit and cursor say, or with limit 0 all pages
// from cursor on.
func pages[T any](ctx context.Context, c *Client, path string, query url.Values, limit int, cursor string) (api.List[T], error) {
	all := api.List[T]{Items: []T{}}
	for {
		set(query, "limit", limit)
		set(query, "cursor", cursor)
		page, err := get[api.List[T]](ctx, c, path, query)
		if err != nil {
			return all, err
		}
		all.Items = append(all.Items, page.Items...)
		all.Next = page.Next
		if limit != 0 || page.Next == "" {
			return all, nil
		}
		cursor = page.Next
	}
}

// set puts a value that is not its zero into a query.
func set[T comparable](q url.Values, key string, v T) {
	var zero T
	if v != zero {
		q.Set(key, fmt.Sprint(v))
	}
}

// join makes a path of its elements, each escaped by url.URL later; an
// element must not be able to become several.
func join(elems ...string) (string, error) {
	for _, e := range elems {
		if e == "" || e == "." || e == ".." || strings.Contains(e, "/") {
			return "", agentlab.Errorf(agentlab.CodeInvalid, "%s is not a name or an id", strconv.Quote(e))
		}
	}
	return "/v1/" + strings.Join(elems, "/"), nil
}
