package pve

import (
	"context"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// Task is the state of a task on a node.
type Task struct {
	UPID       UPID   `json:"upid"`
	Type       string `json:"type"`
	User       string `json:"user"`      // without the token's name
	StartTime  Int    `json:"starttime"` // seconds since 1970
	EndTime    Int    `json:"endtime"`   // in lists, if ended
	Status     string `json:"status"`    // running or stopped; in lists, the exit status of an ended task
	ExitStatus Str    `json:"exitstatus"`
}

// OK reports whether an ended task succeeded: exit status "OK" or
// "WARNINGS: n".
func (t Task) OK() bool {
	return t.ExitStatus == "OK" || warnings.MatchString(string(t.ExitStatus))
}

var warnings = lazyre.New(`^WARNINGS: \d+$`)

// inconclusive reports whether the exit status has no information. That is the case
// for a killed task, and for a short time for every task of pvesh, whose last
// line is written after its end.
func (t Task) inconclusive() bool {
	if t.Running() {
		return false
	}
	code, _, _ := lookup(string(t.ExitStatus))
	return code == agentlab.CodeUnknownOutcome
}

// Running reports whether the task is running.
func (t Task) Running() bool { return t.Status == "running" }

// TaskStatus returns the state of a task. Code not_found means that the node
// has no such task.
func (c *Client) TaskStatus(ctx context.Context, u UPID) (Task, error) {
	var out Task
	if err := c.call(ctx, "read the status of task "+string(u), Get, apiPath("nodes", u.Node(), "tasks", string(u), "status"), nil, &out); err != nil {
		return Task{}, err
	}
	if out.Status != "running" && out.Status != "stopped" || out.Status == "stopped" && out.ExitStatus == "" {
		return Task{}, agentlab.Errorf(agentlab.CodeInternal, "read the status of task %s: invalid status %q", u, agentlab.OneLine(out.Status, 40))
	}
	return out, nil
}

// logPage is how many lines of a log one call reads. The default of the API is
// 50, which omits the end of a long log.
const logPage = 500

// TaskLog reads a task's log from line start on (from 0), at most limit lines.
func (c *Client) TaskLog(ctx context.Context, u UPID, start, limit int) ([]string, error) {
	var lines []struct {
		T Str `json:"t"`
	}
	err := c.call(ctx, "read the log of task "+string(u), Get, apiPath("nodes", u.Node(), "tasks", string(u), "log"),
		url.Values{"start": {strconv.Itoa(start)}, "limit": {strconv.Itoa(limit)}}, &lines)
	if err != nil {
		return nil, err
	}
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = string(l.T)
	}
	return out, nil
}

// taskTail reads the last n lines of a task's log that are not the progress of
// a copy. It does not read beyond 20 pages of a log.
func (c *Client) taskTail(ctx context.Context, u UPID, n int) ([]string, error) {
	var tail []string
	for page := range 20 {
		lines, err := c.TaskLog(ctx, u, page*logPage, logPage)
		if err != nil {
			return nil, err
		}
		for _, l := range lines {
			if !isProgress(l) {
				tail = append(tail, l)
			}
		}
		if len(tail) > n {
			tail = tail[len(tail)-n:]
		}
		if len(lines) < logPage {
			break
		}
	}
	return tail, nil
}

// isProgress reports whether a line of a log is the progress of a copy.
func isProgress(line string) bool { return strings.HasPrefix(line, "transferred ") }

// TaskFilter selects tasks. The zero value lists the last 50 of all.
type TaskFilter struct {
	VMID    int    // 0: of any
	Running bool   // only running ones
	Type    string // "": of any type
	Limit   int    // 0: 50
}

// Tasks lists tasks of a node, newest first: all of them with Sys.Audit on the
// node, otherwise the caller's own. The Status of an ended task is its exit
// status.
func (c *Client) Tasks(ctx context.Context, node string, f TaskFilter) ([]Task, error) {
	p := url.Values{"source": {"all"}}
	if f.Running {
		p.Set("source", "active")
	}
	if f.VMID != 0 {
		p.Set("vmid", strconv.Itoa(f.VMID))
	}
	setNonEmpty(p, "typefilter", f.Type)
	if f.Limit != 0 {
		p.Set("limit", strconv.Itoa(f.Limit))
	}
	out, err := list[Task](ctx, c, "list tasks of node "+node, apiPath("nodes", node, "tasks"), p)
	if f.Running {
		out = slices.DeleteFunc(out, func(t Task) bool { return t.EndTime != 0 })
	}
	return out, err
}

// StopTask requests the end of a task; the task itself cleans up.
func (c *Client) StopTask(ctx context.Context, u UPID) error {
	return c.call(ctx, "stop task "+string(u), Delete, apiPath("nodes", u.Node(), "tasks", string(u)), nil, nil)
}

// Wait waits for the end of a task and returns its final state. The error of a failed task has its
// exit status and the relevant last lines of its log. If ctx ends first, the task continues and the
// error has code unknown_outcome.
func (c *Client) Wait(ctx context.Context, u UPID) (Task, error) {
	pause := c.poll.First
	misses, vague := 0, 0
	for {
		t, err := c.TaskStatus(ctx, u)
		switch {
		case err == nil && t.inconclusive() && vague < 3:
			vague++
		case err == nil && !t.Running():
			if t.OK() {
				return t, nil
			}
			return t, c.taskError(ctx, u, t)
		case err == nil:
			misses = 0
		case ctx.Err() != nil:
			return Task{}, waitInterrupted(ctx, u)
		case agentlab.CodeOf(err) != agentlab.CodeUnavailable && agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome || misses >= 5:
			return Task{}, agentlab.Errorf(agentlab.CodeUnknownOutcome, "the result of task %s is unknown: %w", u, err)
		default:
			misses++ // the node does not answer at the moment; the task may still be running
		}
		select {
		case <-ctx.Done():
			return Task{}, waitInterrupted(ctx, u)
		case <-time.After(pause):
		}
		pause = min(pause*2, c.poll.Max)
	}
}

func waitInterrupted(ctx context.Context, u UPID) error {
	return agentlab.Errorf(agentlab.CodeUnknownOutcome, "stopped waiting for task %s: %w", u, context.Cause(ctx))
}

// taskError returns the error of a failed task.
func (c *Client) taskError(ctx context.Context, u UPID, t Task) error {
	tail, err := c.taskTail(ctx, u, 12)
	if err != nil {
		tail = nil // the exit status is sufficient
	}
	return explainTask(u, string(t.ExitStatus), tail)
}
