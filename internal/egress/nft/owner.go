package nft

import "net/netip"

// index notes whose each address is, for who asks while a transaction goes on:
// what one sandbox has us tell the kernel holds up no packet of another's. mu
// is held.
func (m *Manager) index() {
	at := map[netip.Addr]*member{}
	for _, x := range m.members {
		at[x.IPv4] = x
		if x.IPv6.IsValid() {
			at[x.IPv6] = x
		}
	}
	m.at.Store(&at)
}

// sandboxAt returns the one that an address on the bridge belongs to.
func (m *Manager) sandboxAt(a netip.Addr) *member {
	if at := m.at.Load(); at != nil {
		return (*at)[a.Unmap()]
	}
	return nil
}

// Owner tells which sandbox an address on the bridge belongs to. It does not
// wait for the kernel.
func (m *Manager) Owner(a netip.Addr) (vmid int, ok bool) {
	x := m.sandboxAt(a)
	if x == nil {
		return 0, false
	}
	return x.VMID, true
}
