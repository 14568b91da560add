package pve

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// RESTOptions configures the access to the API. Every field except Timeout,
// Retry and Dial is required; at most one of CA and Fingerprint may be set.
type RESTOptions struct {
	URL     string // https://HOST:PORT
	TokenID string // USER@REALM!NAME
	Secret  string // the token's secret, a UUID

	// CA is the PEM certificate of the authority that has signed the API's
	// certificate, such as the cluster's own CA. Fingerprint is the SHA-256
	// of the API's certificate itself, in hexadecimal digits with or without
	// colons; its names and dates are then not checked. Without either, the
	// machine's CAs are used.
	CA          []byte
	Fingerprint string

	// Timeout limits one call; 0 means 60 s. The node itself stops waiting for
	// an answer after 30 s.
	Timeout time.Duration
	// Retry lists the pauses before a read-only call is repeated if the node
	// did not answer; nil means 200 ms and 1 s.
	Retry []time.Duration
	// Dial opens connections; nil means that of net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// maxAnswer limits the size of an answer; the largest known is 16 MiB, of
// file-read.
const maxAnswer = 32 << 20

// maxBody is the limit of the API (512 KiB), which is more than any call of
// this package needs.
const maxBody = 512 << 10

// idleLimit is shorter than the 5 s after which the node closes an idle
// connection, so that no call uses a connection that is being closed.
const idleLimit = 4 * time.Second

// rest is the Transport over TLS.
type rest struct {
	base    string
	auth    string
	timeout time.Duration
	retry   []time.Duration
	client  *http.Client
	calls   atomic.Int64
}

// NewREST returns a transport that uses a node's API over TLS with a token. It
// opens no connection. The error has code invalid and the name of the option.
func NewREST(o RESTOptions) (Transport, error) {
	base, err := checkURL(o.URL)
	if err != nil {
		return nil, err
	}
	auth, err := authorization(o.TokenID, o.Secret)
	if err != nil {
		return nil, err
	}
	tlsConfig, err := tlsConfig(o.CA, o.Fingerprint)
	if err != nil {
		return nil, err
	}
	r := &rest{base: base, auth: auth, timeout: o.Timeout, retry: o.Retry}
	if r.timeout == 0 {
		r.timeout = 60 * time.Second
	}
	if r.retry == nil {
		r.retry = []time.Duration{200 * time.Millisecond, time.Second}
	}
	dial := o.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true) // the node supports nothing newer
	r.client = &http.Client{
		Transport: &http.Transport{
			// No proxy: the token must not be sent through a proxy of the
			// environment.
			DialContext: dial, TLSClientConfig: tlsConfig, TLSHandshakeTimeout: 10 * time.Second, Protocols: protocols,
			IdleConnTimeout: idleLimit, MaxIdleConnsPerHost: 16, MaxConnsPerHost: 32,
		},
		// A redirect would send the token to another server.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return r, nil
}

// Calls implements Transport.
func (r *rest) Calls() int64 { return r.calls.Load() }

// Ended implements Transport: a call returns before its task has ended.
func (r *rest) Ended(UPID) ([]string, bool) { return nil, false }

// Root implements Transport: a token is never root.
func (r *rest) Root() Root { return nil }

// Close implements Transport.
func (r *rest) Close() error {
	r.client.CloseIdleConnections()
	return nil
}

// Call implements Transport. Only read-only calls are repeated if the node
// does not answer: it is not known whether another call was executed.
func (r *rest) Call(ctx context.Context, m Method, path string, params url.Values) (json.RawMessage, error) {
	for try := 0; ; try++ {
		data, err := r.callOnce(ctx, m, path, params)
		if err == nil || m != Get || try >= len(r.retry) || agentlab.CodeOf(err) != agentlab.CodeUnavailable || ctx.Err() != nil {
			return data, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(r.retry[try]):
		}
	}
}

func (r *rest) callOnce(ctx context.Context, m Method, path string, params url.Values) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	var sent atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		WroteHeaders: func() { sent.Store(true) },
	})
	req, err := r.request(ctx, m, path, params)
	if err != nil {
		return nil, err
	}
	r.calls.Add(1)
	resp, err := r.client.Do(req)
	if err != nil {
		return nil, lost(m, sent.Load(), err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, readErr := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	return r.answer(m, resp, body, readErr)
}

// request makes the request. Parameters of GET and DELETE are in the query,
// because the node rejects a body there. It also rejects a chunked body, which
// is never sent: http.NewRequest knows the length of a bytes.Reader.
func (r *rest) request(ctx context.Context, m Method, path string, params url.Values) (*http.Request, error) {
	if _, err := plainPath(path); err != nil {
		return nil, err
	}
	target := r.base + "/api2/json" + path
	// A space is %20, because not every decoder accepts "+".
	encoded := strings.ReplaceAll(params.Encode(), "+", "%20")
	var body io.Reader
	if m == Get || m == Delete {
		if encoded != "" {
			target += "?" + encoded
		}
	} else {
		if len(encoded) > maxBody {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "the parameters of an API call have %d bytes, the limit is %d", len(encoded), maxBody)
		}
		body = bytes.NewReader([]byte(encoded))
	}
	req, err := http.NewRequestWithContext(ctx, string(m), target, body)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "cannot create a request for %s: %w", path, err)
	}
	req.Header.Set("Authorization", r.auth)
	if body != nil {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	return req, nil
}

