package backend

import (
	"slices"

	"github.com/agentlab-vm/agentlab"
)

// Refuse returns the error of Driver.Validate for hardware settings, private
// destinations and addresses of spec that the driver's Info does not announce,
// and nil if there are none. The driver checks the network mode and its rules
// itself.
func (i Info) Refuse(spec Spec) error {
	if err := i.RefuseHardware(spec.Hardware); err != nil {
		return err
	}
	if len(spec.Network.Private) > 0 && !i.Capabilities.Private {
		return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot open single private destinations to a sandbox", i.Name).WithField("network.private")
	}
	return i.refuse(
		wish{spec.IPv4.IsValid(), i.Addresses != nil && i.Addresses.IPv4.Contains(spec.IPv4), "ipv4", spec.IPv4.String()},
		wish{spec.IPv6.IsValid(), i.Addresses != nil && i.Addresses.IPv6.IsValid() && i.Addresses.IPv6.Contains(spec.IPv6), "ipv6", spec.IPv6.String()},
	)
}

// RefuseHardware is the part of Refuse for hardware settings, for a driver
// that checks addresses itself.
func (i Info) RefuseHardware(h agentlab.Hardware) error {
	c := i.Capabilities
	return i.refuse(
		wish{h.CPUList != "", c.CPUList, "resources.cpulist", h.CPUList},
		wish{h.Balloon, c.Balloon, "resources.balloon", "true"},
		wish{h.Bridge != "", slices.Contains(c.Bridges, h.Bridge), "network.bridge", h.Bridge},
		wish{h.NICModel != "", slices.Contains(c.NICModels, h.NICModel), "network.model", h.NICModel},
		wish{h.FirewallGroup != "", c.FirewallGroup, "network.firewall_group", h.FirewallGroup},
	)
}

// wish is a field of a Spec that not every driver supports.
type wish struct {
	asked, honoured bool
	field, value    string
}

func (i Info) refuse(wishes ...wish) error {
	for _, w := range wishes {
		if w.asked && !w.honoured {
			return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot give a sandbox %q", i.Name, w.value).WithField(w.field)
		}
	}
	return nil
}
