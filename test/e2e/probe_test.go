package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// networkProfile installs a profile with a network policy.
func (l *lab) networkProfile(name string, n agentlab.Network) {
	l.Helper()
	texts := func(rules []agentlab.NetworkRule) []string {
		out := []string{}
		for _, r := range rules {
			out = append(out, r.Rule)
		}
		return out
	}
	network := map[string]any{"mode": n.Mode}
	for key, list := range map[string][]string{"allow": texts(n.Allow), "deny": texts(n.Deny), "ports": n.Ports} {
		if len(list) > 0 {
			network[key] = list
		}
	}
	var private []map[string]any
	for _, p := range n.Private {
		private = append(private, map[string]any{"host": p.Host, "port": p.Port, "reason": p.Reason})
	}
	if len(private) > 0 {
		network["private"] = private
	}
	text, err := yaml.Marshal(map[string]any{"name": name, "network": network})
	if err != nil {
		l.Fatal(err)
	}
	dir := filepath.Join(l.home, "config", "profiles")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		l.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".yaml"), text, 0o600); err != nil {
		l.Fatal(err)
	}
}

// probes is a probe.Exec in a sandbox: as root, through agent-runner.
func (l *lab) probes(sandbox string) probe.Exec {
	return l.probesBy("exec", "-i", "--user", "root", sandbox, "--", "agent-runner", "probe")
}

// probesBy is a probe.Exec by a command of agentlab.
func (l *lab) probesBy(args ...string) probe.Exec {
	return func(_ context.Context, probes []guestapi.Probe) ([]guestapi.ProbeResult, error) {
		in, err := json.Marshal(probes)
		if err != nil {
			return nil, err
		}
		r := l.runInput("", bytes.NewReader(in), args...)
		if r.code != 0 {
			return nil, fmt.Errorf("agent-runner probe: %v", r)
		}
		var out []guestapi.ProbeResult
		for line := range strings.Lines(r.stdout) {
			var res guestapi.ProbeResult
			if err := json.Unmarshal([]byte(line), &res); err != nil {
				return nil, err
			}
			out = append(out, res)
		}
		return out, nil
	}
}

// probeLab is one sandbox in the reference world of the probe table, whose
// policy changes from run to run.
type probeLab struct {
	*lab
	net *fakenet.Net

	mu      sync.Mutex
	records []agentlab.EgressRecord
}

const probed = "probed"

// newProbeLab creates the sandbox, with further options. It follows the records, because
// followers get them sooner.
func newProbeLab(t *testing.T, options ...string) *probeLab {
	t.Helper()
	l, n := newNetLab(t)
	return newProbeLabIn(t, l, n, options...)
}

// newProbeLabIn is newProbeLab in a lab whose daemon has not started.
func newProbeLabIn(t *testing.T, l *lab, n *fakenet.Net, options ...string) *probeLab {
	t.Helper()
	if err := n.ProbeWorld(); err != nil {
		t.Fatal(err)
	}
	p := &probeLab{lab: l, net: n}
	l.networkProfile(probed, agentlab.Network{Mode: agentlab.NetworkNAT})
	l.ok(append([]string{"sandbox", "new", "--name", probed, "--profile", probed, "--ttl", "2h"}, options...)...)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	t.Cleanup(func() { cancel(); <-ended })
	go func() {
		defer close(ended)
		for e, err := range l.client().FollowEgress(ctx, client.EgressQuery{Sandbox: probed}) {
			if err != nil {
				return
			}
			p.mu.Lock()
			p.records = append(p.records, agentlab.EgressRecord{
				Seq: e.Seq, Proto: e.Proto, Name: e.Name, Addr: e.Addr, Port: e.Port, Allow: e.Allow, Rule: e.Rule, Error: e.Error,
			})
			p.mu.Unlock()
		}
	}()
	return p
}

func probeEnv(v probetest.Variant) probe.Env {
	return probe.Env{
		Network: v.Network, Targets: v.Targets, Frames: true, ControllerPort: 8844,
		Guest4: netip.MustParseAddr("10.77.0.2"), Gateway4: netip.MustParseAddr("10.77.0.1"), Neighbour4: netip.MustParseAddr("10.77.0.3"),
		Guest6: netip.MustParseAddr("fd77::2"), Gateway6: netip.MustParseAddr("fd77::1"), Neighbour6: netip.MustParseAddr("fd77::3"),
	}
}

