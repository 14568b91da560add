package verify_test

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/verify"
)

// denials are the records of a backend that refuses what it must.
func denials(t *testing.T, n agentlab.Network) []agentlab.EgressRecord {
	t.Helper()
	targets, err := verify.Targets(n, "")
	if err != nil {
		t.Fatal(err)
	}
	env := probe.Env{
		Network: n, Targets: targets, Frames: true, ControllerPort: 8844,
		Guest4: netip.MustParseAddr("10.77.0.2"), Gateway4: netip.MustParseAddr("10.77.0.1"), Neighbour4: netip.MustParseAddr("10.77.0.3"),
		Guest6: netip.MustParseAddr("fd77::2"), Gateway6: netip.MustParseAddr("fd77::1"), Neighbour6: netip.MustParseAddr("fd77::3"),
	}
	var out []agentlab.EgressRecord
	for _, c := range probe.Table(env) {
		for _, tr := range c.Traces {
			if c.Want == probe.Reach || c.Rule == "" || tr.Proto != probe.DNS && !tr.Addr.IsValid() {
				continue
			}
			r := agentlab.EgressRecord{Proto: tr.Proto, Name: tr.Name, Port: int(tr.Port), Rule: c.Rule}
			if tr.Addr.IsValid() {
				r.Addr = tr.Addr.Unmap().String()
			}
			out = append(out, r)
		}
	}
	return out
}

// A host without internet is no broken policy, and no way to hide one.
func TestWithoutInternet(t *testing.T) {
	t.Parallel()
	nat := agentlab.Network{Mode: agentlab.NetworkNAT}
	allowlist := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "example.com"}}}
	dns := func(allow bool, rule, addr, failure string) agentlab.EgressRecord {
		return agentlab.EgressRecord{Proto: "dns", Name: "example.com", Allow: allow, Rule: rule, Addr: addr, Error: failure}
	}
	asked := dns(true, "mode.nat", "", "")
	dial := agentlab.EgressRecord{Proto: "tcp", Name: "example.com", Addr: "93.184.216.34", Port: 443, Allow: true, Rule: "mode.nat", Error: "no route to host"}
	dial80 := dial
	dial80.Port = 80
	resolved := dns(true, "mode.nat", "93.184.216.34", "")
	site := guestapi.ProbeResult{Addrs: []string{"93.184.216.34"}, Connected: true, Error: "reset"}
	for name, tt := range map[string]struct {
		n       agentlab.Network
		result  guestapi.ProbeResult // of all that is tried by the site's name
		records []agentlab.EgressRecord
		leak    string // the row that answers though it must not
		reason  string // of the skip; "" when it must fail
	}{
		"NXDOMAIN":                  {n: nat, result: failed("NXDOMAIN"), records: []agentlab.EgressRecord{asked}, reason: "example.com does not resolve here: NXDOMAIN"},
		"allowlist":                 {n: allowlist, result: failed("SERVFAIL"), records: []agentlab.EgressRecord{asked}, reason: "example.com does not resolve here: SERVFAIL"},
		"upstream silent":           {n: nat, result: failed("timeout"), records: []agentlab.EgressRecord{dns(true, "mode.nat", "", "no name server answers")}, reason: "example.com does not resolve here: no name server answers"},
		"unreachable":               {n: nat, result: site, records: []agentlab.EgressRecord{resolved, dial, dial80}, reason: "example.com cannot be reached from here: no route to host"},
		"not asked":                 {n: nat, result: failed("NXDOMAIN")},
		"our server silent":         {n: nat, result: failed("timeout"), records: []agentlab.EgressRecord{asked}},
		"the question refused":      {n: nat, result: failed("NXDOMAIN"), records: []agentlab.EgressRecord{dns(false, "mode.allowlist", "", "")}},
		"refused once":              {n: nat, result: failed("NXDOMAIN"), records: []agentlab.EgressRecord{asked, dns(false, "mode.allowlist", "", "")}},
		"its addresses withheld":    {n: nat, result: failed("no address"), records: []agentlab.EgressRecord{asked, dns(false, "always.rebinding", "10.0.0.1", "")}},
		"it does resolve":           {n: nat, result: failed("NXDOMAIN"), records: []agentlab.EgressRecord{resolved}},
		"the flow refused":          {n: nat, result: site, records: []agentlab.EgressRecord{resolved, {Proto: "tcp", Addr: "93.184.216.34", Port: 443, Rule: "ports"}}},
		"the flow opened":           {n: nat, result: site, records: []agentlab.EgressRecord{resolved, {Proto: "tcp", Addr: "93.184.216.34", Port: 443, Allow: true, Rule: "mode.nat"}}},
		"a forbidden address":       {n: nat, result: guestapi.ProbeResult{Addrs: []string{"10.0.0.1"}, Error: "name: NXDOMAIN"}, records: []agentlab.EgressRecord{asked}},
		"a leak to the LAN":         {n: nat, result: failed("NXDOMAIN"), records: []agentlab.EgressRecord{asked}, leak: "lan-10"},
		"a leak in the site's rows": {n: allowlist, result: failed("SERVFAIL"), records: []agentlab.EgressRecord{asked}, leak: "sni-twin"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all := append(denials(t, tt.n), tt.records...)
			for i := range all {
				all[i].Seq = int64(i + 1)
			}
			synctest.Test(t, func(t *testing.T) { // it waits for records that never come
				guest := func(probes []guestapi.Probe, out *stream.Writer) {
					for _, p := range probes {
						r := guestapi.ProbeResult{Reached: p.ID == "controller" || p.ID == tt.leak}
						if strings.HasPrefix(p.Target, "example.com:") && !r.Reached {
							r = tt.result
						}
						r.ID = p.ID
						line, _ := json.Marshal(r)
						_ = out.Frame(stream.Stdout, append(line, '\n'))
					}
					_ = out.JSON(stream.Exit, stream.ExitStatus{})
				}
				calls := 0
				svc, _ := newService(tt.n, guest, func() []agentlab.EgressRecord {
					if calls++; calls == 1 {
						return nil
					}
					return all
				})
				_, rep, err := svc.Run(t.Context(), "box", "")
				if err != nil {
					t.Fatal(err)
				}
				if tt.reason == "" {
					if rep.OK() {
						t.Errorf("it passes, %d skipped: %+v", rep.Skipped, rep.SkipReasons())
					}
					return
				}
				why := rep.SkipReasons()
				if !rep.OK() || len(why) != 1 || why[0].Reason != tt.reason || why[0].Count != rep.Skipped || rep.Skipped < 1 {
					t.Errorf("failed: %+v, skipped: %+v", probetest.Failures(rep), why)
				}
			})
		})
	}
}

func failed(why string) guestapi.ProbeResult { return guestapi.ProbeResult{Error: "name: " + why} }
