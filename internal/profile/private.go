package profile

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// SourceConfig is the source of a private destination of config.yaml.
const SourceConfig = "config.yaml"

// allowPrivate adds the configuration's private destinations to a profile's own, and
// rejects reserved ports of the host.
func (d *Doc) allowPrivate(list []agentlab.PrivateTarget, reserved []uint16) error {
	for i, t := range d.net.Private {
		if t.Host == egress.HostName && slices.ContainsFunc(reserved, func(p uint16) bool { return int(p) == t.Port }) {
			return invalid(fmt.Sprintf("network.private[%d].port", i), "port %d of the host is reserved for AgentLab's API", t.Port).WithHint("remove %s", t.Host+":"+strconv.Itoa(t.Port))
		}
	}
	if d.net.Mode == agentlab.NetworkOff {
		return nil
	}
	for _, t := range list {
		same := func(o agentlab.PrivateTarget) bool { return o.Host == t.Host && o.Port == t.Port }
		if !slices.ContainsFunc(d.net.Private, same) {
			d.net.Private = append(d.net.Private, t)
		}
	}
	_, err := egress.New(d.net)
	return err
}