// table gives the sandbox a policy and tries rows of the table under it; none
// named means all.
func (p *probeLab) table(v probetest.Variant, patience int, ids ...string) probe.Report {
	p.Helper()
	return p.tableBy(p.probes(probed), v, patience, ids...)
}

// tableBy is table with another probe.Exec.
func (p *probeLab) tableBy(try probe.Exec, v probetest.Variant, patience int, ids ...string) probe.Report {
	p.Helper()
	p.networkProfile(probed, v.Network)
	p.ok("policy", "reload", probed)
	p.net.ForgetOutside()
	e := probeEnv(v)
	e.Outside, e.RecordsWithinSeconds = p.net.Outside, patience
	e.Records = func(context.Context) ([]agentlab.EgressRecord, error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		return slices.Clone(p.records), nil
	}
	rows := probe.Table(e)
	if len(ids) > 0 {
		rows = slices.DeleteFunc(rows, func(c probe.Check) bool { return !slices.Contains(ids, c.ID) })
	}
	rep, err := probe.RunChecks(context.Background(), try, e, rows)
	if err != nil {
		p.Fatal(err)
	}
	return rep
}

// The probe table, from inside a real VM: what the policy allows is reached,
// nothing else is, and on the outer side of the fake internet, where every
// address answers, nothing forbidden is seen. The VM goes on while its policy
// changes.
func TestProbeTable(t *testing.T) {
	t.Parallel()
	newProbeLab(t).reference()
}

// The same table in an instance of Lima.
func TestProbeTableLima(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	l.withLima()
	newProbeLabIn(t, l, n, "--image", "base").reference()
}

// reference tries the whole table.
func (p *probeLab) reference() {
	for _, v := range probetest.Reference() {
		if len(v.Network.Layers) > 0 {
			continue // a repository's: see TestUserspace of package probe
		}
		rep := p.table(v, 15)
		for _, o := range probetest.Failures(rep) {
			p.Errorf("%s: %s (%s): %s", v.Name, o.Check.ID, o.Check.Shows, o.Detail)
		}
		if rep.Skipped > 0 {
			p.Errorf("%s: %d rows were skipped", v.Name, rep.Skipped)
		}
		p.Logf("%s: %d rows passed", v.Name, rep.Passed)
	}
	p.ok("sandbox", "destroy", probed)
}

// 'agentlab verify' says of a profile whether its sandboxes are what it
// promises, and leaves nothing behind.
func TestVerify(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	if err := n.ProbeWorld(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"example.com", "github.com"} {
		n.Host(name) // an address where, as everywhere here, all answers
	}
	l.networkProfile("shut", agentlab.Network{Mode: agentlab.NetworkOff})
	for _, profile := range []string{"yolo-ephemeral", "yolo-restricted", "shut"} {
		r := l.run("", "--json", "verify", "--profile", profile)
		var rep api.VerifyReport
		if err := json.Unmarshal([]byte(r.stdout), &rep); err != nil {
			t.Fatalf("%s: %v\n%v", profile, err, r)
		}
		if r.code != 0 || !rep.OK || rep.Passed < 40 || !rep.Records {
			t.Errorf("%s: exit code %d, %d passed, %d failed", profile, r.code, rep.Passed, rep.Failed)
		}
		for _, c := range rep.Checks {
			if c.Status == "fail" {
				t.Errorf("%s: %s: %s: %s", profile, c.ID, c.Shows, c.Detail)
			}
		}
		t.Logf("%s: %d passed, %d skipped", profile, rep.Passed, rep.Skipped)
	}
	l.noSandboxes()

	// Without the site some rows cannot be tried. That is not a fault of
	// the policy, and it is reported.
	n.SetName("example.com") // without an address
	l.ok("sandbox", "new", "--name", "box")
	r := l.run("", "verify", "--sandbox", "box")
	if r.code != 0 || !strings.Contains(r.stdout, "not fully checked: 2 skipped") || !strings.Contains(r.stdout, " 0 failed") {
		t.Errorf("a site that is not there: %v", r)
	}
	if r := l.run("", "verify", "--sandbox", "box", "--site", "10.0.0.1"); r.code != 2 || !strings.Contains(r.stderr, "host name") {
		t.Errorf("an address as site: %v", r)
	}
	l.ok("sandbox", "destroy", "box")
}
