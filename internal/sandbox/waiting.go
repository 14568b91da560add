package sandbox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// What keeps a sandbox from going on is told to people once it has done so for
// tellAfter, and at most once in tellEvery as long as its code stays the same:
// texts may differ with every try.
const (
	tellAfter = 5 * time.Second
	tellEvery = time.Minute
)

// trouble is what this process remembers of the failed steps of a sandbox in
// its present state, on the way to what is desired.
type trouble struct {
	desired agentlab.Desired
	since   time.Time // of the first one
	told    time.Time // when the row and an event last told of it; zero: never
	text    string    // as told
	code    agentlab.Code
}

// noteWaiting follows a step of a sandbox that ended with err: the row and an
// event tell why it does not go on, and the row tells so no more once it does.
func (s *Service) noteWaiting(ctx context.Context, sb agentlab.Sandbox, done bool, err error) {
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		if done && s.settled(sb) {
			s.setWaiting(ctx, sb, "", nil)
		}
		return
	}
	text := "waits: "
	after := tellAfter
	if sb.Desired == agentlab.DesiredDestroyed {
		text, after = "cannot be destroyed, will be tried again: ", 0
	}
	text = s.told(ctx, sb, text+agentlab.TextWithHint(err))
	due := false
	s.with(sb.VMID, func(m *memory) {
		now := s.clock()
		t := &m.trouble
		if t.since.IsZero() || t.desired != sb.Desired {
			*t = trouble{desired: sb.Desired, since: now}
		}
		code := agentlab.CodeOf(err)
		same := t.text == text || code == t.code && now.Sub(t.told) < tellEvery
		if due = now.Sub(t.since) >= after && (t.told.IsZero() || !same); due {
			t.told, t.text, t.code = now, text, code
		}
	})
	if due {
		s.setWaiting(ctx, sb, text, err)
	}
}

// settled reports whether a sandbox whose step has ended well waits for nothing:
// one that is still being made may wait for its turn to try again.
func (s *Service) settled(sb agentlab.Sandbox) bool {
	switch sb.State {
	case agentlab.SandboxRequested, agentlab.SandboxProvisioning:
		return false
	case agentlab.SandboxBooting:
		return s.inspected(sb.VMID)
	}
	return true
}

// setWaiting writes down why a sandbox waits, with an event; "" for one that
// does not.
func (s *Service) setWaiting(ctx context.Context, sb agentlab.Sandbox, text string, cause error) {
	if text == "" {
		s.with(sb.VMID, func(m *memory) { m.trouble = trouble{} })
		if sb.Waiting == "" {
			return
		}
	}
	_, err := s.update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.Desired != sb.Desired {
			return nil, nil
		}
		now.Waiting = text
		if text == "" {
			return nil, nil
		}
		return []agentlab.Event{event(agentlab.EventSandboxState, sb,
			map[string]any{"state": sb.State, "waiting": text, "code": agentlab.CodeOf(cause)}, "sandbox %s %s", sb.Name, text)}, nil
	})
	if err != nil {
		s.log.Error("why a sandbox waits was not written", "vmid", sb.VMID, "waiting", text, "err", err)
	}
}
