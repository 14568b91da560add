package runner

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// projectNetwork is the network policy in a repository's project file: rules
// in the syntax of profiles, without presets and list files. The controller
// adds them as a layer to the profile's policy, so that they narrow it and
// cannot widen it.
type projectNetwork struct {
	Mode  string   `yaml:"mode"` // default: allowlist with an allow list, else nat
	Allow []string `yaml:"allow"`
	Deny  []string `yaml:"deny"`
	Ports []string `yaml:"ports"`

	Strict bool `yaml:"strict"` // do not add the job's own needs: the agent's model and the repository's host
}

// narrowTimeout is how long the controller may take to apply the narrower
// policy before the job fails: its agent must not run without it.
const narrowTimeout = 2 * time.Minute

// narrowNetwork asks the controller to narrow the network policy of this
// sandbox.
func (r *Runner) narrowNetwork(ctx context.Context, p *projectNetwork) error {
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
