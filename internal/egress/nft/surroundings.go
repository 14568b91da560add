package nft

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// surroundings are what the rules are rendered from beside the configuration:
// the bridge's ports, and what the host is and is on.
type surroundings struct {
	ports       []string
	nets        []netip.Prefix
	addrs       []netip.Addr
	translators []netip.Prefix
}

// look reads the surroundings. NAT64 prefixes that the name server does not
// tell now stay as they were; mu is held.
func (m *Manager) look(c Config) (s surroundings, err error) {
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

// put makes a configuration one of the surroundings.
func (s surroundings) put(c *Config) {
	c.HostNets, c.HostAddrs, c.Translators = s.nets, s.addrs, s.translators
}

// same tells whether nothing has changed since.
func (s surroundings) same(m *Manager) bool {
	c := m.opts.Config
	return slices.Equal(s.ports, m.ports) && slices.Equal(s.nets, c.HostNets) && slices.Equal(s.addrs, c.HostAddrs) && slices.Equal(s.translators, c.Translators)
}

// learnTranslators asks for the network's NAT64 prefixes. It waits for the name
// server, so mu is not held. Before the first answer all global IPv6 is closed:
// any of it may be a NAT64's.
func (m *Manager) learnTranslators(ctx context.Context) {
	if !m.opts.Config.Subnet6.IsValid() {
		return
	}
	list, err := m.translators.Prefixes(ctx)
	switch {
	case err == nil:
		m.nat64.Store(&list)
	case m.nat64.CompareAndSwap(nil, &[]netip.Prefix{globalIPv6}):
		m.log.Warn("sandboxes have no IPv6 for now", "err", err, "hint", agentlab.HintOf(err))
	}
}

// watchTranslators learns the prefixes again and again; reconcile puts what
// changes into force.
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
