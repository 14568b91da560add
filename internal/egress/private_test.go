package egress_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

func private(list ...string) []agentlab.PrivateTarget {
	var out []agentlab.PrivateTarget
	for _, s := range list {
		i := strings.LastIndexByte(s, ':')
		port, _ := netip.ParseAddrPort("127.0.0.1" + s[i:])
		out = append(out, agentlab.PrivateTarget{Host: s[:i], Port: int(port.Port()), Reason: "a test"})
	}
	return out
}

func TestParsePrivate(t *testing.T) {
	t.Parallel()
	for _, good := range []struct{ host, rule string }{
		{"gateway.corp", "private:gateway.corp:443"}, {"Gateway.Corp.", "private:gateway.corp:443"}, {"10.1.2.3", "private:10.1.2.3:443"},
		{"172.16.0.9", "private:172.16.0.9:443"}, {"192.168.1.1", "private:192.168.1.1:443"}, {"100.101.102.103", "private:100.101.102.103:443"},
		{"fd12::1", "private:[fd12::1]:443"}, {"::ffff:10.1.2.3", "private:10.1.2.3:443"}, {"host.agentlab.internal", "private:host.agentlab.internal:443"},
		{"models.example.com", "private:models.example.com:443"},
	} {
		p, err := egress.ParsePrivate(agentlab.PrivateTarget{Host: good.host, Port: 443, Reason: "r"})
		if err != nil || p.Rule != good.rule || p.Host != (good.host == egress.HostName) {
			t.Errorf("%s: %+v, %v", good.host, p, err)
		}
	}
	for _, bad := range []string{
		"", "gateway", "*.corp", "10.0.0.0/8", "10.0.0.1-10.0.0.9", "localhost", "a.localhost", "127.0.0.1", "::1", "0.0.0.0", "169.254.169.254", "169.254.1.1",
		"100.100.100.200", "fd00:ec2::254", "168.63.129.16", "8.8.8.8", "2606:4700::1", "fe80::1%eth0", "fe80::1", "64:ff9b::10.1.2.3", "fd12::5efe:10.1.2.3",
		"224.0.0.1", "other.agentlab.internal", "agentlab.internal", "http://gateway.corp", "gateway.corp:443", "[fd12::1]", "192.31.196.1", "198.18.0.1",
	} {
		_, err := egress.ParsePrivate(agentlab.PrivateTarget{Host: bad, Port: 443, Reason: "r"})
		if e, ok := err.(*agentlab.Error); !ok || e.Code != agentlab.CodeInvalid || e.Field != "host" || e.Hint == "" {
			t.Errorf("%q: %v", bad, err)
		}
	}
	for _, bad := range []agentlab.PrivateTarget{
		{Host: "gateway.corp", Port: 443}, {Host: "gateway.corp", Port: 443, Reason: " "}, {Host: "gateway.corp", Port: 443, Reason: "a\nb"},
		{Host: "gateway.corp", Reason: "r"}, {Host: "gateway.corp", Port: 65536, Reason: "r"}, {Host: "gateway.corp", Port: -1, Reason: "r"}, {Host: "gateway.corp", Port: 53, Reason: "r"},
		{Host: "gateway.corp", Port: 443, Reason: strings.Repeat("x", 201)},
	} {
		if _, err := egress.ParsePrivate(bad); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	for _, n := range []agentlab.Network{
		{Mode: agentlab.NetworkOff, Private: private("gateway.corp:443")},
		{Mode: agentlab.NetworkNAT, Private: private("gateway.corp:443", "GATEWAY.corp:443")},
	} {
		if _, err := egress.New(n); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%+v: %v", n, err)
		}
	}
}

