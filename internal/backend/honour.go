package backend

import (
	"slices"

	"github.com/agentlab-vm/agentlab"
)

// Refuse returns the error of Driver.Validate for what spec asks of a driver
// that its Info does not announce; nil when there is nothing of that kind.
func (i Info) Refuse(spec Spec) error {
	c, h := i.Capabilities, spec.Hardware
	for _, r := range []struct {
		asked, honoured bool
		field, value    string
	}{
		{h.CPUList != "", c.CPUList, "resources.cpulist", h.CPUList},
		{h.Balloon, c.Balloon, "resources.balloon", "true"},
		{h.Bridge != "", slices.Contains(c.Bridges, h.Bridge), "network.bridge", h.Bridge},
		{h.NICModel != "", slices.Contains(c.NICModels, h.NICModel), "network.model", h.NICModel},
		{h.FirewallGroup != "", c.FirewallGroup, "network.firewall_group", h.FirewallGroup},
		{spec.IPv4.IsValid(), i.Addresses != nil && i.Addresses.IPv4.Contains(spec.IPv4), "ipv4", spec.IPv4.String()},
		{spec.IPv6.IsValid(), i.Addresses != nil && i.Addresses.IPv6.IsValid() && i.Addresses.IPv6.Contains(spec.IPv6), "ipv6", spec.IPv6.String()},
	} {
		if r.asked && !r.honoured {
			return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot give a sandbox %q", i.Name, r.value).WithField(r.field)
		}
	}
	return nil
}
