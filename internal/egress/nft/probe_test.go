//go:build linux

package nft

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
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

// controller is a guest listener on the host, and services that no sandbox
// may find.
func (w *world) controller() {
	w.t.Helper()
	for _, at := range []string{"0.0.0.0:8844", "[::]:22", "[::]:8006", "0.0.0.0:80", "127.0.0.1:11434"} {
		l, err := net.Listen("tcp", at)
		if err != nil {
			w.t.Fatal(err)
		}
		srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write([]byte("host")) })}
		go func() { _ = srv.Serve(l) }()
		w.t.Cleanup(func() { _ = srv.Close() })
	}
}

// records is what was told of, in order.
type records struct {
	mu   sync.Mutex
	list []agentlab.EgressRecord
}

func (r *records) add(vmid int, rec agentlab.EgressRecord) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec.Seq = int64(len(r.list)) + 1
	if vmid == testSandbox(2, nil).VMID {
		r.list = append(r.list, rec)
	}
}

func (r *records) all(context.Context) ([]agentlab.EgressRecord, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list), nil
}

func (w *world) env(s [2]Sandbox, v probetest.Variant, log *records) probe.Env {
	c := testConfig()
	return probe.Env{
		Network: v.Network, Targets: v.Targets, Frames: true, Cards: true,
		Guest4: s[0].IPv4, Guest6: s[0].IPv6, Gateway4: c.Gateway4, Gateway6: c.Gateway6,
		Neighbour4: s[1].IPv4, Neighbour6: s[1].IPv6,
		Host:    []netip.Addr{netip.MustParsePrefix(hostLAN4).Addr(), netip.MustParsePrefix(hostLAN6).Addr(), netip.MustParseAddr("100.64.0.1")},
		Outside: w.outside, Records: log.all, ControllerPort: 8844,
	}
}

func (p *peer) exec(_ context.Context, probes []guestapi.Probe) ([]guestapi.ProbeResult, error) {
	return p.probe(probes...), nil
}

// TestProbeTable runs the whole table in namespaces against the kernel.
func TestProbeTable(t *testing.T) {
	w := newWorld(t)
	w.controller()
	log := &records{}
	m := w.manager(Options{Audit: log.add})
	for _, v := range probetest.Reference() {
		t.Run(v.Name, func(t *testing.T) {
			if v.Network.Mode == agentlab.NetworkOff {
				v.Network.Deny = nil
			}
			s := w.tenants(m, v.Network)
			w.forget()
			rep, err := probe.Run(context.Background(), w.guests[0].exec, w.env(s, v, log))
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
