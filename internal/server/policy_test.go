package server

import (
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/profile"
)

// What the upstream proxy cannot carry is denied in checks of a policy, too.
func TestPolicyKnowsTheUpstreamProxy(t *testing.T) {
	lib := profile.NewLibrary(t.TempDir(), backend.Info{})
	for _, c := range []struct {
		proxied      bool
		target, rule string
	}{
		{false, "8.8.8.8:443/udp", "mode.nat"}, {true, "8.8.8.8:443/udp", "proxy.unsupported"}, {true, "8.8.8.8:443", "mode.nat"},
	} {
		h := start(t, func(cfg *Config) { cfg.Services.Profiles, cfg.Proxied = lib, c.proxied })
		got, err := h.client.CheckProfilePolicy(t.Context(), "yolo-ephemeral", c.target)
		if err != nil || got.Rule != c.rule || got.Allow != (c.rule == "mode.nat") || got.Means == "" {
			t.Errorf("%s, proxy %v: %+v, %v", c.target, c.proxied, got, err)
		}
		if p, err := h.client.ProfilePolicy(t.Context(), "yolo-ephemeral"); err != nil || p.UpstreamProxy != c.proxied {
			t.Errorf("the policy does not name the proxy: %+v, %v", p, err)
		}
		if _, err := h.client.ProfilePolicy(t.Context(), "none"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			t.Errorf("a profile that does not exist: %v", err)
		}
	}
}
