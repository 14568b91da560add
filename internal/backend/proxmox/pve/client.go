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
// Errors of its methods are *agentlab.Error; faults.go maps the texts of a node to codes. Code
// not_found is returned only if the node answers that the VM of the call has no configuration on
// that node, or that a task is not known. A token whose rights come from a pool gets denied instead
// for a VM that does not exist, as for another user's VM: Free distinguishes the two. Code
// unknown_outcome means that the call may have been executed. An answer that cannot be parsed has
// code internal.
type Client struct {
	t    Transport
	poll Poll
}

// Poll is the interval of status requests for a running task: First, then
// doubled each time, at most Max.
type Poll struct{ First, Max time.Duration }

// New returns a client over t with the default Poll: 500 ms, at most 5 s.
func New(t Transport) *Client {
	return &Client{t: t, poll: Poll{First: 500 * time.Millisecond, Max: 5 * time.Second}}
}

// WithPoll returns a client over the same transport with another Poll.
func (c *Client) WithPoll(p Poll) *Client { return &Client{t: c.t, poll: p} }

// Root returns the operations that only root on the node can do; nil over
// REST.
func (c *Client) Root() Root { return c.t.Root() }

// Calls returns how many calls the transport has made.
func (c *Client) Calls() int64 { return c.t.Calls() }

// Ended reports whether a task is known to have succeeded, so that Wait makes no call.
func (c *Client) Ended(u UPID) bool {
	_, ok := c.t.Ended(u)
	return ok
}

// Close closes the transport.
func (c *Client) Close() error { return c.t.Close() }

// call makes one call and decodes its data into out, unless out is nil. what
// names the operation for messages, e.g. "start VM 101".
func (c *Client) call(ctx context.Context, what string, m Method, path string, params url.Values, out any) error {
	data, err := c.t.Call(ctx, m, path, params)
	if err != nil {
		return callError(what, err)
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
		return agentlab.Errorf(code, "%s: invalid answer of the node: %w", what, err)
	}
	return nil
}

// list makes one call that returns a list. null is an error: an empty list is
// [], and unknown must not count as absent.
func list[T any](ctx context.Context, c *Client, what, path string, params url.Values) ([]T, error) {
	var out []T
	if err := c.call(ctx, what, Get, path, params, &out); err != nil {
		return nil, err
	}
	if out == nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "%s: invalid answer of the node: not a list", what)
	}
	return out, nil
}

// How often a call with a short temporary error is made, and the pause after
// the first attempt, which grows by the same time with each further one.
const (
	retryTries = 6
	retryPause = 100 * time.Millisecond
)

// retry makes a call until call returns again = false, the attempts are used
// up, or ctx ends. It returns the error of the last attempt.
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

// noWorker is the answer of a node whose worker was killed before it started.
const noWorker = "got no worker upid - start worker failed"

// task makes one call that starts a task. An answer without a task proves
// neither failure nor success. A node that could not start the worker has done
// nothing, so the call is repeated.
func (c *Client) task(ctx context.Context, what string, m Method, path string, params url.Values) (UPID, error) {
	var s Str
	err := c.retry(ctx, func() (again bool, err error) {
		err = c.call(ctx, what, m, path, params, &s)
		f, ok := faultOf(err)
		return ok && strings.HasPrefix(f.Message, noWorker), err
	})
	if err != nil {
		return "", err
	}
	u, err := ParseUPID(string(s))
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnknownOutcome, "%s: invalid answer of the node: %w", what, err)
	}
	return u, nil
}

// vmCall is call for one VM: an answer "no configuration" has code not_found
// only if it is about this VM.
func (c *Client) vmCall(ctx context.Context, what string, m Method, node string, vmid int, sub string, params url.Values, out any) error {
	return onlyAboutVM(c.call(ctx, vmWhat(what, vmid), m, vmPath(node, vmid, sub), params, out), vmid)
}

func (c *Client) vmTask(ctx context.Context, what string, m Method, node string, vmid int, sub string, params url.Values) (UPID, error) {
	u, err := c.task(ctx, vmWhat(what, vmid), m, vmPath(node, vmid, sub), params)
	return u, onlyAboutVM(err, vmid)
}

func vmWhat(what string, vmid int) string { return what + " VM " + strconv.Itoa(vmid) }

// apiPath joins the escaped segments to a path.
func apiPath(segments ...string) string {
	var b strings.Builder
	for _, s := range segments {
		b.WriteByte('/')
		b.WriteString(url.PathEscape(s))
	}
	return b.String()
}

// vmPath returns the path of a VM; sub has no leading slash and needs no
// escaping.
func vmPath(node string, vmid int, sub string) string {
	p := apiPath("nodes", node, "qemu", strconv.Itoa(vmid))
	if sub != "" {
		p += "/" + sub
	}
	return p
}

// boolParam returns a boolean in the format of form bodies: 1 or 0.
func boolParam(b bool) string {
	if b {
		return "1"
	}
	return "0"
}
