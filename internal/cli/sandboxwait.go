package cli

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func isUp(sb api.Sandbox) bool {
	switch agentlab.SandboxState(sb.State) {
	case agentlab.SandboxReady, agentlab.SandboxRunning, agentlab.SandboxCompleted:
		return true
	}
	return false
}

func isOnDisk(sb api.Sandbox) bool { return sb.OnDisk }

func isStopped(sb api.Sandbox) bool { return sb.State == string(agentlab.SandboxStopped) }

func isDestroyed(sb api.Sandbox) bool { return sb.State == string(agentlab.SandboxDestroyed) }

// isKept reports whether a sandbox is off and only kept for the work of its job.
func isKept(sb api.Sandbox) bool { return sb.Salvage && sb.State == string(agentlab.SandboxStopped) }

// lastEvent returns the ID of the newest event about a sandbox, 0 if there is
// none. Events of a later request have larger IDs.
func lastEvent(ctx context.Context, c *client.Client, sandbox string) (int64, error) {
	list, err := c.Events(ctx, client.EventQuery{Sandbox: sandbox, Limit: 1})
	if err != nil || len(list.Items) == 0 {
		return 0, err
	}
	return list.Items[len(list.Items)-1].ID, nil
}

// lastSessionEvent returns the ID of the newest event about the current sandbox of a
// session; 0 if it has none, or if that cannot be read.
func lastSessionEvent(ctx context.Context, c *client.Client, session string) int64 {
	s, err := c.Session(ctx, session)
	if err != nil {
		return 0
	}
	return lastSandboxEvent(ctx, c, s)
}

// lastSandboxEvent is lastSessionEvent of a session that has been read.
func lastSandboxEvent(ctx context.Context, c *client.Client, s api.Session) int64 {
	if s.SandboxVMID == 0 {
		return 0
	}
	after, err := lastEvent(ctx, c, fmt.Sprint(s.SandboxVMID))
	if err != nil {
		return 0
	}
	return after
}

// waitSandbox shows the events of a sandbox until done holds. after is the ID of
// the newest event before the request that returned sb, 0 if that created it.
// It returns an error if the sandbox enters a state that done cannot follow,
// unless it was in that state before, and if the daemon gave the request up.
func (a *App) waitSandbox(ctx context.Context, c *client.Client, sb api.Sandbox, after int64, done func(api.Sandbox) bool) (api.Sandbox, error) {
	was, vmid := sb.State, fmt.Sprint(sb.VMID)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	began, last := time.Now(), "sandbox "+sb.Name+" is "+sb.State
	quiet := func() {
		a.Progressf("%s  still waiting, for %s: %s", time.Now().Local().Format("15:04:05"), time.Since(began).Round(time.Second), last)
	}
	for e, err := range whenQuiet(c.FollowEvents(ctx, client.EventQuery{Sandbox: vmid, After: after}), quietAfter, quiet) {
		if err != nil {
			return sb, err
		}
		a.ShowEvent(e)
		last = lastOf(e)
		if e.Kind != agentlab.EventSandboxState || passing(e) {
			continue
		}
		now, err := c.Sandbox(ctx, vmid)
		if err != nil {
			return sb, err
		}
		if done(now) {
			a.showLaterEvents(ctx, c, now, e.ID)
			return now, nil
		}
		if err := refusal(e); err != nil {
			return now, err
		}
		// A sandbox can be destroyed in every state.
		if now.State != was && !done(api.Sandbox{State: string(agentlab.SandboxDestroyed)}) {
			if err := sandboxFailed(now); err != nil {
				return now, err
			}
		}
		if err := replaced(sb, now); err != nil {
			return now, err
		}
	}
	return sb, context.Cause(ctx)
}

// lastOf describes the event after which a wait continues.
func lastOf(e api.Event) string {
	if image, ok := e.Data["image"].(string); ok && e.Kind == agentlab.EventImageBuild {
		return agentlab.WithoutControls("image " + image + " is built, once: " + e.Message)
	}
	return agentlab.WithoutControls(e.Message)
}

// quietAfter is the time without an event after which a wait prints that it continues.
const quietAfter = 20 * time.Second

