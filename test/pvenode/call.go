package pvenode

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Request is one call of the API, by whichever face.
type Request struct {
	Method string // GET, POST, PUT or DELETE
	Path   string // after /api2/json, unescaped
	// Params are those of query, body or command line; a list has several
	// values.
	Params map[string][]string
	// User is who calls: "root@pam", "user@realm" or "user@realm!token".
	User string
	// CLI makes workers run in the foreground, as the command line tools do:
	// their log goes to Out, and the call ends when they do.
	CLI bool
	// Out and Err are the output of the command line; nil discards.
	Out, Err io.Writer
	// Node is the node that the tools run on; "" is the first one.
	Node string
}

// Response is the answer of a call.
type Response struct {
	Data  any    // what JSON has under "data"
	Total *int   // of lists that tell it
	Err   *Error // nil when the handler did not fail

	// Task is the UPID when the call began a task, TaskError how it ended:
	// "" for OK and for warnings. With CLI it has ended.
	Task, TaskError string
}

// call is one request while it is carried out, and later its worker.
type call struct {
	n    *Node
	ctx  context.Context
	ep   *endpoint
	p    values
	user string // without token
	tok  string // token id, "" for a ticket
	node string
	proc *holder
	cli  bool
	task *task // of a worker
	out  io.Writer
	err  io.Writer
	resp *Response
}

// values are checked parameters. Booleans are "1" or "0".
type values map[string][]string

func (v values) has(name string) bool { _, ok := v[name]; return ok }

func (v values) str(name string) string {
	if l := v[name]; len(l) > 0 {
		return l[len(l)-1]
	}
	return ""
}

func (v values) num(name string) int { i, _ := strconv.Atoi(v.str(name)); return i }

func (v values) yes(name string) bool { return v.str(name) == "1" }

// list splits a list parameter, given as several values or as one with
// separators.
func (v values) list(name string) []string {
	var out []string
	for _, s := range v[name] {
		out = append(out, splitList(s)...)
	}
	return out
}

// splitList splits a list as every list option is written: at , ; NUL and
// blanks.
func splitList(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ';' || r == 0 || r == ' ' || r == '\n' || r == '\t' })
}

func itoa(i int) string { return strconv.Itoa(i) }

func sortedKeys[V any](m map[string]V) []string {
	return slices.Sorted(maps.Keys(m))
}

// say is a line of a worker's standard output, or of a call's.
func (c *call) say(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	if c.task != nil {
		c.n.tasks.append(c.task, line)
	}
	if c.cli && c.out != nil {
		fmt.Fprintln(c.out, line)
	}
}

// warn is a line of standard error, which is a worker's log too.
func (c *call) warn(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	if c.task != nil {
		c.say("%s", line)
		return
	}
	if c.cli && c.err != nil {
		fmt.Fprintln(c.err, line)
	}
}

// warnInline writes a warning without a newline, like Proxmox's messages about
// a wait for a lock.
func (c *call) warnInline(text string) { c.warn("%s", text) }

// root reports whether the caller is root@pam, with a ticket or on the node.
func (c *call) root() bool { return c.user == "root@pam" && c.tok == "" }

// authUser is the caller as UPIDs name it.
func (c *call) authUser() string {
	if c.tok != "" {
		return c.user + "!" + c.tok
	}
	return c.user
}

// Invoke carries out one call as its caller may, and returns when the real
// node would answer. It is what every face uses.
func (n *Node) Invoke(ctx context.Context, r Request) Response {
	ep, p := n.find(r.Method, r.Path)
	if ep == nil {
		return Response{Err: notImplemented(r.Method, r.Path)}
	}
	c := &call{n: n, ctx: ctx, ep: ep, cli: r.CLI, out: r.Out, err: r.Err, proc: newHolder(), resp: &Response{}}
	c.user, c.tok, _ = strings.Cut(r.User, "!")
	c.node = r.Node
	if c.node == "" {
		c.node = n.name
	}
	if err := c.merge(p, r.Params); err != nil {
		return Response{Err: err}
	}
	number := n.count.enter(r.Method, ep.path)
	if n.cfg.OnCall != nil {
		n.cfg.OnCall(number, r.Method, ep.path, false)
		defer n.cfg.OnCall(number, r.Method, ep.path, true)
	}
	if err := n.callPoint(c, r.Method, false); err != nil {
		return Response{Err: err}
	}
	data, err := c.serveAlive()
	c.n.locks.drop(c.proc)
	c.resp.Data, c.resp.Err = data, err
	if err == nil {
		if err := n.callPoint(c, r.Method, true); err != nil {
			return Response{Err: err, Task: c.resp.Task}
		}
	}
	return *c.resp
}

func (c *call) merge(path values, given map[string][]string) *Error {
	c.p = path
	for k, v := range given {
		if _, twice := path[k]; twice {
			return badParam(k, "duplicate parameter (already defined in URI)")
		}
		c.p[k] = v
	}
	return nil
}

// serveAlive is serve; a process that is killed in it gives no answer.
func (c *call) serveAlive() (data any, err *Error) {
	defer func() {
		if r := recover(); r != nil {
			if _, dead := r.(killed); !dead {
				panic(r)
			}
			data, err = nil, &Error{Status: 596, Message: "Broken pipe"}
		}
	}()
	return c.serve()
}

// serve is the order of the real node: privileges, the node that it is for,
// parameters, the handler.
func (c *call) serve() (any, *Error) {
	if c.ep.perm != nil && !c.root() {
		if err := c.ep.perm(c); err != nil {
			return nil, err
		}
	}
	if name := c.p.str("node"); name != "" && strings.HasPrefix(c.ep.path, "/nodes/{node}") {
		if err := c.goTo(name); err != nil {
			return nil, err
		}
	}
	if err := c.ep.verify(c.n, c.p, c.cli); err != nil {
		return nil, err
	}
	return c.ep.run(c)
}

// goTo makes another node of the cluster carry out the call.
func (c *call) goTo(name string) *Error {
	if name == "localhost" {
		c.p["node"] = []string{c.node}
		return nil
	}
	c.n.mu.Lock()
	m := c.n.nodes[name]
	up := m != nil && m.online
	c.n.mu.Unlock()
	switch {
	case m == nil:
		return dief("hostname lookup '%s' failed - failed to get address info for: %s: Temporary failure in name resolution", name, name)
	case !up:
		return &Error{Status: 595, Message: "No route to host"}
	}
	c.node = name
	return nil
}

// fork starts a worker. Over REST it continues by itself and the call returns its
// UPID; on the command line it runs in the foreground.
func (c *call) fork(typ, id string, work func(w *call) *Error) (any, *Error) {
	if err := c.n.point(c, "fork"); err != nil {
		return nil, err
	}
	w := *c
	if len(c.proc.held) > 0 { // open files are inherited, and their locks with them
		c.proc = newHolder()
	} else {
		w.proc = newHolder()
	}
	w.task = c.n.newTask(c, typ, id)
	c.resp.Task = w.task.upid
	if c.cli {
		c.resp.TaskError = c.n.runWorker(&w, work)
		return w.task.upid, nil
	}
	w.ctx = c.n.ctx
	c.n.workers.Go(func() { c.n.runWorker(&w, work) })
	return w.task.upid, nil
}

// pause waits as long as the real node works, or until the node ends.
func (c *call) pause(d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-c.ctx.Done():
		if errors.Is(context.Cause(c.ctx), errRestart) {
			panic(killed{})
		}
	}
}
