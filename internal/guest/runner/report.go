package runner

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// control has the controller's requests to the runner and the runner's report.
type control struct {
	r *Runner

	mu         sync.Mutex
	progressed time.Time // when progress was last reported
	report     guestapi.Report
	news       chan struct{} // a report must be sent
	stop       stopRequest
	stopped    chan struct{} // closed with stop
	gone       bool          // the controller no longer knows this sandbox
	deadline   time.Duration // uptime; 0: none
	rearm      chan struct{}
}

func newControl(r *Runner, deadline time.Duration) *control {
	return &control{
		r: r, deadline: deadline, news: make(chan struct{}, 1), rearm: make(chan struct{}, 1),
		stopped: make(chan struct{}), report: guestapi.Report{Status: "RUNNING", Phase: "bootstrap"},
	}
}

// phase reports the current phase to the controller.
func (c *control) phase(name string) {
	c.mu.Lock()
	c.report.Phase, c.report.Progress = name, nil
	c.mu.Unlock()
	wake(c.news)
}

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// requestStop requests a stop of the agent; the reason of the first request is used.
func (c *control) requestStop(stop stopRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stop.Status != "" {
		return
	}
	c.stop = stop
	if err := c.r.dir.save(fileStop, stop); err != nil {
		c.r.log.Error("the stop is not noted", "err", err)
	}
	close(c.stopped)
}

func (c *control) stopRequest() stopRequest {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stop
}

// abandon stops the agent because the controller does not accept the token:
// for the controller the job has ended.
func (c *control) abandon() {
	c.mu.Lock()
	c.gone = true
	c.mu.Unlock()
	c.requestStop(stopRequest{Status: "CANCELLED"})
}

func (c *control) abandoned() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gone
}

// deadlineSlack is how much the controller's deadline may differ from the runner's
// before the runner's is changed, because answers have a delay.
const deadlineSlack = 3 * time.Second

func (c *control) applyDirective(d guestapi.Directive) {
	switch d.Stop {
	case "":
	case "CANCELLED", "TIMEOUT":
		c.requestStop(stopRequest{d.Stop, d.Reason})
	default:
		c.requestStop(stopRequest{"CANCELLED", d.Reason}) // a kind of stop of a newer controller
	}
	if d.SecondsLeft <= 0 {
		return
	}
	at := hostos.SinceBoot() + time.Duration(d.SecondsLeft)*time.Second
	c.mu.Lock()
	defer c.mu.Unlock()
	if diff := at - c.deadline; c.deadline == 0 || diff > deadlineSlack || diff < -deadlineSlack {
		c.deadline = at
		wake(c.rearm)
	}
}

// run sends reports, receives directives and watches the deadline until ctx
// ends.
func (c *control) run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { c.reportLoop(ctx) })
	wg.Go(func() { c.directiveLoop(ctx) })
	wg.Go(func() { c.clockLoop(ctx) })
	wg.Wait()
}

func (c *control) reportLoop(ctx context.Context) {
	for {
		c.mu.Lock()
		rep := c.report
		c.mu.Unlock()
		rep.Kills = c.r.noteKills()
		// Not retried for longer than a heartbeat: there may be a newer
		// report.
		err := c.r.api.retry(ctx, c.r.cfg.Timing.Heartbeat, func() error { return c.send(ctx, rep) })
		if denied(err) {
			c.abandon()
			return
		}
		select {
		case <-c.news:
		case <-time.After(c.r.cfg.Timing.Heartbeat):
		case <-ctx.Done():
			return
		}
	}
}

func (c *control) send(ctx context.Context, rep guestapi.Report) error {
	var d guestapi.Directive
	err := c.r.api.call(ctx, callTimeout, http.MethodPost, guestapi.PathReport, rep, &d)
	if err == nil {
		c.applyDirective(d)
	}
	return err
}

func (c *control) directiveLoop(ctx context.Context) {
	wait := c.r.cfg.Timing.Poll
	path := fmt.Sprintf("%s?wait=%d", guestapi.PathDirective, int(wait.Seconds()))
	for ctx.Err() == nil && c.stopRequest().Status == "" {
		var d guestapi.Directive
		began := time.Now()
		err := c.r.api.call(ctx, wait+callTimeout, http.MethodGet, path, nil, &d)
		switch {
		case denied(err):
			c.abandon()
			return
		case err == nil:
			c.applyDirective(d)
			if time.Since(began) >= time.Second {
				continue
			}
		}
		if !sleep(ctx, time.Second) { // prevents a busy loop after an error or an early answer
			return
		}
	}
}

func (c *control) clockLoop(ctx context.Context) {
	for {
		c.mu.Lock()
		deadline := c.deadline
		c.mu.Unlock()
		left := time.Duration(1<<62 - 1)
		if deadline > 0 {
			if left = deadline - hostos.SinceBoot(); left <= 0 {
				c.requestStop(stopRequest{Status: "TIMEOUT"})
				return
			}
		}
		select {
		case <-time.After(left):
		case <-c.rearm:
		case <-ctx.Done():
			return
		}
	}
}
