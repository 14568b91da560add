package backend

import (
	"net/netip"

	"github.com/agentlab-vm/agentlab"
)

// minMemoryMB is the memory that kernel, initrd and a small userland need to boot.
const minMemoryMB = 256

// CheckVM returns the error of Driver.Validate for a spec of which no driver can make
// a VM that boots; nil if there is none.
func (s Spec) CheckVM() error {
	if err := agentlab.ValidateName(s.Name); err != nil {
		return err
	}
	if s.Image == "" {
		return agentlab.Errorf(agentlab.CodeInvalid, "missing").WithField("image")
	}
	if err := s.Resources.Validate(); err != nil {
		return err
	}
	if s.Resources.MemoryMB < minMemoryMB {
		return agentlab.Errorf(agentlab.CodeUnsupported, "a guest needs at least %d MiB to boot", minMemoryMB).WithField("resources.memory_mb")
	}
	return nil
}

// CheckMode returns the error of a driver that enforces all modes of the network for
// any other mode.
func CheckMode(driver string, n agentlab.Network) error {
	switch n.Mode {
	case agentlab.NetworkNAT, agentlab.NetworkAllowlist, agentlab.NetworkOff:
		return nil
	}
	return agentlab.Errorf(agentlab.CodeUnsupported, "the %s backend has no mode %q", driver, n.Mode).WithField("network.mode")
}

// CheckSpec returns the error of Driver.Validate for hardware settings, private
// destinations and addresses of spec that the driver's Info does not announce, and for
// an unknown value of Resources.Nested; nil if there are none. The driver checks the network mode and its rules
// itself.
func (i Info) CheckSpec(spec Spec) error {
	if err := i.CheckOptions(spec.Options); err != nil {
		return err
	}
	if n := spec.Resources.Nested; !n.Valid() {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not off, auto or on", string(n)).WithField("resources.nested")
	}
	if len(spec.Network.Private) > 0 && !i.Capabilities.Private {
		return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot open single private destinations to a sandbox", i.Name).WithField("network.private")
	}
	var pool AddressPool
	if i.Addresses != nil {
		pool = *i.Addresses
	}
	for _, a := range []struct {
		field string
		addr  netip.Addr
		in    netip.Prefix
	}{{"ipv4", spec.IPv4, pool.IPv4}, {"ipv6", spec.IPv6, pool.IPv6}} {
		if a.addr.IsValid() && !a.in.Contains(a.addr) {
			return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s does not support the sandbox address %s", i.Name, a.addr).WithField(a.field)
		}
	}
	return nil
}
