package probe_test

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
)

func env(v probetest.Variant) probe.Env {
	return probe.Env{
		Network: v.Network, Targets: v.Targets, Frames: true, ControllerPort: 8844,
		Guest4: netip.MustParseAddr("10.77.0.2"), Gateway4: netip.MustParseAddr("10.77.0.1"),
		Guest6: netip.MustParseAddr("fd77::2"), Gateway6: netip.MustParseAddr("fd77::1"),
		Neighbour4: netip.MustParseAddr("10.77.0.3"), Neighbour6: netip.MustParseAddr("fd77::3"),
		Host: []netip.Addr{netip.MustParseAddr("192.168.7.7")},
	}
}

// Every row can be distinguished from the others, and its probes from each
// other.
func TestRows(t *testing.T) {
	for _, v := range probetest.Reference() {
		ids, probes := map[string]bool{}, map[string]bool{}
		blocked := map[probe.Trace]string{}
		for _, c := range probe.Table(env(v)) {
			if ids[c.ID] || c.Shows == "" || len(c.Probes) == 0 || len(c.Probes) != len(c.Traces) {
				t.Errorf("%s: row %q is not whole, or there twice", v.Name, c.ID)
			}
			ids[c.ID] = true
			for i, p := range c.Probes {
				if probes[p.ID] {
					t.Errorf("%s: probe %s is there twice", v.Name, p.ID)
				}
				probes[p.ID] = true
				other, taken := blocked[c.Traces[i]]
				if c.Want != probe.Reach && !c.Shared && taken && other != c.ID {
					t.Errorf("%s: %s and %s leave the same trace %s", v.Name, other, c.ID, c.Traces[i])
				}
				if !c.Shared {
					blocked[c.Traces[i]] = c.ID
				}
			}
		}
		for _, id := range []string{"controller", "lan-10", "metadata", "dns-foreign", "spoof-source", "fragments", "loopback-frame"} {
			if !ids[id] {
				t.Errorf("%s: no row %s", v.Name, id)
			}
		}
		t.Logf("%s: %d rows, %d probes", v.Name, len(ids), len(probes))
	}
}

// Frames are what they say: right lengths and checksums, so that a filter
// refuses them for what they ask and not for being broken.
func TestFrames(t *testing.T) {
	count := 0
	for _, c := range probe.Table(env(probetest.Reference()[0])) {
		for _, p := range c.Probes {
			if p.Kind != "raw" {
				continue
			}
			count++
			f := p.Frame
			switch typ := header.Ethernet(f).Type(); typ {
			case header.IPv4ProtocolNumber:
				ip := header.IPv4(f[header.EthernetMinimumSize:])
				if !ip.IsValid(len(ip)) || !ip.IsChecksumValid() || int(ip.TotalLength()) != len(ip) {
					t.Errorf("%s %s: broken IPv4 header", p.ID, p.Target)
					continue
				}
				if !ip.More() && ip.FragmentOffset() == 0 {
					transport(t, p, ip.TransportProtocol() == header.UDPProtocolNumber, ip.TransportProtocol() == header.TCPProtocolNumber, ip.Payload(), ip)
				}
			case header.IPv6ProtocolNumber:
				ip := header.IPv6(f[header.EthernetMinimumSize:])
				if !ip.IsValid(len(ip)) || int(ip.PayloadLength()) != len(ip.Payload()) {
					t.Errorf("%s %s: broken IPv6 header", p.ID, p.Target)
					continue
				}
				transport(t, p, ip.NextHeader() == uint8(header.UDPProtocolNumber), ip.NextHeader() == uint8(header.TCPProtocolNumber), ip.Payload(), ip)
				if ip.NextHeader() == uint8(header.ICMPv6ProtocolNumber) {
					b := header.ICMPv6(slices.Clone(ip.Payload()))
					want := b.Checksum()
					b.SetChecksum(0)
					if got := header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: b, Src: ip.SourceAddress(), Dst: ip.DestinationAddress()}); got != want {
						t.Errorf("%s: ICMPv6 checksum %04x, want %04x", p.ID, want, got)
					}
				}
			}
		}
	}
	if count < 30 {
		t.Errorf("only %d frames", count)
	}
}