// whenQuiet returns a sequence with the same elements, and calls quiet whenever none has
// come for a while.
func whenQuiet[T any](seq iter.Seq2[T, error], after time.Duration, quiet func()) iter.Seq2[T, error] {
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

// replaced returns an error if another request has changed what was requested. A
// sandbox that will be destroyed has an event with the reason soon.
func replaced(asked, now api.Sandbox) error {
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

// refusal returns the error of the event of a request that the daemon gave up,
// nil for another event.
func refusal(e api.Event) error {
	if _, refused := e.Data["refused"]; !refused {
		return nil
	}
	code, _ := e.Data["code"].(string)
	hint, _ := e.Data["hint"].(string)
	return agentlab.Errorf(agentlab.Code(code), "%s", agentlab.WithoutControls(e.Message)).WithHint("%s", agentlab.WithoutControls(hint))
}

// sandboxFailed returns an error if a sandbox has ended.
func sandboxFailed(sb api.Sandbox) error {
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

// ShowEvent prints an event on standard error, unless it is of a brief command's routine.
func (a *App) ShowEvent(e api.Event) {
	a.shown = e.ID
	if a.brief && isRoutine(e) {
		return
	}
	a.Progressf("%s  %s", e.Time.Local().Format("15:04:05"), agentlab.WithoutControls(e.Message))
}

// isRoutine reports whether an event is one of each start of a sandbox. The error of a wait
// has the reason of a failure.
func isRoutine(e api.Event) bool {
	_, refused := e.Data["refused"]
	return e.Kind == agentlab.EventSession || e.Kind == agentlab.EventSandboxNested || e.Kind == agentlab.EventSandboxState && !refused
}

// showLaterEvents shows the events of a sandbox after the given ID. The state of the
// sandbox was read later than that event.
func (a *App) showLaterEvents(ctx context.Context, c *client.Client, sb api.Sandbox, after int64) {
	list, err := c.Events(ctx, client.EventQuery{Sandbox: fmt.Sprint(sb.VMID), After: after})
	if err != nil {
		return // the sandbox is in the requested state all the same
	}
	for _, e := range list.Items {
		a.ShowEvent(e)
	}
}

// changeRequest is a requested change of a sandbox.
type changeRequest struct {
	sb    api.Sandbox
	after int64 // the newest event before the request
	err   error
}

// requestChange requests a change of a sandbox. With wait, it first reads the ID of the
// last event. A caller without the right to read events can still request.
func requestChange(ctx context.Context, c *client.Client, sandbox string, wait bool, request func(context.Context, string) (api.Sandbox, error)) changeRequest {
	var r changeRequest
	var unread error
	if wait {
		r.after, unread = lastEvent(ctx, c, sandbox)
	}
	if r.sb, r.err = request(ctx, sandbox); r.err == nil {
		r.err = unread
	}
	return r
}

// finishSandbox waits for a requested change and prints the outcome.
func (a *App) finishSandbox(ctx context.Context, c *client.Client, r changeRequest, wait bool, done func(api.Sandbox) bool) error {
	sb, err := r.sb, r.err
	if err == nil && wait && !done(sb) {
		sb, err = a.waitSandbox(ctx, c, sb, r.after, done)
	}
	if err != nil {
		return err
	}
	return a.done(sb, "sandbox %s (%d) is %s", sb.Name, sb.VMID, sb.State)
}

// destroySandboxes requests the destruction of all named sandboxes, then waits
// for each and prints its outcome. It continues after errors.
func (a *App) destroySandboxes(ctx context.Context, c *client.Client, names []string, wait, force, purge bool) error {
	requests := make([]changeRequest, len(names))
	call, done := c.DestroySandbox, func(sb api.Sandbox) bool { return isDestroyed(sb) || isKept(sb) }
	if purge {
		call, done = c.PurgeSandbox, isDestroyed
	}
	for i, name := range names {
		if purge {
			a.nameUnshipped(ctx, c, name)
		}
		requests[i] = requestChange(ctx, c, name, wait, call)
	}
	var failed error
	for i, r := range requests {
		if force && agentlab.CodeOf(r.err) == agentlab.CodeNotFound {
			if err := a.emit(map[string]any{"name": names[i], "exists": false}, silent); err != nil {
				return err
			}
			continue
		}
		err := a.finishSandbox(ctx, c, r, wait, done)
		if sb := r.sb; err == nil && sb.Salvage && !purge {
			a.Progressf("sandbox %s (%d) is kept until %s: its job has work that is not stored\n  → agentlab job salvage %s\n  → agentlab sandbox destroy --purge %[2]d",
				sb.Name, sb.VMID, localTime(sb.LeaseExpiresAt), sb.JobID)
		}
		switch {
		case err == nil:
		case ctx.Err() != nil:
			for _, r := range requests[i:] {
				if r.err == nil {
					a.Progressf("sandbox %s (%d) is still being destroyed\n  → agentlab sandbox show %d", r.sb.Name, r.sb.VMID, r.sb.VMID)
				}
			}
			return err
		case len(names) == 1:
			return err
		default:
			a.printError(err)
			failed = errors.Join(failed, statusError(exitFailure))
		}
	}
	return failed
}

// nameUnshipped prints which work of the job in a sandbox is not stored, before the
// sandbox is destroyed with it. What cannot be read is not printed.
func (a *App) nameUnshipped(ctx context.Context, c *client.Client, sandbox string) {
	sb, err := c.Sandbox(ctx, sandbox)
	if err != nil || sb.JobID == "" || isDestroyed(sb) {
		return
	}
	j, err := c.Job(ctx, sb.JobID)
	if err != nil {
		return
	}
	for _, e := range j.Events {
		if e.Kind == agentlab.EventJobUnshipped {
			a.Progressf("note: %s", agentlab.WithoutControls(e.Message))
		}
	}
	if j.FinishedAt != nil || j.StartedAt == nil {
		return
	}
	stored := "and has no checkpoint"
	if at := checkpointTime(j); at != "" {
		stored = "and has a checkpoint of " + at
	}
	a.Progressf("note: job %s is %s %s; other work on the disk of sandbox %s is deleted", j.ID, j.Status, stored, sb.Name)
}
