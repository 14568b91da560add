package work

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// IsUp reports whether commands can run in a sandbox.
func IsUp(sb api.Sandbox) bool {
	switch agentlab.SandboxState(sb.State) {
	case agentlab.SandboxReady, agentlab.SandboxRunning, agentlab.SandboxCompleted:
		return true
	}
	return false
}

// IsOnDisk reports whether the memory of a suspended sandbox is on the disk.
func IsOnDisk(sb api.Sandbox) bool { return sb.OnDisk }

// IsStopped reports whether a sandbox is stopped.
func IsStopped(sb api.Sandbox) bool { return sb.State == string(agentlab.SandboxStopped) }

// IsDestroyed reports whether a sandbox is destroyed.
func IsDestroyed(sb api.Sandbox) bool { return sb.State == string(agentlab.SandboxDestroyed) }

// IsKept reports whether a sandbox is off and only kept for the work of its job.
func IsKept(sb api.Sandbox) bool { return sb.Salvage && sb.State == string(agentlab.SandboxStopped) }

// LastEvent returns the ID of the newest event about a sandbox, 0 if there is
// none. Events of a later request have larger IDs.
func LastEvent(ctx context.Context, c *client.Client, sandbox string) (int64, error) {
	list, err := c.Events(ctx, client.EventQuery{Sandbox: sandbox, Limit: 1})
	if err != nil || len(list.Items) == 0 {
		return 0, err
	}
	return list.Items[len(list.Items)-1].ID, nil
}

// LastSessionEvent returns the ID of the newest event about the current sandbox of a
// session; 0 if it has none, or if that cannot be read.
func LastSessionEvent(ctx context.Context, c *client.Client, session string) int64 {
	s, err := c.Session(ctx, session)
	if err != nil {
		return 0
	}
	return LastSandboxEvent(ctx, c, s)
}

// LastSandboxEvent is LastSessionEvent of a session that has been read.
func LastSandboxEvent(ctx context.Context, c *client.Client, s api.Session) int64 {
	if s.SandboxVMID == 0 {
		return 0
	}
	after, err := LastEvent(ctx, c, fmt.Sprint(s.SandboxVMID))
	if err != nil {
		return 0
	}
	return after
}

// WaitSandbox shows the events of a sandbox until done holds. after is the ID of
// the newest event before the request that returned sb, 0 if that created it.
// It returns an error if the sandbox enters a state that done cannot follow,
// unless it was in that state before, and if the daemon gave the request up.
func WaitSandbox(ctx context.Context, ui UI, c *client.Client, sb api.Sandbox, after int64, done func(api.Sandbox) bool) (api.Sandbox, error) {
	was, vmid := sb.State, fmt.Sprint(sb.VMID)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	began, last := time.Now(), "sandbox "+sb.Name+" is "+sb.State
	quiet := func() {
		ui.Progressf("%s  still waiting, for %s: %s", time.Now().Local().Format("15:04:05"), time.Since(began).Round(time.Second), last)
	}
	for e, err := range WhenQuiet(c.FollowEvents(ctx, client.EventQuery{Sandbox: vmid, After: after}), quietAfter, quiet) {
		if err != nil {
			return sb, err
		}
		ui.ShowEvent(e)
		last = LastOf(e)
		if e.Kind != agentlab.EventSandboxState || passing(e) {
			continue
		}
		now, err := c.Sandbox(ctx, vmid)
		if err != nil {
			return sb, err
		}
		if done(now) {
			showLaterEvents(ctx, ui, c, now, e.ID)
			return now, nil
		}
		if err := Refusal(e); err != nil {
			return now, err
		}
		// A sandbox can be destroyed in every state.
		if now.State != was && !done(api.Sandbox{State: string(agentlab.SandboxDestroyed)}) {
			if err := SandboxFailed(now); err != nil {
				return now, err
			}
		}
		if err := Replaced(sb, now); err != nil {
			return now, err
		}
	}
	return sb, context.Cause(ctx)
}

// LastOf describes the event after which a wait continues.
func LastOf(e api.Event) string {
	if image, ok := e.Data["image"].(string); ok && e.Kind == agentlab.EventImageBuild {
		return agentlab.WithoutControls("image " + image + " is built, once: " + e.Message)
	}
	return agentlab.WithoutControls(e.Message)
}

// quietAfter is the time without an event after which a wait prints that it continues.
const quietAfter = 20 * time.Second

// WhenQuiet returns a sequence with the same elements, and calls quiet whenever none has
// come for a while.
func WhenQuiet[T any](seq iter.Seq2[T, error], after time.Duration, quiet func()) iter.Seq2[T, error] {
	type element struct {
		v   T
		err error
	}
	return func(yield func(T, error) bool) {
		elements, stop := make(chan element), make(chan struct{})
		defer close(stop)
		go func() {
			defer close(elements)
			for v, err := range seq {
				select {
				case elements <- element{v, err}:
				case <-stop:
					return
				}
			}
		}()
		tick := time.NewTicker(after)
		defer tick.Stop()
		for {
			select {
			case e, ok := <-elements:
				if !ok || !yield(e.v, e.err) {
					return
				}
				tick.Reset(after)
			case <-tick.C:
				quiet()
			}
		}
	}
}

