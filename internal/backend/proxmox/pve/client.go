package pve

import (
	"bytes"
	"context"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Client makes typed calls over a Transport. It is safe for concurrent use.
//
// Errors of its methods are *agentlab.Error; faults.go tells which code each
// text of a node becomes. Code not_found is given only where the node says
// that the VM asked about has no configuration on that node, or that a task is
// not known. A token whose rights come from a pool gets denied instead for a VM
// that is not there, as for anybody else's: Free tells them apart. Code unknown_outcome means that the call may have been carried
// out. What cannot be understood is internal.
type Client struct {
	t    Transport
	poll Poll
}

// Poll is how often a running task is asked about: after First, then after
// twice as long each time, at most Max.
type Poll struct{ First, Max time.Duration }

// New returns a client over t with the default Poll: 500 ms, at most 5 s.
func New(t Transport) *Client {
	return &Client{t: t, poll: Poll{First: 500 * time.Millisecond, Max: 5 * time.Second}}
}

// WithPoll returns a client over the same transport that polls as p says.
func (c *Client) WithPoll(p Poll) *Client { return &Client{t: c.t, poll: p} }

// Root returns what only root on the node can do; nil over REST.
func (c *Client) Root() Root { return c.t.Root() }

// Calls returns how many calls the transport has made.
func (c *Client) Calls() int64 { return c.t.Calls() }

// Close closes the transport.
func (c *Client) Close() error { return c.t.Close() }

// call makes one call and decodes its data into out, unless out is nil. what
// is the deed for messages, e.g. "start VM 101".
func (c *Client) call(ctx context.Context, what string, m Method, path string, params url.Values, out any) error {
	data, err := c.t.Call(ctx, m, path, params)
	if err != nil {
		return explain(what, err)
	}
	if out == nil {
		return nil
	}
	if len(bytes.TrimSpace(data)) == 0 {
		data = json.RawMessage("null")
	}
	if err := json.Unmarshal(data, out); err != nil {
		code := agentlab.CodeInternal
		if m != Get {
			code = agentlab.CodeUnknownOutcome
		}
		return agentlab.Errorf(code, "%s: the node's answer is not understood: %w", what, err)
	}
	return nil
}

// list makes one call that returns a list. null is none: an empty list is [],
// and what is not told must not be taken for absent.
func list[T any](ctx context.Context, c *Client, what, path string, params url.Values) ([]T, error) {
	var out []T
	if err := c.call(ctx, what, Get, path, params, &out); err != nil {
		return nil, err
	}
	if out == nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "%s: the node's answer is no list", what)
	}
	return out, nil
}

// How often a call is made that fails for a reason which passes at once, and
// the pause after the first try, which grows by as much with each further one.
const (
	retryTries = 6
	retryPause = 100 * time.Millisecond
)

// retry makes a call until it asks for no further try, tries are used up, or
// ctx ends. It returns the error of the last try.
func (c *Client) retry(ctx context.Context, call func() (again bool, err error)) error {
	for try := 1; ; try++ {
		again, err := call()
		if !again || try == retryTries {
			return err
		}
		select {
		case <-time.After(min(retryPause, c.poll.First) * time.Duration(try)):
		case <-ctx.Done():
			return err
		}
	}
}

// noWorker is the answer of a node whose worker was killed before it began.
const noWorker = "got no worker upid - start worker failed"

// task makes one call that begins a task. An answer that names none proves
// nothing: it is neither a failure nor a success. A node that could not start
// the worker has done nothing, so the call is made again.
func (c *Client) task(ctx context.Context, what string, m Method, path string, params url.Values) (UPID, error) {
	var s Str
	err := c.retry(ctx, func() (again bool, err error) {
		err = c.call(ctx, what, m, path, params, &s)
		f, ok := asFault(err)
		return ok && strings.HasPrefix(f.Message, noWorker), err
	})
	if err != nil {
		return "", err
	}
	u, err := ParseUPID(string(s))
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnknownOutcome, "%s: the node's answer: %w", what, err)
	}
	return u, nil
}

// vmCall is call for one VM: an answer "no configuration" is not_found only
// when it is about this VM.
func (c *Client) vmCall(ctx context.Context, what string, m Method, node string, vmid int, sub string, params url.Values, out any) error {
	return aboutVM(c.call(ctx, vmWhat(what, vmid), m, vmPath(node, vmid, sub), params, out), vmid)
}

func (c *Client) vmTask(ctx context.Context, what string, m Method, node string, vmid int, sub string, params url.Values) (UPID, error) {
	u, err := c.task(ctx, vmWhat(what, vmid), m, vmPath(node, vmid, sub), params)
	return u, aboutVM(err, vmid)
}

func vmWhat(what string, vmid int) string { return what + " VM " + strconv.Itoa(vmid) }

// apiPath joins segments to a path, each escaped.
func apiPath(segments ...string) string {
	var b strings.Builder
	for _, s := range segments {
		b.WriteByte('/')
		b.WriteString(url.PathEscape(s))
	}
	return b.String()
}

// vmPath is the path of a VM; sub has no leading slash and needs no escape.
func vmPath(node string, vmid int, sub string) string {
	p := apiPath("nodes", node, "qemu", strconv.Itoa(vmid))
	if sub != "" {
		p += "/" + sub
	}
	return p
}

// boolParam is a truth value as form bodies take it: 1 or 0, nothing else.
func boolParam(b bool) string {
	if b {
		return "1"
	}
	return "0"
}
