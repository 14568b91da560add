package qemu

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// route sets how a guest's network reaches the internet.
func (c Start) route(n *vnet.Config) error {
	if c.DialUnix != "" {
		n.Dialer = gate.UnixDialer{Path: c.DialUnix}
		return nil
	}
	if c.UpstreamProxy == nil {
		return nil
	}
	p, err := gate.NewProxyDialer(*c.UpstreamProxy)
	if err != nil {
		return err
	}
	n.Dialer, n.Resolver = p, p.Resolver()
	return nil
}

// checkProxy looks whether the upstream proxy answers.
func (d *Driver) checkProxy(ctx context.Context) []backend.Finding {
	const name = "upstream-proxy"
	if d.cfg.UpstreamProxy == nil {
		return nil
	}
	p, err := gate.NewProxyDialer(*d.cfg.UpstreamProxy)
	if err == nil {
		err = p.Check(ctx)
	}
	if err != nil {
		return []backend.Finding{finding(name, backend.LevelError, agentlab.HintOf(err), "%s", err)}
	}
	return []backend.Finding{finding(name, backend.LevelOK, "", "%s answers", d.cfg.UpstreamProxy.URL)}
}