// Replaced returns an error if another request has changed what was requested. A
// sandbox that will be destroyed has an event with the reason soon.
func Replaced(asked, now api.Sandbox) error {
	was, is := agentlab.Desired(asked.Desired), agentlab.Desired(now.Desired)
	if is == was || is == agentlab.DesiredDestroyed || was.Suspended() && is.Suspended() {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s (%d) is %s: another request, or its guest, has changed what it does next", now.Name, now.VMID, now.State).
		WithHint("see 'agentlab sandbox show %d'", now.VMID)
}

// passing reports whether an event is about a state in which no command waits for
// a sandbox to arrive, and which another event follows.
func passing(e api.Event) bool {
	switch to, _ := e.Data["to"].(string); agentlab.SandboxState(to) {
	case agentlab.SandboxProvisioning, agentlab.SandboxBooting:
		return true
	}
	return false
}

// Refusal returns the error of the event of a request that the daemon gave up,
// nil for another event.
func Refusal(e api.Event) error {
	if _, refused := e.Data["refused"]; !refused {
		return nil
	}
	code, _ := e.Data["code"].(string)
	hint, _ := e.Data["hint"].(string)
	return agentlab.Errorf(agentlab.Code(code), "%s", agentlab.WithoutControls(e.Message)).WithHint("%s", agentlab.WithoutControls(hint))
}

// SandboxFailed returns an error if a sandbox has ended.
func SandboxFailed(sb api.Sandbox) error {
	switch agentlab.SandboxState(sb.State) {
	case agentlab.SandboxFailed, agentlab.SandboxTimeout, agentlab.SandboxDestroyed:
	default:
		return nil
	}
	text := fmt.Sprintf("sandbox %s is %s", sb.Name, sb.State)
	if sb.Reason != "" {
		text += ": " + agentlab.WithoutControls(sb.Reason)
	}
	err := agentlab.Errorf(agentlab.CodeUnavailable, "%s", text)
	if sb.State == string(agentlab.SandboxDestroyed) || sb.Desired == string(agentlab.DesiredDestroyed) { // it has no log
		return err.WithHint("see 'agentlab sandbox show %d'", sb.VMID)
	}
	if sb.BootedAt == nil && sb.WorkspaceID != "" { // its VM may never have existed
		return err.WithHint("check its workspace after 'agentlab sandbox destroy %d': 'agentlab workspace check %[2]s', then 'agentlab workspace fsck %[2]s'", sb.VMID, sb.WorkspaceID)
	}
	return err.WithHint("see 'agentlab sandbox logs %[1]d', then 'agentlab sandbox destroy %[1]d'", sb.VMID)
}

// showLaterEvents shows the events of a sandbox after the given ID. The state of the
// sandbox was read later than that event.
func showLaterEvents(ctx context.Context, ui UI, c *client.Client, sb api.Sandbox, after int64) {
	list, err := c.Events(ctx, client.EventQuery{Sandbox: fmt.Sprint(sb.VMID), After: after})
	if err != nil {
		return // the sandbox is in the requested state all the same
	}
	for _, e := range list.Items {
		ui.ShowEvent(e)
	}
}

// ChangeRequest is a requested change of a sandbox.
type ChangeRequest struct {
	Sb    api.Sandbox
	After int64 // the newest event before the request
	Err   error
}

// RequestChange requests a change of a sandbox. With wait, it first reads the ID of the
// last event. A caller without the right to read events can still request.
func RequestChange(ctx context.Context, c *client.Client, sandbox string, wait bool, request func(context.Context, string) (api.Sandbox, error)) ChangeRequest {
	var r ChangeRequest
	var unread error
	if wait {
		r.After, unread = LastEvent(ctx, c, sandbox)
	}
	if r.Sb, r.Err = request(ctx, sandbox); r.Err == nil {
		r.Err = unread
	}
	return r
}

// SleepOr waits, or returns the error of an ended context.
func SleepOr(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// WaitWorkspace shows the events of a workspace after the given ID until it is in one
// of the states want.
func WaitWorkspace(ctx context.Context, ui UI, c *client.Client, w api.Workspace, after int64, want []agentlab.WorkspaceState) (api.Workspace, error) {
	for e, err := range c.FollowEvents(ctx, client.EventQuery{Kind: agentlab.EventWorkspaceState, After: after}) {
		if err != nil {
			return w, err
		}
		if e.Data["workspace"] != w.ID {
			continue
		}
		ui.ShowEvent(e)
		if err := Refusal(e); err != nil {
			return w, err
		}
		text, _ := e.Data["state"].(string)
		state := agentlab.WorkspaceState(text)
		switch {
		case slices.Contains(want, state):
			w.State = text
			if state == agentlab.WorkspaceDeleted {
				return w, nil
			}
			return c.Workspace(ctx, w.ID)
		case state == agentlab.WorkspaceFailed:
			return w, agentlab.Errorf(agentlab.CodeUnavailable, "%s", agentlab.WithoutControls(e.Message)).WithHint("see 'agentlab workspace check %s'", w.ID)
		}
	}
	return w, context.Cause(ctx)
}
