package egress_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

func TestExplain(t *testing.T) {
	t.Parallel()
	n := agentlab.Network{Mode: agentlab.NetworkAllowlist, Deny: rulesOf("gist.github.com", "8.8.8.8"),
		Allow: []agentlab.NetworkRule{{Rule: "*.github.com", Source: "preset:github"}, {Rule: "8.8.8.0/24"}, {Rule: "db.example:5432"}}}
	p := compile(t, n)
	n.Layers = []agentlab.Network{{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "db.example", Source: "the repository"}}}}
	narrow := compile(t, n)
	for _, c := range []struct {
		p               *egress.Policy
		target, want    string // steps with their rules
		allow           bool
		source, source2 string
	}{
		{p, "api.github.com", "dns allow:*.github.com, connect allow:*.github.com, name allow:*.github.com", true, "preset:github", "preset:github"},
		{p, "api.github.com:22", "dns allow:*.github.com, connect allow:*.github.com", true, "preset:github", "preset:github"},
		{p, "api.github.com:443/udp", "dns allow:*.github.com, connect mode.allowlist", false, "preset:github", ""},
		{p, "gist.github.com:443", "dns deny:gist.github.com", false, "", ""},
		{p, "db.example:5432", "dns allow:db.example:5432, connect allow:db.example:5432", true, "", ""},
		{p, "db.example:53", "dns allow:db.example:5432, connect always.dns", false, "", ""},
		{p, "8.8.8.9:443", "connect allow:8.8.8.0/24", true, "", ""},
		{p, "8.8.8.8:443", "connect deny:8.8.8.8", false, "", ""},
		{p, "8.8.8.9/icmp", "connect mode.allowlist", false, "", ""},
		{p, "[::1]:80", "connect always.loopback", false, "", ""},
		{narrow, "api.github.com", "dns layer.mode.allowlist", false, "", ""},
		{narrow, "db.example:5432", "dns allow:db.example:5432, connect layer.mode.allowlist", false, "", ""},
	} {
		target, err := egress.ParseTarget(c.target)
		if err != nil {
			t.Fatal(err)
		}
		e := c.p.Explain(target)
		var steps []string
		for _, s := range e.Steps {
			steps = append(steps, s.What+" "+s.Rule)
			if s.Means == "" || s.Means == s.Rule {
				t.Errorf("rule %s is not explained", s.Rule)
			}
		}
		if got := strings.Join(steps, ", "); got != c.want || e.Allow != c.allow || e.Steps[0].Source != c.source || e.Steps[len(e.Steps)-1].Source != c.source2 && len(e.Steps) > 1 {
			t.Errorf("%s: allow %v, %s\n%+v", c.target, e.Allow, got, e.Steps)
		}
		if again, err := egress.ParseTarget(target.String()); err != nil || again != target {
			t.Errorf("%s is printed as %s, which reads as %v, %v", c.target, target, again, err)
		}
	}
	for bad, why := range map[string]string{
		"": "it is empty", "*": "many names", "*.github.com:443": "many names", "8.8.0.0/16:443": "range of addresses", "github.com:1-2": "range of ports",
		"https://github.com": `"https://" is not part of a target`, "localhost:80": `"localhost" is not a full host name`,
		"github.com:99999": `"99999" is not a port`, ":99999": `"99999" is not a port`, ":443": `"" is not a host name`, "github.com:": "the port after the colon is missing",
		"github.com/udp": "a protocol needs a port", "github.com/about": `"github.com/about" is not an IP address, a range or a name`,
	} {
		_, err := egress.ParseTarget(bad)
		if agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" || !strings.Contains(err.Error(), why) {
			t.Errorf("%q: %v, want %q", bad, err, why)
		}
	}
}

func TestAllowedDomains(t *testing.T) {
	t.Parallel()
	list := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("a.example", "*.b.example:443", "a.example:22", "c.example", "8.8.8.8"), Deny: rulesOf("c.example")}
	nat := agentlab.Network{Mode: agentlab.NetworkNAT}
	natNarrow, off := nat, nat
	natNarrow.Layers = []agentlab.Network{list}
	off.Layers = []agentlab.Network{{Mode: agentlab.NetworkOff}}
	for name, c := range map[string]struct {
		n    agentlab.Network
		want []string
	}{
		"nat": {nat, []string{"*"}}, "allowlist": {list, []string{"a.example", "*.b.example"}},
		"narrowed": {natNarrow, []string{"a.example", "*.b.example"}}, "narrowed to nothing": {off, []string{}}, "off": {agentlab.Network{Mode: agentlab.NetworkOff}, []string{}},
	} {
		if got := compile(t, c.n).AllowedDomains(); !slices.Equal(got, c.want) || got == nil {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// Behind an upstream proxy only TCP to IPv4 addresses is reached, and private
// destinations as without it.
func TestExplainThroughProxy(t *testing.T) {
	t.Parallel()
	p := compile(t, agentlab.Network{Mode: agentlab.NetworkNAT, Deny: rulesOf("8.8.4.4"), Private: private("gateway.corp:443", "10.1.2.3:4000")})
	for _, c := range []struct {
		target, want string // steps with their rules
		allow        bool
		note         string
	}{
		{"8.8.8.8:443", "connect mode.nat", true, ""},
		{"github.com:443", "dns mode.nat, connect mode.nat", true, "only IPv4 addresses"},
		{"github.com:443/udp", "dns mode.nat, connect proxy.unsupported", false, ""},
		{"8.8.8.8:443/udp", "connect proxy.unsupported", false, ""},
		{"8.8.8.8/icmp", "connect proxy.unsupported", false, ""},
		{"[2606:4700::1]:443", "connect proxy.unsupported", false, ""},
		{"8.8.4.4:443/udp", "connect deny:8.8.4.4", false, ""},
		{"10.0.0.1:443", "connect always.private", false, ""},
		{"gateway.corp:443", "dns private:gateway.corp:443, connect private:gateway.corp:443, name private:gateway.corp:443", true, ""},
		{"10.1.2.3:4000", "connect private:10.1.2.3:4000", true, ""},
	} {
		target, err := egress.ParseTarget(c.target)
		if err != nil {
			t.Fatal(err)
		}
		e := p.Explain(target).ThroughProxy()
		var steps []string
		for _, s := range e.Steps {
			steps = append(steps, s.What+" "+s.Rule)
			if s.Means == "" || s.Means == s.Rule {
				t.Errorf("rule %s is not explained", s.Rule)
			}
		}
		if got := strings.Join(steps, ", "); got != c.want || e.Allow != c.allow || e.Rule != e.Steps[len(e.Steps)-1].Rule || !strings.Contains(strings.Join(e.Notes, "\n"), c.note) {
			t.Errorf("%s: allow %v, %s, notes %q", c.target, e.Allow, got, e.Notes)
		}
	}
}
