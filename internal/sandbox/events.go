package sandbox

import (
	"context"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// NewEvent returns an event about a sandbox and its job.
func NewEvent(kind string, sb agentlab.Sandbox, data map[string]any, format string, args ...any) agentlab.Event {
	return agentlab.NewEvent(kind, data, format, args...).About(sb.VMID, sb.JobID)
}

// CreatedEvent returns the event of a new sandbox.
func CreatedEvent(sb agentlab.Sandbox) agentlab.Event {
	data := map[string]any{"name": sb.Name, "profile": sb.Profile, "image": sb.Image, "lease_expires_at": sb.LeaseExpiresAt.Format(time.RFC3339)}
	text := ""
	if sb.From.Name != "" {
		data["from"] = sb.From.Name
		text = " from " + sb.From.Name
	}
	if sb.Start == agentlab.StartPool {
		data["start"] = sb.Start
		text = " from the warm pool"
	}
	return NewEvent(agentlab.EventSandboxCreated, sb, data, "sandbox %s requested with profile %s%s", sb.Name, sb.Profile, text)
}

// startedEvent is the event of a sandbox whose guest answers for the first time:
// how it started, and how long that took since begun.
func startedEvent(sb agentlab.Sandbox, from agentlab.SandboxState, begun time.Time) agentlab.Event {
	return stateEventWith(map[string]any{"start": sb.Start, "start_seconds": sb.BootedAt.Sub(begun).Seconds()}, sb, from)
}

// StateEvent is the event of a new state.
func StateEvent(sb agentlab.Sandbox, from agentlab.SandboxState) agentlab.Event {
	return stateEventWith(map[string]any{}, sb, from)
}

func stateEventWith(data map[string]any, sb agentlab.Sandbox, from agentlab.SandboxState) agentlab.Event {
	data["from"], data["to"] = from, sb.State
	text := ""
	if sb.OnDisk && sb.State == agentlab.SandboxSuspended { // also set while it resumes
		text = " to disk"
		data["on_disk"] = true
	}
	if sb.Reason != "" {
		switch sb.State {
		case agentlab.SandboxFailed, agentlab.SandboxTimeout, agentlab.SandboxStopped, agentlab.SandboxDestroyed:
			text = ": " + sb.Reason
			data["reason"] = sb.Reason
		}
	}
	return NewEvent(agentlab.EventSandboxState, sb, data, "sandbox %s is %s%s", sb.Name, sb.State, text)
}

func desiredEvent(sb agentlab.Sandbox) agentlab.Event {
	return NewEvent(agentlab.EventSandboxState, sb, map[string]any{"desired": sb.Desired, "state": sb.State}, "sandbox %s will be %s", sb.Name, strings.ReplaceAll(string(sb.Desired), "_", " "))
}

func leaseEvent(sb agentlab.Sandbox, what string) agentlab.Event {
	end := sb.LeaseExpiresAt.UTC().Format(time.RFC3339)
	return NewEvent(agentlab.EventSandboxLease, sb, map[string]any{"lease_expires_at": end}, "lease of sandbox %s %s, ends %s", sb.Name, what, end)
}

// Refused adds to the data of an event why a request was given up. Clients that
// wait for the request then return an error.
func Refused(data map[string]any, why string, cause error, hint string) map[string]any {
	data["refused"], data["code"], data["hint"] = why, agentlab.CodeOf(cause), hint
	return data
}

// The reason why a sandbox does not continue is shown once it has lasted for
// reportAfter, and at most once in reportInterval as long as its code stays the same:
// texts may differ with every try.
const (
	reportAfter    = 5 * time.Second
	reportInterval = time.Minute
)

// retryState stores the failed steps of a sandbox in its current state, towards
// the desired state. It is not stored on disk.
type retryState struct {
	desired    agentlab.Desired
	since      time.Time // of the first failure
	reportedAt time.Time // when the row and an event last reported it; zero means never
	text       string    // as reported
	code       agentlab.Code
}

// noteWaiting handles a step of a sandbox that ended with err: the row and an
// event show why the sandbox does not continue. The reason is removed from the
// row once it continues.
func (s *Service) noteWaiting(ctx context.Context, sb agentlab.Sandbox, done bool, err error) {
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		if done && s.idle(sb) {
			s.SetWaiting(ctx, sb, "", nil)
		}
		return
	}
	text := "waits: "
	after := reportAfter
	if sb.Desired == agentlab.DesiredDestroyed {
		text, after = "cannot be destroyed, will be tried again: ", 0
	}
	text = s.RedactReason(ctx, sb, text+agentlab.TextWithHint(err))
	due := false
	s.withState(sb.VMID, func(m *runtimeState) {
		now := s.clock()
		if m.retry == nil || m.retry.desired != sb.Desired {
			m.retry = &retryState{desired: sb.Desired, since: now}
		}
		t := m.retry
		code := agentlab.CodeOf(err)
		same := t.text == text || code == t.code && now.Sub(t.reportedAt) < reportInterval
		if due = now.Sub(t.since) >= after && (t.reportedAt.IsZero() || !same); due {
			t.reportedAt, t.text, t.code = now, text, code
		}
	})
	if due {
		s.SetWaiting(ctx, sb, text, err)
	}
}

// idle reports whether a sandbox whose step succeeded waits for nothing: one
// that is still being created may wait for its next attempt.
func (s *Service) idle(sb agentlab.Sandbox) bool {
	switch sb.State {
	case agentlab.SandboxRequested, agentlab.SandboxProvisioning:
		return false
	case agentlab.SandboxBooting:
		return s.Inspected(sb.VMID)
	}
	return true
}

// SetWaiting stores why a sandbox waits, with an event; "" means that it does
// not wait.
func (s *Core) SetWaiting(ctx context.Context, sb agentlab.Sandbox, text string, cause error) {
	if text == "" {
		s.withState(sb.VMID, func(m *runtimeState) { m.retry = nil })
		if sb.Waiting == "" {
			return
		}
	}
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.Desired != sb.Desired {
			return nil, nil
		}
		now.Waiting = text
		if text == "" {
			return nil, nil
		}
		return []agentlab.Event{NewEvent(agentlab.EventSandboxState, sb,
			map[string]any{"state": sb.State, "waiting": text, "code": agentlab.CodeOf(cause)}, "sandbox %s %s", sb.Name, text)}, nil
	})
	if err != nil {
		s.log.Error("the reason why a sandbox waits was not stored", "vmid", sb.VMID, "waiting", text, "err", err)
	}
}
