package fake

import (
	"encoding/json"
	"fmt"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// probe simulates 'agent-runner probe' in a guest without a network: only the
// controller answers. Its attempts have no egress records.
func (p *process) probe(args []string) int {
	if len(args) != 1 || args[0] != "probe" {
		return 2
	}
	var probes []guestapi.Probe
	if err := json.NewDecoder(p.stdin).Decode(&probes); err != nil {
		fmt.Fprintln(p.errOut, err)
		return 1
	}
	out := json.NewEncoder(p.out)
	for _, probe := range probes {
		r := guestapi.ProbeResult{ID: probe.ID, Reached: probe.ID == "controller"}
		if !r.Reached && probe.Kind != "raw" {
			r.Error = "unreachable"
		}
		if err := out.Encode(r); err != nil {
			return 1
		}
	}
	return 0
}
