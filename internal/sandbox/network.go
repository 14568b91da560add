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

// A change of a network policy is written into the row first, marked as
// pending; the loop puts it in force and takes the mark away. So a crash
// between the two is made good by the next process. A policy that cannot be
// put in force makes its sandbox FAILED, which powers its VM off: nothing goes
// on under a policy that was to be narrower.

// networkWait is how long a call waits for a changed policy to be in force.
const networkWait = 20 * time.Second

// MaxLayerRules is how many rules one narrowing layer may hold.
const MaxLayerRules = 1000

// Reloaded is the result for one sandbox's network policy.
type Reloaded struct {
	Sandbox agentlab.Sandbox
	Changed bool  // the profile's policy is another than the sandbox had
	Err     error // why the sandbox has not, or not yet, the policy of its profile
}

// ReloadNetworks gives sandboxes the network policy that their profiles have
// now, and keeps the layers that narrow it: those in vmids, whether it differs
// or not, or else all whose profile's policy has changed. It returns when the
// policies are in force, or 20 s later. The error is about the whole; what
// fails for one sandbox is in its Reloaded.
func (s *Service) ReloadNetworks(ctx context.Context, vmids []int) ([]Reloaded, error) {
	var list []agentlab.Sandbox
	if len(vmids) == 0 {
		all, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{})
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
		// What an earlier call asked for may still be on its way.
		if r.Err == nil && (r.Changed || len(vmids) > 0 || r.Sandbox.NetworkPending) {
			r.Sandbox, r.Err = s.awaitNetwork(ctx, r.Sandbox, false)
		}
	}
	return out, nil
}

