package guesttest

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Direct sets the directive for the runner.
func (c *Controller) Direct(stop string) { c.DirectFor(stop, "") }

// DirectFor is Direct with a reason.
func (c *Controller) DirectFor(stop, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stop, c.reason = stop, reason
	c.wake()
}

// Expire ends the time of the job: from now on, directives have one second left.
func (c *Controller) Expire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = time.Now()
	c.wake()
}

func (c *Controller) now() guestapi.Directive {
	d := guestapi.Directive{Stop: c.stop, Reason: c.reason}
	if !c.deadline.IsZero() {
		d.SecondsLeft = max(1, int64(time.Until(c.deadline).Seconds()))
	}
	return d
}

// Directive implements report.Jobs.
func (c *Controller) Directive(ctx context.Context, _ int, wait time.Duration) (guestapi.Directive, error) {
	timeout := time.NewTimer(wait)
	defer timeout.Stop()
	for {
		c.mu.Lock()
		d, changed, down := c.now(), c.changed, c.down
		c.mu.Unlock()
		if down != nil || d.Stop != "" {
			return d, down
		}
		select {
		case <-changed:
		case <-timeout.C:
			return d, nil
		case <-ctx.Done():
			return d, ctx.Err()
		}
	}
}
