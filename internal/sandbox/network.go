package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// A change of a network policy is first written to the row and marked as
// pending; the loop applies it and clears the mark. After a crash between the
// two, the next process applies it. If a policy cannot be applied, its sandbox
// becomes FAILED and its VM is powered off: no VM keeps running with a policy
// that is wider than requested.

// networkWait is how long a call waits for a changed policy to be in force.
const networkWait = 20 * time.Second

// MaxLayerRules is how many rules one narrowing layer may hold.
const MaxLayerRules = 1000

// Reloaded is the result for one sandbox's network policy.
type Reloaded struct {
	Sandbox agentlab.Sandbox
	Changed bool  // the profile's policy differed from the sandbox's
	Err     error // why the sandbox does not have the policy of its profile, or not yet
}

// ReloadNetworks applies the current network policies of their profiles to
// sandboxes and keeps the layers that narrow them. It covers the sandboxes in
// vmids, even if the policy does not differ, or if vmids is empty all
// sandboxes whose profile's policy has changed. It returns when the policies
// are in force, or after 20 s. The error is of the whole call; a failure of
// one sandbox is in its Reloaded.
func (s *Service) ReloadNetworks(ctx context.Context, vmids []int) ([]Reloaded, error) {
	var list []agentlab.Sandbox
	if len(vmids) == 0 {
		all, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{NoPooled: true})
		if err != nil {
			return nil, err
		}
		list = all
	}
	for _, vmid := range vmids {
		sb, err := s.cfg.Store.Sandbox(ctx, vmid)
		if err != nil {
			return nil, err
		}
		list = append(list, sb)
	}
	out := make([]Reloaded, len(list))
	for i, sb := range list {
		out[i] = s.requestReload(ctx, sb, len(vmids) > 0)
	}
	ctx, cancel := context.WithTimeout(ctx, networkWait)
	defer cancel()
	for i := range out {
		r := &out[i]
		// The change of an earlier call may still be pending.
		if r.Err == nil && (r.Changed || len(vmids) > 0 || r.Sandbox.NetworkPending) {
			r.Sandbox, r.Err = s.awaitNetwork(ctx, r.Sandbox, false)
		}
	}
	return out, nil
}

// requestReload stores that a sandbox must get its profile's current policy.
func (s *Service) requestReload(ctx context.Context, sb agentlab.Sandbox, again bool) Reloaded {
	r := Reloaded{Sandbox: sb}
	if sb.State == agentlab.SandboxDestroyed || sb.Desired == agentlab.DesiredDestroyed {
		r.Err = Conflict(sb, "and its policy can no longer be changed", "")
		return r
	}
	if sb.Pooled() {
		r.Err = Conflict(sb, "and belongs to the warm pool, without a network", "")
		return r
	}
	prof, err := s.cfg.Profiles.Use(sb.Profile)
	if err != nil {
		r.Err = err
		return r
	}
	if _, err := s.cfg.Store.PutProfile(ctx, prof.Name, prof.YAML); err != nil {
		r.Err = err
		return r
	}
	r.Sandbox, r.Err = s.RequestChange(ctx, sb.VMID, s.policyChanged, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		n := prof.Network
		n.Layers = sb.Network.Layers
		r.Changed = !SameNetwork(n, sb.Network)
		if !r.Changed && !again {
			return nil, nil
		}
		return s.setNetwork(sb, n, "reloaded from profile "+prof.Name)
	})
	return r
}

// NarrowNetwork adds a layer to the network policy of a sandbox: what the
// layer does not allow is denied from now on, even if the profile allows it.
// Adding the same layer again changes nothing. It returns when the policy is
// in force. Codes: not_found, invalid, unsupported, limit (too many layers),
// conflict, unavailable (not in force yet; call again).
func (s *Service) NarrowNetwork(ctx context.Context, vmid int, layer agentlab.Network) error {
	if len(layer.Layers) > 0 || layer.Limits != (agentlab.NetworkLimits{}) {
		return agentlab.Errorf(agentlab.CodeInvalid, "a layer has no layers or limits of its own")
	}
	if n := len(layer.Allow) + len(layer.Deny); n > MaxLayerRules {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d rules exceed the limit of %d", n, MaxLayerRules).WithField("allow").
			WithHint("use ranges and wildcards")
	}
	if _, err := egress.New(layer); err != nil {
		return err
	}
	sb, err := s.RequestChange(ctx, vmid, s.policyChanged, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		switch {
		case sb.State == agentlab.SandboxDestroyed || sb.Desired == agentlab.DesiredDestroyed:
			return nil, Conflict(*sb, "and its policy can no longer be changed", "")
		case HasLayer(sb.Network, layer):
			return nil, nil
		case len(sb.Network.Layers) >= egress.MaxLayers:
			return nil, agentlab.Errorf(agentlab.CodeLimit, "the network policy of sandbox %d has %d layers already", vmid, egress.MaxLayers)
		}
		n := sb.Network
		n.Layers = append(append([]agentlab.Network(nil), n.Layers...), layer)
		return s.setNetwork(sb, n, "narrowed by the repository")
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, networkWait)
	defer cancel()
	_, err = s.awaitNetwork(ctx, sb, true)
	return err
}

// HasLayer reports whether layer is one of the layers of n.
func HasLayer(n, layer agentlab.Network) bool {
	return slices.ContainsFunc(n.Layers, func(l agentlab.Network) bool { return SameNetwork(l, layer) })
}