// requestReload writes down that a sandbox is to have its profile's policy.
func (s *Service) requestReload(ctx context.Context, sb agentlab.Sandbox, again bool) Reloaded {
	r := Reloaded{Sandbox: sb}
	if sb.State == agentlab.SandboxDestroyed || sb.Desired == agentlab.DesiredDestroyed {
		r.Err = conflict(sb, "and its policy can no longer be changed", "")
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
	r.Sandbox, r.Err = s.requestChange(ctx, sb.VMID, s.loop.Wake, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
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
// layer does not allow is denied from now on, whatever the profile says. The
// same layer again changes nothing. It returns when the policy is in force.
// Codes: not_found, invalid, unsupported, limit (too many layers), conflict,
// unavailable (not in force yet; call again).
func (s *Service) NarrowNetwork(ctx context.Context, vmid int, layer agentlab.Network) error {
	if len(layer.Layers) > 0 || layer.Limits != (agentlab.NetworkLimits{}) {
		return agentlab.Errorf(agentlab.CodeInvalid, "a layer has no layers or limits of its own")
	}
	if n := len(layer.Allow) + len(layer.Deny); n > MaxLayerRules {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d rules are more than %d", n, MaxLayerRules).WithField("allow").
			WithHint("use ranges and wildcards")
	}
	if _, err := egress.New(layer); err != nil {
		return err
	}
	sb, err := s.requestChange(ctx, vmid, s.loop.Wake, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		switch {
		case sb.State == agentlab.SandboxDestroyed || sb.Desired == agentlab.DesiredDestroyed:
			return nil, conflict(*sb, "and its policy can no longer be changed", "")
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

// SameNetwork reports whether a row would hold the same for both policies.
func SameNetwork(a, b agentlab.Network) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}

// setNetwork gives a row another policy that the backend can enforce.
func (s *Service) setNetwork(sb *agentlab.Sandbox, n agentlab.Network, why string) ([]agentlab.Event, error) {
	if _, ok := s.cfg.Driver.(backend.NetworkUpdater); !ok || !s.cfg.Driver.Info().Capabilities.NetworkUpdate {
		return nil, agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot change the network policy of a sandbox", sb.Backend).
			WithHint("make a new sandbox: it gets the policy of its profile")
	}
	if _, err := egress.New(n); err != nil {
		return nil, err
	}
	next := *sb
	next.Network = n
	if err := s.cfg.Driver.Validate(spec(next)); err != nil {
		return nil, err
	}
	sb.Network, sb.NetworkPending = n, true
	return []agentlab.Event{networkEvent(*sb, why)}, nil
}

func networkEvent(sb agentlab.Sandbox, what string) agentlab.Event {
	n := sb.Network
	return event(agentlab.EventSandboxNetwork, sb, map[string]any{
		"mode": n.Mode, "allow": len(n.Allow), "deny": len(n.Deny), "layers": len(n.Layers), "pending": sb.NetworkPending,
	}, "network policy of sandbox %s %s", sb.Name, what)
}

// applyNetwork puts a pending policy in force. settled means that the row has
// changed; else there is nothing to do it on yet.
func (s *Service) applyNetwork(ctx context.Context, sb agentlab.Sandbox) (settled bool, err error) {
	err = s.updateNetwork(ctx, sb)
	switch {
	case err == nil:
		return true, s.networkApplied(ctx, sb)
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return false, nil // it is to be made, or it is lost: the step finds out
	case ctx.Err() != nil:
		return false, err
	}
	now, long := s.clock(), false
	s.withState(sb.VMID, func(m *runtimeState) {
		if m.netSince.IsZero() {
			m.netSince = now
		}
		long = now.Sub(m.netSince) >= s.lim.NetworkTimeout
		m.netTrouble = agentlab.Reason(err.Error())
		m.notifyWaiters()
	})
	if isTransient(err) && !long {
		return false, err
	}
	return true, s.markFailed(ctx, sb, "its network policy could not be put in force: %w", err)
}

func (s *Service) updateNetwork(ctx context.Context, sb agentlab.Sandbox) error {
	nu, ok := s.cfg.Driver.(backend.NetworkUpdater)
	if !ok { // the row is of another driver's time
		return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s cannot change the network policy of a sandbox", sb.Backend)
	}
	return nu.UpdateNetwork(ctx, backend.RefOf(sb), sb.Network)
}

// networkApplied notes that the policy of sb is in force, unless the row has
// another by now.
func (s *Service) networkApplied(ctx context.Context, sb agentlab.Sandbox) error {
	s.withState(sb.VMID, func(m *runtimeState) { m.netSince, m.netTrouble = time.Time{}, "" })
	_, err := s.update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if !now.NetworkPending || !SameNetwork(now.Network, sb.Network) {
			return nil, nil
		}
		now.NetworkPending = false
		return []agentlab.Event{networkEvent(*now, "is in force")}, nil
	})
	return err
}

// notifyWaiters wakes who waits in awaitNetwork. The caller holds the lock.
func (m *runtimeState) notifyWaiters() {
	if m.changed != nil {
		close(m.changed)
		m.changed = nil
	}
}

// awaitNetwork waits until the policy of a sandbox's row is in force. It does
// not wait for a VM that is still to be made, nor, unless booting is set, for
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
			changed, trouble = m.changed, m.netTrouble
		})
		sb, err := s.cfg.Store.Sandbox(ctx, vmid)
		switch {
		case err != nil:
			return sb, err
		case sb.State == agentlab.SandboxFailed && sb.NetworkPending:
			return sb, conflict(sb, "because "+sb.Reason, "")
		case !sb.NetworkPending || !sb.State.HasVM() || (sb.State == agentlab.SandboxBooting && !booting):
			return sb, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			e := agentlab.Errorf(agentlab.CodeUnavailable, "the network policy of sandbox %s (%d) is not in force yet", sb.Name, vmid)
			if trouble != "" {
				e = agentlab.Errorf(agentlab.CodeUnavailable, "the network policy of sandbox %s (%d) is not in force yet: %s", sb.Name, vmid, trouble)
			}
			return sb, e.WithHint("agentlabd tries again, and powers off a sandbox whose policy cannot be applied")
		}
	}
}
