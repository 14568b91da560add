package supervisor

import (
	"net"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

func TestGuestsUseTheUpstreamProxy(t *testing.T) {
	var n vnet.Config
	c := Start{UpstreamProxy: &gate.ProxyConfig{URL: "http://127.0.0.1:1", DNS: "https://1.1.1.1/dns-query"}}
	if err := c.route(&n); err != nil {
		t.Fatal(err)
	}
	if _, ok := n.Dialer.(*gate.ProxyDialer); !ok || n.Resolver == nil {
		t.Errorf("dialer %T, resolver %T", n.Dialer, n.Resolver)
	}
	c.UpstreamProxy.CredentialsFile = "/nonexistent"
	if err := c.route(&n); err == nil {
		t.Error("a guest starts although the credentials are missing")
	}
}

func TestCheckReportsUpstreamProxy(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	proxy := &gate.ProxyConfig{URL: "http://" + l.Addr().String()}
	if f := CheckProxy(t.Context(), proxy); len(f) != 1 || f[0].Level != backend.LevelOK {
		t.Errorf("%+v", f)
	}
	_ = l.Close()
	f := CheckProxy(t.Context(), proxy)
	if len(f) != 1 || f[0].Level != backend.LevelError || !strings.Contains(f[0].Detail, "does not answer") || f[0].Remedy == "" {
		t.Errorf("%+v", f)
	}
	if f := CheckProxy(t.Context(), nil); len(f) != 0 {
		t.Errorf("without a proxy: %+v", f)
	}
}
