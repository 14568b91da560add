package pvenode

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// taskTable is the node's tasks, oldest first. Node.mu guards it.
type taskTable struct {
	all  []*task
	byID map[string]*task
}

type task struct {
	upid, node, typ, id, user, token string
	pid, pstart                      int
	start, end                       time.Time
	log                              []string
	warnings                         int
	status                           string // "" while it runs, else its exit status
	stop                             context.CancelCauseFunc
	done                             chan struct{}
	mu                               chan struct{} // guards log: one token
}

func (t *taskTable) init() { t.byID = map[string]*task{} }

func (t *taskTable) append(to *task, line string) {
	to.mu <- struct{}{}
	to.log = append(to.log, strings.Split(line, "\n")...)
	<-to.mu
}

func (t *task) lines() []string {
	t.mu <- struct{}{}
	defer func() { <-t.mu }()
	return append([]string(nil), t.log...)
}

func (n *Node) newTask(c *call, typ, id string) *task {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	t := &task{
		node: c.node, typ: typ, id: id, user: c.user, token: c.tok, start: now,
		pid: n.pid(), pstart: int(now.Sub(n.started)/(10*time.Millisecond)) + 100000,
		done: make(chan struct{}), mu: make(chan struct{}, 1),
	}
	t.upid = fmt.Sprintf("UPID:%s:%08X:%08X:%08X:%s:%s:%s:", c.node, t.pid, t.pstart, now.Unix(), typ, id, c.authUser())
	n.tasks.all = append(n.tasks.all, t)
	n.tasks.byID[t.upid] = t
	return t
}

// killed is what a worker dies of when it is killed: it cleans up nothing.
type killed struct{}

// runWorker runs a worker to its end and returns its exit status when that is
// a fault.
func (n *Node) runWorker(w *call, work func(*call) *Error) (fault string) {
	ctx, cancel := context.WithCancelCause(w.ctx)
	n.mu.Lock()
	w.task.stop = cancel
	n.mu.Unlock()
	w.ctx = ctx
	defer cancel(nil)
	status := ""
	func() {
		defer func() {
			if r := recover(); r != nil {
				if _, dead := r.(killed); !dead {
					panic(r)
				}
				status = "unexpected status"
			}
		}()
		err := n.point(w, w.task.typ)
		if err == nil {
			err = work(w)
		}
		if err == nil {
			err = n.point(w, w.task.typ+".done")
		}
		status = n.endLine(w, err)
	}()
	n.locks.drop(w.proc)
	n.mu.Lock()
	w.task.status, w.task.end = status, time.Now()
	n.mu.Unlock()
	close(w.task.done)
	if status == "OK" || strings.HasPrefix(status, "WARNINGS: ") {
		return ""
	}
	return status
}

// endLine writes the last line of a task's log and returns its exit status.
func (n *Node) endLine(w *call, err *Error) string {
	switch {
	case err != nil:
		m := message(err)
		n.tasks.append(w.task, "TASK ERROR: "+m)
		return m
	case w.task.warnings > 0:
		s := "WARNINGS: " + itoa(w.task.warnings)
		n.tasks.append(w.task, "TASK "+s)
		return s
	}
	n.tasks.append(w.task, "TASK OK")
	return "OK"
}

var upidRe = regexp.MustCompile(`^UPID:([a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?):([0-9A-Fa-f]{8}):([0-9A-Fa-f]{8,9}):([0-9A-Fa-f]{8}):([^:\s]+):([^:\s]*):([^:\s]+):$`)

// findTask looks up the task that a call names. One's own is everybody's to see
// and stop; another's takes a privilege on the node.
func (c *call) findTask(priv string) (*task, *Error) {
	upid := c.p.str("upid")
	if !upidRe.MatchString(upid) {
		return nil, badParam("upid", "unable to parse worker upid")
	}
	c.n.mu.Lock()
	t := c.n.tasks.byID[upid]
	c.n.mu.Unlock()
	switch {
	case t == nil:
		return nil, badParam("upid", "no such task")
	case t.user == c.user && (c.tok == "" || t.token == c.tok):
		return t, nil
	}
	return t, c.need("/nodes/"+c.node, priv)
}