func transport(t *testing.T, p guestapi.Probe, udp, tcp bool, b []byte, ip header.Network) {
	t.Helper()
	switch {
	case udp:
		u := header.UDP(b)
		if int(u.Length()) != len(b) || !u.IsChecksumValid(ip.SourceAddress(), ip.DestinationAddress(), checksum.Checksum(u.Payload(), 0)) {
			t.Errorf("%s %s: broken UDP", p.ID, p.Target)
		}
	case tcp:
		h := header.TCP(b)
		if h.Flags() != header.TCPFlagSyn || !h.IsChecksumValid(ip.SourceAddress(), ip.DestinationAddress(), 0, 0) {
			t.Errorf("%s %s: broken TCP", p.ID, p.Target)
		}
	}
}

// guest answers probes as a perfect sandbox would, but for what is given.
func guest(e probe.Env, change map[string]guestapi.ProbeResult) probe.Exec {
	wants := map[string]probe.Want{}
	for _, c := range probe.Table(e) {
		for _, p := range c.Probes {
			wants[p.ID] = c.Want
		}
	}
	return func(_ context.Context, probes []guestapi.Probe) ([]guestapi.ProbeResult, error) {
		var out []guestapi.ProbeResult
		for _, p := range probes {
			r := guestapi.ProbeResult{ID: p.ID, Reached: wants[p.ID] == probe.Reach}
			if !r.Reached && p.Kind != "raw" {
				r.Error = "refused"
			}
			if c, ok := change[p.ID]; ok {
				r = c
				r.ID = p.ID
			}
			out = append(out, r)
		}
		return out, nil
	}
}

func failures(r probe.Report) []string {
	var out []string
	for _, o := range probetest.Failures(r) {
		out = append(out, o.Check.ID)
	}
	return out
}

func TestRunJudgesAnswers(t *testing.T) {
	t.Parallel()
	e := env(probetest.Reference()[2])
	r, err := probe.Run(t.Context(), guest(e, nil), e)
	if err != nil || !r.OK() || r.Skipped != 0 {
		t.Fatalf("%v: failed %v", err, failures(r))
	}
	r, err = probe.Run(t.Context(), guest(e, map[string]guestapi.ProbeResult{
		"lan-10/2":    {Reached: true, Answer: "hello"},
		"lan-192":     {Connected: true, Error: "timeout"},
		"sni-twin":    {Connected: true, Error: "reset"}, // may be accepted first
		"site-tls":    {Error: "refused"},
		"rebind-flip": {Reached: true, Addrs: []string{"192.31.196.18", "10.1.2.3"}},
		"rebind-lan":  {Reached: true, Addrs: []string{"10.1.2.3"}},
		"quic":        {Error: guestapi.ProbeUnknown},
	}), e)
	want := []string{"lan-10", "lan-192", "quic", "rebind-flip", "rebind-lan", "site-tls"}
	if got := failures(r); err != nil || !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("%v: failed %v, want %v", err, got, want)
	}
}

