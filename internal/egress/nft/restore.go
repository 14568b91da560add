package nft

import (
	"context"
	"errors"
)

// Restore puts exactly these sandboxes on the bridge in one transaction. A
// process calls it at its start if sandboxes are running. Flows that their
// policies allow continue. After an error the rules from before are in force,
// or no sandbox has a network.
func (m *Manager) Restore(ctx context.Context, list []Sandbox) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, s := range list {
		if err := s.Validate(m.opts.Config, list[:i]); err != nil {
			return err
		}
	}
	before, after := m.members, map[int]*member{}
	closeAll := func(members, but map[int]*member) {
		for vmid, x := range members {
			if y := but[vmid]; y == nil || y.gate != x.gate {
				x.gate.Close()
			}
		}
	}
	for _, s := range list {
		x, err := m.newMember(s, before[s.VMID])
		if err != nil {
			closeAll(after, before)
			return err
		}
		after[s.VMID] = x
	}
	m.members = after
	m.index()
	if err := m.apply(ctx); err != nil {
		m.members = before
		m.index()
		closeAll(after, before)
		return err
	}
	closeAll(before, after)
	for _, x := range after {
		x.gate.SetPolicy(x.Policy)
	}
	var errs []error
	for vmid, x := range before {
		if y := after[vmid]; y == nil || y.IPv4 != x.IPv4 || y.IPv6 != x.IPv6 {
			errs = append(errs, cutFlows(x.Sandbox), unpinNeighbours(m.opts.Config.Bridge, x.Sandbox))
		}
	}
	return errors.Join(append(errs, m.pin())...)
}
