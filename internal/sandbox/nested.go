package sandbox

import (
	"cmp"
	"context"
	"errors"

	"github.com/agentlab-vm/agentlab"
)

// checkNested returns an error with code unsupported if a sandbox requires nested
// virtualization and no host provides it.
func (s *Service) checkNested(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.Resources.Nested != agentlab.NestedOn {
		return nil
	}
	err := s.hostNested(ctx, sb)
	if agentlab.CodeOf(err) == agentlab.CodeUnsupported {
		return err
	}
	return nil // not known: the guest reports it
}

// hostNested returns why the backend of a sandbox provides no virtualization to guests, nil if it
// may do so.
func (s *Service) hostNested(ctx context.Context, sb agentlab.Sandbox) error {
	b := s.On(sb)
	if b.Host != nil {
		return b.Host.Nested(ctx)
	}
	return b.Without("provides no nested virtualization").
		WithField("resources.nested").WithHint("set resources.nested: auto in the profile")
}

// noteNested stores what the guest of a sandbox has reported about /dev/kvm. The guest
// may be wrong about it, which harms only itself. The reason in the event is that of
// the host, if it has one.
func (s *Service) noteNested(ctx context.Context, sb agentlab.Sandbox, state agentlab.NestedState) error {
	if !sb.Resources.Nested.Wanted() || sb.Maintenance() {
		return nil
	}
	known := cmp.Or(state, agentlab.NestedUnknown)
	why, hint, text := "", "", ""
	if known != agentlab.NestedWorks {
		why = known.Reason()
		if e, ok := errors.AsType[*agentlab.Error](s.hostNested(ctx, sb)); ok && e.Code == agentlab.CodeUnsupported {
			why, hint = e.Message, e.Hint
		}
		if text = why; hint != "" {
			text += " → " + hint
		}
	}
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.NestedState == known { // noted, and then READY failed
			return nil, nil
		}
		now.NestedState = known
		data := map[string]any{"nested": sb.Resources.Nested, "works": why == ""}
		if why == "" {
			return []agentlab.Event{NewEvent(agentlab.EventSandboxNested, *now, data, "virtual machines can run in sandbox %s", sb.Name)}, nil
		}
		data["reason"], data["hint"] = why, hint
		return []agentlab.Event{NewEvent(agentlab.EventSandboxNested, *now, data, "warning: virtual machines do not run in sandbox %s: %s", sb.Name, text)}, nil
	})
	if err == nil && why != "" && sb.Resources.Nested == agentlab.NestedOn {
		return Permanent{agentlab.Errorf(agentlab.CodeUnsupported, "its profile requires nested virtualization: %s", why).
			WithHint("%s", cmp.Or(hint, "set resources.nested: auto in the profile if its jobs can do without"))}
	}
	return err
}