func apiTaskStatus(c *call) (any, *Error) {
	t, err := c.findTask("Sys.Audit")
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	out := map[string]any{
		"node": t.node, "upid": t.upid, "pid": t.pid, "pstart": t.pstart, "starttime": t.start.Unix(),
		"type": t.typ, "id": t.id, "user": t.user, "status": "running",
	}
	if t.token != "" {
		out["tokenid"] = t.token
	}
	if t.status != "" {
		out["status"], out["exitstatus"] = "stopped", t.status
	}
	return out, nil
}

func apiTaskLog(c *call) (any, *Error) {
	t, err := c.findTask("Sys.Audit")
	if err != nil {
		return nil, err
	}
	lines := t.lines()
	total := len(lines)
	c.resp.Total = &total
	start, limit := c.p.num("start"), 50
	if c.p.has("limit") {
		limit = c.p.num("limit")
	}
	out := []map[string]any{}
	for i := start; i < total && (limit == 0 || i < start+limit); i++ {
		out = append(out, map[string]any{"n": i + 1, "t": lines[i]})
	}
	if total == 0 {
		out = append(out, map[string]any{"n": 1, "t": "no content"})
	}
	return out, nil
}

func apiTaskStop(c *call) (any, *Error) {
	t, err := c.findTask("Sys.Modify")
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	stop := t.stop
	c.n.mu.Unlock()
	if stop != nil {
		stop(errInterrupted)
	}
	return nil, nil
}

var errInterrupted = dief("received interrupt")

func apiTasks(c *call) (any, *Error) {
	n := c.n
	auditor := c.may("/nodes/"+c.node, "Sys.Audit")
	source := c.p.str("source")
	if source == "" {
		source = "archive"
	}
	limit := 50
	if c.p.has("limit") {
		limit = c.p.num("limit")
	}
	since, _ := strconv.ParseInt(c.p.str("since"), 10, 64)
	until, _ := strconv.ParseInt(c.p.str("until"), 10, 64)
	n.mu.Lock()
	defer n.mu.Unlock()
	out := []map[string]any{}
	total := 0
	for i := len(n.tasks.all) - 1; i >= 0; i-- {
		t := n.tasks.all[i]
		switch {
		case t.node != c.node, source == "active" && t.status != "", source == "archive" && t.status == "":
			continue
		case !auditor && (t.user != c.user || (c.tok != "" && t.token != c.tok)):
			continue
		case c.p.has("vmid") && t.id != c.p.str("vmid"), c.p.has("typefilter") && t.typ != c.p.str("typefilter"):
			continue
		case since > 0 && t.start.Unix() < since, until > 0 && t.start.Unix() > until:
			continue
		case c.p.yes("errors") && t.status == "OK":
			continue
		case c.p.has("userfilter") && !strings.Contains(strings.ToLower(t.user), strings.ToLower(c.p.str("userfilter"))):
			continue
		case c.p.has("statusfilter") && !c.p.yes("errors") && !contains(c.p.list("statusfilter"), t.kind()):
			continue
		}
		total++
		if total <= c.p.num("start") || (limit > 0 && len(out) >= limit) {
			continue
		}
		out = append(out, t.entry())
	}
	c.resp.Total = &total
	return out, nil
}

// kind is the status as the filter of lists names it.
func (t *task) kind() string {
	switch {
	case t.status == "OK":
		return "ok"
	case strings.HasPrefix(t.status, "WARNINGS: "):
		return "warning"
	case t.status == "" || t.status == "unexpected status":
		return "unknown"
	}
	return "error"
}

func (t *task) entry() map[string]any {
	e := map[string]any{
		"upid": t.upid, "pid": t.pid, "pstart": t.pstart, "starttime": t.start.Unix(), "node": t.node,
		"id": t.id, "user": t.user, "type": t.typ,
	}
	if t.token != "" {
		e["tokenid"] = t.token
	}
	e["status"] = "RUNNING"
	if t.status != "" {
		e["status"], e["endtime"] = t.status, t.end.Unix()
	}
	return e
}