// SameNetwork reports whether both policies have the same stored form.
func SameNetwork(a, b agentlab.Network) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}

// setNetwork changes the policy of a row, if the backend can enforce the new
// one.
func (s *Service) setNetwork(sb *agentlab.Sandbox, n agentlab.Network, why string) ([]agentlab.Event, error) {
	if b := s.On(*sb); b.Net == nil {
		return nil, b.Without("cannot change the network policy of a sandbox").
			WithHint("create a new sandbox: it gets the policy of its profile")
	}
	if _, err := egress.New(n); err != nil {
		return nil, err
	}
	next := *sb
	next.Network = n
	if err := s.On(next).Validate(SpecOf(next)); err != nil {
		return nil, err
	}
	sb.Network, sb.NetworkPending = n, true
	return []agentlab.Event{networkEvent(*sb, why)}, nil
}

func networkEvent(sb agentlab.Sandbox, what string) agentlab.Event {
	n := sb.Network
	return NewEvent(agentlab.EventSandboxNetwork, sb, map[string]any{
		"mode": n.Mode, "allow": len(n.Allow), "deny": len(n.Deny), "layers": len(n.Layers), "pending": sb.NetworkPending,
	}, "network policy of sandbox %s %s", sb.Name, what)
}

// policyChanged runs the step of a sandbox soon. It interrupts a step that waits
// for the guest, or saves it.
func (s *Service) policyChanged(vmid int) {
	s.withState(vmid, func(m *runtimeState) {
		m.newPolicy = true
		if m.asking {
			s.loop.Interrupt(vmid)
		}
	})
	s.loop.Wake(vmid)
}

// applyNetwork puts a pending policy in force. settled means that the row has
// changed; otherwise there is no VM to apply the policy to yet.
func (s *Service) applyNetwork(ctx context.Context, sb agentlab.Sandbox) (settled bool, err error) {
	err = s.updateNetwork(ctx, sb)
	switch {
	case err == nil:
		return true, s.networkApplied(ctx, sb)
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return false, nil // it must be created, or it is lost: the step finds out
	case ctx.Err() != nil:
		return false, err
	}
	now, long := s.clock(), false
	s.withState(sb.VMID, func(m *runtimeState) {
		if m.trouble == nil {
			m.trouble = &netTrouble{since: now}
		}
		long = now.Sub(m.trouble.since) >= s.lim.NetworkTimeout
		m.trouble.why = agentlab.Reason(err.Error())
		m.notifyWaiters()
	})
	if backend.IsTransient(err) && !long {
		return false, err
	}
	return true, s.MarkFailed(ctx, sb, "its network policy could not be applied: %w", err)
}

func (s *Service) updateNetwork(ctx context.Context, sb agentlab.Sandbox) error {
	b := s.On(sb)
	if b.Net == nil { // the row was written for another driver
		return b.Without("cannot change the network policy of a sandbox")
	}
	return b.Net.UpdateNetwork(ctx, backend.RefOf(sb), sb.Network)
}

// networkApplied records that the policy of sb is in force, unless the row has
// a newer policy.
func (s *Service) networkApplied(ctx context.Context, sb agentlab.Sandbox) error {
	s.withState(sb.VMID, func(m *runtimeState) { m.trouble = nil })
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if !now.NetworkPending || !SameNetwork(now.Network, sb.Network) {
			return nil, nil
		}
		now.NetworkPending = false
		return []agentlab.Event{networkEvent(*now, "is applied")}, nil
	})
	return err
}

// notifyWaiters wakes the callers of awaitNetwork. The caller holds the lock.
func (m *runtimeState) notifyWaiters() {
	if m.changed != nil {
		close(m.changed)
		m.changed = nil
	}
}

// awaitNetwork waits until the policy of a sandbox's row is in force. It does
// not wait for a VM that does not exist yet, nor, unless booting is set, for
// one that boots.
func (s *Service) awaitNetwork(ctx context.Context, sb agentlab.Sandbox, booting bool) (agentlab.Sandbox, error) {
	vmid := sb.VMID
	s.track(sb)
	for {
		var changed chan struct{}
		trouble := ""
		s.withState(vmid, func(m *runtimeState) {
			if m.changed == nil {
				m.changed = make(chan struct{})
			}
			if changed = m.changed; m.trouble != nil {
				trouble = m.trouble.why
			}
		})
		sb, err := s.cfg.Store.Sandbox(ctx, vmid)
		switch {
		case err != nil:
			return sb, err
		case sb.State == agentlab.SandboxFailed && sb.NetworkPending:
			return sb, Conflict(sb, "because "+sb.Reason, "")
		case !sb.NetworkPending || !sb.State.HasVM() || (sb.State == agentlab.SandboxBooting && !booting):
			return sb, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			e := agentlab.Errorf(agentlab.CodeUnavailable, "the network policy of sandbox %s (%d) is not applied yet", sb.Name, vmid)
			if trouble != "" {
				e = agentlab.Errorf(agentlab.CodeUnavailable, "the network policy of sandbox %s (%d) is not applied yet: %s", sb.Name, vmid, trouble)
			}
			return sb, e.WithHint("agentlabd tries again, and powers off a sandbox whose policy cannot be applied")
		}
	}
}