// lost returns the error of a call without an answer.
func lost(m Method, sent bool, err error) error {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err // its text would contain the address with all parameters
	}
	if e, ok := errors.AsType[*agentlab.Error](err); ok && e.Code == agentlab.CodeDenied {
		return e // the certificate is not trusted
	}
	if denied := certificateError(err); denied != nil {
		return denied
	}
	if m != Get && sent {
		return agentlab.Errorf(agentlab.CodeUnknownOutcome, "the node did not answer: %w", err).WithHint("the call may have been carried out; check before trying again")
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "cannot reach the node's API: %w", err).WithHint("check that pveproxy is running on the node and that its address is reachable from this machine")
}

// answer decodes an answer of the node.
func (r *rest) answer(m Method, resp *http.Response, body []byte, readErr error) (json.RawMessage, error) {
	_, reason, _ := strings.Cut(resp.Status, " ")
	vague := func(format string, args ...any) error {
		code := agentlab.CodeUnavailable
		if m != Get {
			code = agentlab.CodeUnknownOutcome
		}
		return agentlab.Errorf(code, format, args...)
	}
	switch {
	case resp.StatusCode >= 595 && resp.StatusCode <= 599:
		// The proxy lost the worker or stopped waiting for it; the worker may continue and
		// succeed.
		return nil, vague("the node answered %d %s", resp.StatusCode, agentlab.OneLine(reason, 200))
	case resp.StatusCode >= 400:
		return nil, fault4xx(resp.StatusCode, reason, body)
	case resp.StatusCode != http.StatusOK:
		return nil, vague("the node answered %d %s", resp.StatusCode, agentlab.OneLine(reason, 200))
	case readErr != nil:
		return nil, vague("the node's answer is incomplete: %w", readErr)
	case len(body) > maxAnswer:
		return nil, vague("the node's answer is longer than %d bytes", maxAnswer)
	}
	var envelope struct {
		Data *json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(body, &envelope); err != nil {
		return nil, vague("the node's answer is not JSON: %w", err)
	}
	if envelope.Data == nil {
		return json.RawMessage("null"), nil
	}
	return *envelope.Data, nil
}

// fault4xx returns the Fault of an answer that is not a success. Before 8.4
// only the reason phrase has the text; since then the body has it too. The
// text is kept even if the body cannot be parsed.
func fault4xx(status int, reason string, body []byte) *Fault {
	f := &Fault{Status: status, Message: strings.TrimSpace(reason)}
	var b struct {
		Message Str            `json:"message"`
		Errors  map[string]Str `json:"errors"`
	}
	if json.Unmarshal(body, &b) != nil {
		return f
	}
	if line, _, _ := strings.Cut(strings.TrimSpace(string(b.Message)), "\n"); line != "" {
		f.Message = line
	}
	if len(b.Errors) > 0 {
		f.Params = make(map[string]string, len(b.Errors))
		for k, v := range b.Errors {
			f.Params[k] = strings.TrimSpace(string(v))
		}
	}
	return f
}
