package supervisor

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// route configures how a guest's network reaches the internet.
func (s *Start) route(n *vnet.Config) error {
	if s.UpstreamProxy == nil {
		return nil
	}
	p, err := gate.NewProxyDialer(*s.UpstreamProxy)
	if err != nil {
		return err
	}
	n.Dialer, n.Resolver = p, p.Resolver()
	return nil
}

// CheckProxy checks, for backend.Driver.Check, whether an upstream proxy
// answers. nil means no proxy.
func CheckProxy(ctx context.Context, proxy *gate.ProxyConfig) []backend.Finding {
	if proxy == nil {
		return nil
	}
	f := backend.Finding{Name: "upstream-proxy", Level: backend.LevelOK, Detail: proxy.URL + " answers"}
	p, err := gate.NewProxyDialer(*proxy)
	if err == nil {
		err = p.Check(ctx)
	}
	if err != nil {
		f.Level, f.Detail, f.Remedy = backend.LevelError, err.Error(), agentlab.HintOf(err)
	}
	return []backend.Finding{f}
}
