package doctor

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// checked is a backend with the findings of its last check.
type checked struct {
	b     *fleet.Backend
	clock func() time.Time
	also  func(context.Context) // what a check in the background does too; nil means nothing

	recheck sync.Mutex // held while an error is checked again

	mu       sync.Mutex
	findings []backend.Finding
	at       time.Time     // when they were found; zero before
	checking chan struct{} // closed when the running check has ended; nil if none runs
}

// now checks the backend for a client that waits.
func (c *checked) now(ctx context.Context) []backend.Finding {
	limit := cmp.Or(c.b.Info().CheckLimit, checkLimit)
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	found := c.b.Check(ctx)
	switch {
	case caller.Err() != nil:
	case ctx.Err() != nil: // what it has found until then may be the reason
		found = append(found, backend.Finding{
			Name: "time", Level: backend.LevelError, Remedy: "check again; see 'agentlab daemon logs'",
			Detail: fmt.Sprintf("the check of the backend did not end within %s: what is not listed here is unknown", limit),
		})
	default:
		c.set(found)
	}
	return found
}

// withDown returns a copy of findings, with one more if the backend does not answer.
func (c *checked) withDown(found []backend.Finding) []backend.Finding {
	found = slices.Clone(found)
	if down, ok := c.b.Finding(); ok {
		found = append(found, down)
	}
	return found
}

func (c *checked) set(found []backend.Finding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.findings, c.at = found, c.clock()
}

// newest returns the newest findings, and starts a new check in the
// background if they are old. It waits only if there are none yet.
func (c *checked) newest(ctx context.Context) []backend.Finding {
	c.mu.Lock()
	if c.checking == nil && c.clock().Sub(c.at) > findingsAge {
		c.checking = make(chan struct{})
		go c.check(context.WithoutCancel(ctx), c.checking)
	}
	running, first := c.checking, c.at.IsZero()
	c.mu.Unlock()
	if first && running != nil {
		select {
		case <-running:
		case <-ctx.Done():
		case <-time.After(firstFinding):
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.findings
}

// check runs one check. The daemon does not wait for it at its end, because it
// changes nothing.
func (c *checked) check(ctx context.Context, done chan struct{}) {
	ctx, cancel := context.WithTimeout(ctx, max(c.b.Info().CheckLimit, time.Minute))
	defer cancel()
	if c.also != nil {
		c.also(ctx)
	}
	c.set(c.b.Check(ctx))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checking = nil
	close(done)
}

// usable is Service.Usable for this backend.
func (c *checked) usable() error {
	ctx := context.Background()
	asked := c.clock()
	if firstError(c.newest(ctx)) == nil {
		return nil
	}
	c.recheck.Lock() // concurrent callers share one check
	defer c.recheck.Unlock()
	c.mu.Lock()
	found, fresh := c.findings, c.at.After(asked)
	c.mu.Unlock()
	if fresh && firstError(found) == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, firstFinding)
	defer cancel()
	found = c.b.Check(ctx)
	c.set(found)
	if f := firstError(found); f != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "backend %s cannot start sandboxes: %s: %s", c.b.Name(), f.Name, f.Detail).WithHint("%s", f.Remedy)
	}
	return nil
}
