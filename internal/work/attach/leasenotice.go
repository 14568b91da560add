package attach

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"sync"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// NoticeLease prints a line to out when the lease of a sandbox ends soon,
// until stop is called. It prints nothing unless that is a terminal, and to callers that
// may not read events.
func NoticeLease(ctx context.Context, c *client.Client, sandbox string, out io.Writer) (stop func()) {
	if _, tty := work.TerminalOf(out); !tty {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		for e, err := range c.FollowEvents(ctx, client.EventQuery{Kind: agentlab.EventSandboxLease, Sandbox: sandbox, After: -1}) {
			if err != nil {
				return
			}
			if line := leaseNotice(e); line != "" {
				_, _ = fmt.Fprintf(out, "\r\n%s\r\n", line) // the terminal is in raw mode
			}
		}
	})
	return func() {
		cancel()
		done.Wait()
	}
}

// leaseNotice returns the line for an event of a lease, "" for events that are not
// a warning.
func leaseNotice(e api.Event) string {
	left, ok := e.Data["minutes_left"].(float64)
	if !ok {
		return ""
	}
	return fmt.Sprintf("[agentlab: the lease of this sandbox ends in %d minutes; to renew it, run in another terminal: agentlab sandbox lease renew %s --ttl 4h]",
		int(left), strconv.Itoa(e.SandboxVMID))
}
