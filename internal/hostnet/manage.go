package hostnet

import (
	"context"
	"net/netip"

	"github.com/agentlab-vm/agentlab/internal/egress/nft"
)

// Status is the state of the network of this machine.
type Status struct {
	nft.Status
	Serving bool // DNS, proxy and the guest plane's ports are open to guests
	Bridge  string
	Subnet4 netip.Prefix
	Subnet6 netip.Prefix // zero: none
}

// Rules returns the text that Apply would load.
func (l *Local) Rules(ctx context.Context) (string, error) {
	m, err := l.open(ctx)
	if err != nil {
		return "", err
	}
	return m.Render()
}

// Apply applies the rules, creates or checks the bridge, and starts to serve
// guests. Sandboxes on the bridge that a driver has not reported yet are not
// changed.
func (l *Local) Apply(ctx context.Context) (Status, error) {
	l.change.Lock()
	defer l.change.Unlock()
	m, err := l.open(ctx)
	if err != nil {
		return Status{}, err
	}
	l.mu.Lock()
	waits := l.claimed && !l.restored
	l.mu.Unlock()
	if waits {
		st, err := m.Status(ctx)
		if err != nil {
			return Status{}, err
		}
		if st.Applied() { // the rules keep their sandboxes until the driver calls Restore
			if err := m.Prepare(); err != nil {
				return Status{}, err
			}
			return l.status(ctx, m)
		}
	}
	if err := m.Apply(ctx); err != nil {
		return Status{}, err
	}
	if !waits {
		l.serve(m)
	}
	return l.status(ctx, m)
}

// Remove removes the rules. It sets the bridge down first: without rules,
// sandboxes could reach the host and its networks.
func (l *Local) Remove(ctx context.Context) (Status, error) {
	l.change.Lock()
	defer l.change.Unlock()
	m, err := l.open(ctx)
	if err != nil {
		return Status{}, err
	}
	l.stopServing()
	if err := m.Remove(ctx); err != nil {
		return Status{}, err
	}
	return l.status(ctx, m)
}

// Status reads the rules in force.
func (l *Local) Status(ctx context.Context) (Status, error) {
	m, err := l.open(ctx)
	if err != nil {
		return Status{}, err
	}
	return l.status(ctx, m)
}

func (l *Local) status(ctx context.Context, m *nft.Manager) (Status, error) {
	st, err := m.Status(ctx)
	if err != nil {
		return Status{}, err
	}
	l.mu.Lock()
	c := l.network
	l.mu.Unlock()
	return Status{Status: st, Serving: l.serving(), Bridge: c.Bridge, Subnet4: c.Subnet4, Subnet6: c.Subnet6}, nil
}