// What the operator opened is reached, exactly that, and nothing that the name
// of an entry may come to stand for.
func TestPrivateDecisions(t *testing.T) {
	t.Parallel()
	p := compile(t, agentlab.Network{Mode: agentlab.NetworkAllowlist, Deny: rulesOf("denied.corp"),
		Private: private("gateway.corp:443", "gateway.corp:4001", "10.1.2.3:4000", "denied.corp:80", "host.agentlab.internal:11434")})
	const gw = "gateway.corp."
	for _, c := range []struct {
		f        egress.Flow
		rule     string
		allow    bool
		needName bool
	}{
		{flow(egress.DNS, "", gw), "private:gateway.corp:443", true, false},
		{flow(egress.DNS, "", "wiki.gateway.corp."), egress.RulePrivate, false, false},
		{flow(egress.DNS, "", "denied.corp."), "deny:denied.corp", false, false},
		{flow(egress.TCP, "10.0.0.9:443", gw), "private:gateway.corp:443", true, true},
		{flow(egress.TCP, "10.0.0.9:4001", gw), "private:gateway.corp:4001", true, false},
		{flow(egress.TCP, "[fd12::9]:4001", gw), "private:gateway.corp:4001", true, false},
		{flow(egress.TCP, "100.64.0.9:4001", gw), "private:gateway.corp:4001", true, false},
		{flow(egress.TCP, "10.0.0.9:4002", gw), egress.RulePrivate, false, false},
		{flow(egress.UDP, "10.0.0.9:4001", gw), egress.RulePrivate, false, false},
		{flow(egress.TCP, "10.0.0.9:4001"), egress.RulePrivate, false, false},
		{flow(egress.TCP, "169.254.169.254:4001", gw), egress.RuleMetadata, false, false},
		{flow(egress.TCP, "100.100.100.200:4001", gw), egress.RuleMetadata, false, false},
		{flow(egress.TCP, "127.0.0.1:4001", gw), egress.RuleLoopback, false, false},
		{flow(egress.TCP, "[64:ff9b::10.0.0.9]:4001", gw), egress.RulePrivate, false, false},
		{flow(egress.TCP, "8.8.8.8:4001", gw), egress.RuleAllowlist, false, false},
		{flow(egress.TCP, "10.1.2.3:4000"), "private:10.1.2.3:4000", true, false},
		{flow(egress.TCP, "[::ffff:10.1.2.3]:4000"), "private:10.1.2.3:4000", true, false},
		{flow(egress.TCP, "10.1.2.4:4000"), egress.RulePrivate, false, false},
		{flow(egress.TCP, "10.0.0.9:80", "denied.corp."), "deny:denied.corp", false, false},
		{flow(egress.TCP, "10.77.0.1:11434"), egress.RulePrivate, false, false},
	} {
		if v := p.Decide(c.f); v.Allow != c.allow || v.Rule != c.rule || v.NeedName != c.needName {
			t.Errorf("%+v: %+v", c.f, v)
		}
	}
	host := flow(egress.TCP, "10.77.0.1:11434")
	host.Host = true
	if v := p.Decide(host); !v.Allow || v.Rule != "private:host.agentlab.internal:11434" {
		t.Errorf("the host: %+v", v)
	}
	host.Dst = netip.MustParseAddrPort("10.77.0.1:22")
	if v := p.Decide(host); v.Allow || v.Rule != egress.RuleGateway {
		t.Errorf("another port of the host: %+v", v)
	}
	tls := flow(egress.TCP, "10.0.0.9:443", gw)
	for shown, rule := range map[string]string{"gateway.corp": "private:gateway.corp:443", "wiki.corp": egress.RuleNameMismatch, "": egress.RuleNameMissing} {
		if v := p.DecideName(tls, shown); v.Allow != (shown == "gateway.corp") || v.Rule != rule {
			t.Errorf("showing %q: %+v", shown, v)
		}
	}
}

// A repository's layer narrows private destinations as it narrows others, and
// adds none.
func TestPrivateAndLayers(t *testing.T) {
	t.Parallel()
	const gw = "gateway.corp."
	tcp, dns := flow(egress.TCP, "10.0.0.9:4001", gw), flow(egress.DNS, "", gw)
	for _, c := range []struct {
		layer agentlab.Network
		rule  string
	}{
		{agentlab.Network{Mode: agentlab.NetworkNAT}, "private:gateway.corp:4001"},
		{agentlab.Network{Mode: agentlab.NetworkNAT, Ports: []string{"443"}}, "layer.ports"},
		{agentlab.Network{Mode: agentlab.NetworkNAT, Deny: rulesOf("gateway.corp")}, "layer.deny:gateway.corp"},
		{agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("github.com")}, "layer.mode.allowlist"},
		{agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf("gateway.corp:4001")}, "private:gateway.corp:4001"},
		{agentlab.Network{Mode: agentlab.NetworkAllowlist, Private: private("gateway.corp:4001")}, "private:gateway.corp:4001"},
		{agentlab.Network{Mode: agentlab.NetworkOff}, "layer.mode.off"},
	} {
		p := compile(t, agentlab.Network{Mode: agentlab.NetworkNAT, Private: private("gateway.corp:4001"), Layers: []agentlab.Network{c.layer}})
		if v := p.Decide(tcp); v.Rule != c.rule || v.Allow != strings.HasPrefix(c.rule, "private:") {
			t.Errorf("%+v: %+v, want %s", c.layer, v, c.rule)
		}
		if v := p.Decide(dns); v.Allow != strings.HasPrefix(c.rule, "private:") && c.rule != "layer.ports" {
			t.Errorf("%+v: its name: %+v", c.layer, v)
		}
	}
	p := compile(t, agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{{Mode: agentlab.NetworkNAT, Private: private("gateway.corp:4001")}}})
	if v := p.Decide(tcp); v.Allow {
		t.Errorf("a layer opens a private destination: %+v", v)
	}
}

func TestExplainPrivate(t *testing.T) {
	t.Parallel()
	p := compile(t, agentlab.Network{Mode: agentlab.NetworkNAT, Private: private("gateway.corp:443", "10.1.2.3:4000", "host.agentlab.internal:11434")})
	for target, allow := range map[string]bool{
		"gateway.corp:443": true, "gateway.corp:444": false, "10.1.2.3:4000": true, "10.1.2.3:4001": false,
		"host.agentlab.internal:11434": true, "host.agentlab.internal:22": false, "wiki.corp:443": false,
	} {
		tgt, err := egress.ParseTarget(target)
		if err != nil {
			t.Fatal(err)
		}
		e := p.Explain(tgt)
		if e.Allow != allow {
			t.Errorf("%s: %+v", target, e)
		}
		if last := e.Steps[len(e.Steps)-1]; allow && (e.Rule != "private:"+target || !strings.Contains(last.Means, "a test")) {
			t.Errorf("%s: %+v", target, last)
		}
	}
}
