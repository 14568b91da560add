package nft

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// hostState are the inputs of the rules other than the configuration: the
// bridge's ports, and the host's addresses and networks.
type hostState struct {
	ports       []string
	nets        []netip.Prefix
	addrs       []netip.Addr
	translators []netip.Prefix
}

// readHostState reads the surroundings. NAT64 prefixes stay unchanged if the name
// server does not answer. The caller holds mu.
func (m *Manager) readHostState(c Config) (s hostState, err error) {
	if s.ports, err = bridgePorts(c.Bridge); err != nil {
		return s, err
	}
	if s.nets, err = hostNets(c); err != nil {
		return s, err
	}
	s.addrs, err = hostAddrs()
	s.translators = c.Translators
	if known := m.nat64.Load(); known != nil {
		s.translators = *known
	}
	return s, err
}

// applyTo sets the surroundings in a configuration.
func (s hostState) applyTo(c *Config) {
	c.HostNets, c.HostAddrs, c.Translators = s.nets, s.addrs, s.translators
}

// unchanged reports whether the surroundings have not changed since.
func (s hostState) unchanged(m *Manager) bool {
	c := m.opts.Config
	return slices.Equal(s.ports, m.ports) && slices.Equal(s.nets, c.HostNets) && slices.Equal(s.addrs, c.HostAddrs) && slices.Equal(s.translators, c.Translators)
}

// learnTranslators asks for the network's NAT64 prefixes. It waits for the name
// server, so mu is not held. Before the first answer all global IPv6 addresses
// are denied, because each may belong to a NAT64.
func (m *Manager) learnTranslators(ctx context.Context) {
	if !m.opts.Config.Subnet6.IsValid() {
		return
	}
	list, err := m.translators.Prefixes(ctx)
	switch {
	case err == nil:
		m.nat64.Store(&list)
	case m.nat64.CompareAndSwap(nil, &[]netip.Prefix{globalIPv6}):
		m.log.Warn("sandboxes currently have no IPv6", "err", err, "hint", agentlab.HintOf(err))
	}
}

// watchTranslators reads the prefixes at intervals; reconcile applies changes.
func (m *Manager) watchTranslators(ctx context.Context) error {
	tick := time.NewTicker(translatorsEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			m.learnTranslators(ctx)
		}
	}
}

const translatorsEvery = 10 * time.Second

var globalIPv6 = netip.MustParsePrefix("2000::/3")