func TestRunWantsRecords(t *testing.T) {
	t.Parallel()
	e := env(probetest.Reference()[0])
	var all []agentlab.EgressRecord
	for _, c := range probe.Table(e) {
		for i, tr := range c.Traces {
			rec := agentlab.EgressRecord{Seq: int64(len(all) + 1), Proto: tr.Proto, Addr: tr.Addr.String(), Port: int(tr.Port), Name: tr.Name, Rule: c.Rule, Allow: c.Want == probe.Reach}
			switch c.Probes[i].ID {
			case "tailnet/2":
				continue
			case "lan-172":
				rec.Rule = "mode.nat"
			case "metadata/2":
				rec.Rule, rec.Allow = "mode.nat", true
			}
			all = append(all, rec)
		}
	}
	reads := 0
	e.Records = func(context.Context) ([]agentlab.EgressRecord, error) {
		if reads++; reads == 1 {
			return nil, nil // before the run
		}
		return all, nil
	}
	e.RecordsWithinSeconds = 1
	r, err := probe.Run(t.Context(), guest(e, nil), e)
	if want := []string{"lan-172", "metadata", "tailnet"}; err != nil || !slices.Equal(slices.Sorted(slices.Values(failures(r))), want) {
		t.Fatalf("%v: failed %v, want %v", err, failures(r), want)
	}
	for _, o := range probetest.Failures(r) {
		t.Logf("%s: %s", o.Check.ID, o.Detail)
	}
}

func TestRunWatchesOutside(t *testing.T) {
	t.Parallel()
	e := env(probetest.Reference()[2])
	e.Outside = func() probe.Outside {
		return probe.Outside{
			Flows: []probe.Trace{
				{Proto: probe.TCP, Addr: netip.MustParseAddr("10.1.2.3"), Port: 80},
				{Proto: probe.TCP, Addr: e.Targets.SiteAddr, Port: 443},
				{Proto: probe.UDP, Addr: netip.MustParseAddr("10.1.2.5"), Port: 4201},
			},
			Names: []string{e.Targets.Site, e.Targets.Twin, strings.ToUpper(e.Targets.Apex)},
		}
	}
	r, err := probe.Run(t.Context(), guest(e, nil), e)
	want := []string{"fragments", "host-twin", "lan-10", "sni-twin", "wildcard-apex"}
	if got := failures(r); err != nil || !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("%v: failed %v, want %v", err, got, want)
	}
}

func TestRunTrustsNoGuest(t *testing.T) {
	t.Parallel()
	e := env(probetest.Reference()[0])
	honest := guest(e, nil)
	for name, lie := range map[string]func([]guestapi.ProbeResult) []guestapi.ProbeResult{
		"a result left out": func(r []guestapi.ProbeResult) []guestapi.ProbeResult { return r[1:] },
		"a result twice":    func(r []guestapi.ProbeResult) []guestapi.ProbeResult { return append(r, r[0]) },
		"one not asked for": func(r []guestapi.ProbeResult) []guestapi.ProbeResult {
			return append(r, guestapi.ProbeResult{ID: "x"})
		},
	} {
		_, err := probe.Run(t.Context(), func(ctx context.Context, p []guestapi.Probe) ([]guestapi.ProbeResult, error) {
			r, err := honest(ctx, p)
			return lie(r), err
		}, e)
		if agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	broken := errors.New("broken")
	if _, err := probe.Run(t.Context(), func(context.Context, []guestapi.Probe) ([]guestapi.ProbeResult, error) { return nil, broken }, e); !errors.Is(err, broken) {
		t.Errorf("exec failed: %v", err)
	}
}

// An address that the operator opened is in no row that wants it closed: the
// table is tried on live sandboxes too.
func TestTableLeavesOutWhatIsOpened(t *testing.T) {
	t.Parallel()
	e := env(probetest.Reference()[0])
	e.Network.Private = []agentlab.PrivateTarget{{Host: "192.168.1.1", Port: 80, Reason: "a router"}}
	found := 0
	for _, c := range probe.Table(e) {
		for i, tr := range c.Traces {
			if tr.Addr.String() == "192.168.1.1" && tr.Port == 80 && tr.Proto == probe.TCP {
				t.Errorf("%s still tries %s", c.ID, tr)
			}
			if tr.Addr.String() == "192.168.0.1" {
				found++
			}
			if want := c.ID; i == 0 && c.Probes[0].ID != want {
				t.Errorf("the first probe of %s is %s", c.ID, c.Probes[0].ID)
			}
		}
	}
	if found == 0 {
		t.Error("the rest of the row is gone too")
	}
}
