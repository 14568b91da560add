package nft

import "net/netip"

// index updates the map from addresses to sandboxes, which is read without mu,
// so that a transaction for one sandbox does not delay packets of another. The
// caller holds mu.
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

// sandboxAt returns the sandbox with an address on the bridge.
func (m *Manager) sandboxAt(a netip.Addr) *member {
	if at := m.at.Load(); at != nil {
		return (*at)[a.Unmap()]
	}
	return nil
}

// Owner returns the sandbox with an address on the bridge. It does not wait
// for the kernel.
func (m *Manager) Owner(a netip.Addr) (vmid int, ok bool) {
	x := m.sandboxAt(a)
	if x == nil {
		return 0, false
	}
	return x.VMID, true
}
