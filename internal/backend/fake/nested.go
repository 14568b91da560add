package fake

import (
	"context"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Nested implements backend.Host.
func (d *Driver) Nested(ctx context.Context) error {
	if err := d.alive(ctx); err != nil {
		return err
	}
	return d.h.nested()
}

func (h *Host) nested() error {
	if !h.cfg.NoNested {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeUnsupported, "no nested virtualization: this host has none").
		WithField("resources.nested").WithHint("use a host that has it")
}

// nestedState returns what the guest reports after it got an identity.
func (g *guest) nestedState(id guestapi.Identity) agentlab.NestedState {
	spec := g.in.rec.Spec
	switch {
	case id.Nested == "":
		return ""
	case g.in.h.nested() != nil || !spec.Resources.Nested.Wanted():
		return agentlab.NestedNoCPU
	case strings.HasPrefix(spec.Name, "no-kvm"):
		return agentlab.NestedNoVM
	}
	return agentlab.NestedWorks
}
