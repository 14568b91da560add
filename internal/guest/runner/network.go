package runner

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
)

// narrowTimeout is how long the controller may take to apply the narrower
// policy before the job fails: its agent must not run without it.
const narrowTimeout = 2 * time.Minute

// narrowNetwork asks the controller to narrow the network policy of this
// sandbox.
func (r *Runner) narrowNetwork(ctx context.Context, p *projectfile.Network) error {
	if p == nil {
		return nil
	}
	n := guestapi.NetworkNarrow{Mode: p.Mode, Allow: p.Allow, Deny: p.Deny, Ports: p.Ports, Strict: p.Strict}
	if n.Mode == "" {
		n.Mode = agentlab.NetworkNAT
		if len(n.Allow) > 0 {
			n.Mode = agentlab.NetworkAllowlist
		}
	}
	err := r.api.retry(ctx, narrowTimeout, func() error {
		return r.api.call(ctx, callTimeout, http.MethodPost, guestapi.PathNetwork, n, nil)
	})
	if err != nil {
		return fmt.Errorf("%s: network: the sandbox's network policy was not narrowed, so the agent is not started: %w", projectFile, err)
	}
	r.logf("the network policy is narrowed by %s", projectFile)
	return nil
}
