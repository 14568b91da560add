package nft

import (
	"context"
	"net/netip"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
)

// tenants lets both sandboxes in: the first with the policy, the second with
// the whole internet.
func (w *world) tenants(m *Manager, n agentlab.Network) [2]Sandbox {
	w.t.Helper()
	var out [2]Sandbox
	for i, n := range []agentlab.Network{n, {Mode: agentlab.NetworkNAT}} {
		out[i] = testSandbox(2+i, testPolicy(w.t, n))
		out[i].Port = taps[i]
		if err := m.Set(context.Background(), out[i]); err != nil {
			w.t.Fatal(err)
		}
	}
	return out
}

func (w *world) env(s [2]Sandbox, v probe.Variant) probe.Env {
	c := testConfig()
	return probe.Env{
		Network: v.Network, Targets: v.Targets, Frames: true,
		Guest4: s[0].IPv4, Guest6: s[0].IPv6, Gateway4: c.Gateway4, Gateway6: c.Gateway6,
		Neighbour4: s[1].IPv4, Neighbour6: s[1].IPv6,
		Host:    []netip.Addr{netip.MustParsePrefix(hostLAN4).Addr(), netip.MustParsePrefix(hostLAN6).Addr(), netip.MustParseAddr("100.64.0.1")},
		Outside: w.outside,
	}
}

func (p *peer) exec(_ context.Context, probes []guestapi.Probe) ([]guestapi.ProbeResult, error) {
	return p.probe(probes...), nil
}

// TestProbeTable runs the whole table in namespaces against the kernel.
func TestProbeTable(t *testing.T) {
	w := newWorld(t)
	m := w.manager(Options{})
	for _, v := range probe.Reference() {
		t.Run(v.Name, func(t *testing.T) {
			if v.Network.Mode == agentlab.NetworkOff {
				v.Network.Deny = nil
			}
			s := w.tenants(m, v.Network)
			w.forget()
			rep, err := probe.Run(context.Background(), w.guests[0].exec, w.env(s, v))
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range rep.Outcomes {
				t.Logf("%-5s %-20s %s", o.Status, o.Check.ID, o.Detail)
			}
			if !rep.OK() {
				t.Errorf("%d rows failed, %d passed, %d skipped", rep.Failed, rep.Passed, rep.Skipped)
			}
		})
	}
}
