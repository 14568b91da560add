package proxmox

import (
	"context"
	"reflect"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// sameNetwork reports whether two policies are equal.
func sameNetwork(a, b agentlab.Network) bool { return reflect.DeepEqual(a, b) }

// UpdateNetwork implements backend.Net.
func (d *Driver) UpdateNetwork(ctx context.Context, ref backend.Ref, n agentlab.Network) error {
	unlock, err := d.lock(ctx, ref.UID)
	if err != nil {
		return err
	}
	defer unlock()
	h, err := d.handleOf(ctx, ref)
	if err != nil {
		return err
	}
	return d.setNetwork(ctx, h, n)
}

// setNetwork changes the policy of a sandbox. The policy is stored first: if
// this process dies before it is in force, the next one applies the stored
// policy.
func (d *Driver) setNetwork(ctx context.Context, h *handle, n agentlab.Network) error {
	if _, err := egress.New(n); err != nil {
		return err
	}
	before := h.Network
	h.Network = &n
	if err := d.save(h); err != nil {
		return err
	}
	d.at("policy noted")
	if h.Phase != phaseCreated || h.Power == powerOff || h.Power == "" {
		return nil // the next Start applies it
	}
	err := d.enforce(ctx, h)
	if err == nil {
		return nil
	}
	h.Network = before // it has no network now, and the old policy after the next Start
	if serr := d.save(h); serr != nil {
		return serr
	}
	return err
}

// enforce applies the policy of a sandbox on its node.
func (d *Driver) enforce(ctx context.Context, h *handle) error {
	net, err := d.network(ctx, h.Node)
	if err != nil {
		return err
	}
	return d.put(ctx, net, h)
}

// put is enforce with the network of the sandbox's node.
func (d *Driver) put(ctx context.Context, net Host, h *handle) error {
	g, err := h.guest(d.cfg.DHCP)
	if err != nil {
		return err
	}
	return net.Put(ctx, g)
}

// EgressLog implements backend.Net.
func (d *Driver) EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	if limit < 1 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d is not a valid number of records", limit).WithField("limit")
	}
	_, h, err := d.resolve(ctx, ref)
	if err != nil || h == nil {
		return nil, err
	}
	host, err := d.network(ctx, h.Node)
	if err != nil {
		return nil, err
	}
	recs, err := host.EgressLog(ctx, h.id(), after, limit)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil, nil // it was never on the network
	}
	return recs, err
}
