package warmpool

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Ready implements sandbox.Pool.
func (p *Pool) Ready(ctx context.Context, sb agentlab.Sandbox) error {
	h, err := p.core.Health(ctx, sb)
	if err != nil {
		return err
	}
	if h.System != "running" && h.System != "degraded" && (h.System != "unknown" || h.Uptime < bootedUptime) {
		return agentlab.Errorf(agentlab.CodeUnavailable, "its init is %s", agentlab.OneLine(h.System, 20))
	}
	if err := p.warmGuest(ctx, sb); err != nil {
		return err
	}
	if power := p.core.On(sb).Power; power != nil {
		if err := power.Suspend(ctx, backend.RefOf(sb)); err != nil {
			return err
		}
	}
	in, err := p.core.On(sb).Inspect(ctx, backend.RefOf(sb))
	if err != nil {
		return err
	}
	_, err = p.core.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State == sb.State && now.Desired == sb.Desired {
			now.State, now.Handle = agentlab.SandboxPooled, in.Ref.Handle
		}
		return nil, nil
	})
	if err == nil {
		p.made(sb.VMID)
		p.wakeUp()
	}
	return err
}

// warmGuest lets the guest do what an identity would have to do, and runs a command,
// so that it has the code of both in memory.
func (p *Pool) warmGuest(ctx context.Context, sb agentlab.Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, warmTimeout)
	defer cancel()
	defer p.core.Asking(sb.VMID)()
	c := p.core.Control(sb)
	if b := p.core.On(sb); b.Templates != nil { // its guests can get their identity as a copy
		if err := c.Prepare(ctx, guestapi.PrepareRequest{Network: b.Info().GuestNetwork}); err != nil {
			return err
		}
	}
	return c.Rehearse(ctx)
}
