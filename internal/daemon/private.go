package daemon

import (
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/profile"
)

// privateTargets are the private destinations that the configuration opens to
// every sandbox.
func privateTargets(c config.Config) ([]agentlab.PrivateTarget, error) {
	var out []agentlab.PrivateTarget
	for _, p := range c.Network.Private {
		t := agentlab.PrivateTarget{Host: p.Host, Port: p.Port, Reason: p.Reason, Source: profile.SourceConfig}
		one, err := egress.ParsePrivate(t)
		if err != nil {
			return nil, err
		}
		if one.Host && slices.Contains(c.APIPorts(), t.Port) {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "port %d of the host is AgentLab's own API, which no sandbox may reach", t.Port).WithField("network.private")
		}
		out = append(out, t)
	}
	return out, nil
}

// reservedPorts are the ports of this host that no policy opens.
func reservedPorts(c config.Config) []uint16 {
	var out []uint16
	for _, p := range c.APIPorts() {
		out = append(out, uint16(p)) //nolint:gosec // of an address that was checked
	}
	return out
}
