package job

import (
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// A model on a private destination that the operator opened stays reachable
// when a repository narrows the network, by name and by address.
func TestNarrowKeepsPrivateModel(t *testing.T) {
	t.Parallel()
	opened := []agentlab.PrivateTarget{{Host: "10.1.2.3", Port: 4000, Reason: "models"}, {Host: "gateway.corp", Port: 443, Reason: "models"}}
	for _, host := range []string{"10.1.2.3:4000", "gateway.corp:443"} {
		j := agentlab.Job{Agent: "claude", ModelHosts: []string{host}}
		layer := allowModelAndForge(agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "github.com"}}}, j)
		target, err := egress.ParseTarget(host)
		if err != nil {
			t.Fatal(err)
		}
		for private, want := range map[*[]agentlab.PrivateTarget]bool{&opened: true, {}: false} {
			p, err := egress.New(agentlab.Network{Mode: agentlab.NetworkNAT, Private: *private, Layers: []agentlab.Network{layer}})
			if err != nil {
				t.Fatal(err)
			}
			if e := p.Explain(target); e.Allow != want {
				t.Errorf("%s with %d destinations open: %+v", host, len(*private), e)
			}
		}
	}
}
