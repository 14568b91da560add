package workspace

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// A sandbox gets the lease of its workspace, or a place in the queue for it, in the
// transaction that creates its row. The lease ends after the volume is detached, at
// the latest in the transaction that makes the sandbox DESTROYED, and the same
// transaction gives the workspace to the next one in the queue. So a volume is never
// attached to two sandboxes.

const (
	// workspaceLook is the interval in which a sandbox looks whether its workspace can
	// be attached.
	workspaceLook = time.Second
	// unmountTimeout limits how long a guest may take to write its workspace, and
	// lastTimeout how long one whose sandbox is destroyed.
	unmountTimeout = 5 * time.Minute
	lastTimeout    = 30 * time.Second
	// powerOffGrace is how long a guest that does not unmount the workspace may take to
	// power off.
	powerOffGrace = 10 * time.Second
	// silencePause is the pause after a guest has not unmounted a workspace that cannot
	// be attached.
	silencePause = time.Minute
)

// Attach gives an existing sandbox a workspace. Codes: not_found, conflict,
// invalid, unsupported.
func (s *Service) Attach(ctx context.Context, vmid int, sel agentlab.WorkspaceSelection) (agentlab.Sandbox, error) {
	none := agentlab.Sandbox{}
	sb, err := s.cfg.Leases.Sandbox(ctx, vmid)
	if err == nil {
		err = s.core.Reachable(sb)
	}
	if err == nil && sb.Salvage {
		err = sandbox.OnlyKept(sb)
	}
	if err != nil {
		return none, err
	}
	switch sb.State {
	case agentlab.SandboxStopped:
	case agentlab.SandboxReady, agentlab.SandboxRunning, agentlab.SandboxCompleted:
		if !s.core.On(sb).Can().VolumeHotplug {
			return none, sandbox.Conflict(sb, "and backend "+sb.Backend+" attaches workspaces to stopped sandboxes only", "stop it first: agentlab sandbox stop %s", sb.Name)
		}
	default:
		return none, sandbox.Conflict(sb, "and cannot get a workspace", "a READY, RUNNING, COMPLETED or STOPPED sandbox can")
	}
	sel.Create, sel.Ensure = false, false
	use, err := s.Select(ctx, sel)
	if err != nil {
		return none, err
	}
	if sb, err = s.cfg.Leases.AttachWorkspace(ctx, vmid, use, "", nil); err == nil {
		s.withState(vmid, func(m *attachState) { m.mounted = "" }) // also if it has it: the guest mounts it once more
		s.core.Wake(vmid)
	}
	return sb, err
}

// workspace returns the workspace and the lease of a sandbox when it can be attached.
// wait is why not yet.
func (s *Service) workspace(ctx context.Context, sb agentlab.Sandbox) (v agentlab.Workspace, l agentlab.WorkspaceLease, wait string, err error) {
	l, ok, err := s.cfg.Leases.WorkspaceLease(ctx, sb.UID)
	if err == nil && !ok {
		err = sandbox.Permanent{Err: agentlab.Errorf(agentlab.CodeConflict, "its lease of the workspace has ended")}
	}
	if err != nil {
		return v, l, "", err
	}
	if v, err = s.cfg.Store.Workspace(ctx, l.WorkspaceID); err != nil {
		return v, l, "", err
	}
	switch {
	case !l.Acquired() && !s.clock().Before(l.WaitUntil):
		err = sandbox.Permanent{Err: s.notFree(ctx, v, l)}
	case !l.Acquired():
		wait = fmt.Sprintf("workspace %s is used by %s", v.Name, s.holder(ctx, v))
	case v.State == agentlab.WorkspaceFailed || !v.State.Live():
		err = sandbox.Permanent{Err: agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s: %s", v.Name, v.State, v.Reason)}
	case v.State != agentlab.WorkspaceReady:
		wait = fmt.Sprintf("workspace %s is %s", v.Name, v.State)
	default:
		wait, err = s.cfg.Leases.WorkspaceBusy(ctx, v)
	}
	return v, l, wait, err
}

// notFree is the error for a sandbox that has waited too long for a workspace.
func (s *Service) notFree(ctx context.Context, v agentlab.Workspace, l agentlab.WorkspaceLease) error {
	return agentlab.Errorf(agentlab.CodeTimeout, "workspace %s was not free within %s: it is used by %s", v.Name, agentlab.FormatTTL(l.WaitUntil.Sub(l.RequestedAt)), s.holder(ctx, v))
}

// holder describes the sandbox that has a workspace.
func (s *Service) holder(ctx context.Context, v agentlab.Workspace) string {
	leases, err := s.cfg.Leases.WorkspaceLeases(ctx, v.ID)
	if err == nil && len(leases) > 0 && leases[0].Acquired() {
		if sb, err := s.cfg.Leases.Sandbox(ctx, leases[0].VMID); err == nil && sb.UID == leases[0].UID {
			return "sandbox " + sb.Name
		}
	}
	return "another sandbox"
}

// Await implements sandbox.Workspaces.
func (s *Service) Await(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, done bool, err error) {
	s.withState(sb.VMID, func(m *attachState) { m.awaited = sb.Workspace })
	_, l, wait, err := s.workspace(ctx, sb)
	if refused, ok := errors.AsType[sandbox.Permanent](err); ok {
		return 0, false, s.core.MarkFailed(ctx, sb, "%w", refused.Err)
	}
	if err != nil {
		return 0, true, err
	}
	if wait == "" {
		return 0, false, s.core.Transition(ctx, sb, agentlab.SandboxProvisioning, "")
	}
	if text := "waits: " + wait; sb.Waiting != text {
		s.core.SetWaiting(ctx, sb, text, nil)
	}
	again = workspaceLook
	if !l.Acquired() { // the end of the other lease runs the step
		again = max(min(l.WaitUntil.Sub(s.clock()), sandbox.MaxIdle), time.Millisecond)
	}
	return again, true, nil
}

// attachState is the state in memory for a sandbox with a workspace. It may be lost.
type attachState struct {
	awaited string // ID of the workspace that the step of a REQUESTED sandbox waits for
	mounted string // ID of the workspace that its guest has mounted, as far as this process knows
	off     bool   // this process has powered off its VM to destroy it
}

// withState calls fn with the state of a sandbox. It holds the lock during the call.
func (s *Service) withState(vmid int, fn func(*attachState)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.attached[vmid] == nil {
		s.attached[vmid] = &attachState{}
	}
	fn(s.attached[vmid])
}

// stateOf returns the state of a sandbox.
func (s *Service) stateOf(vmid int) attachState {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.attached[vmid]; m != nil {
		return *m
	}
	return attachState{}
}

// sandboxChanged updates the state of a sandbox whose row has changed.
func (s *Service) sandboxChanged(sb agentlab.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.attached[sb.VMID]
	switch {
	case m == nil:
	case sb.State == agentlab.SandboxDestroyed:
		delete(s.attached, sb.VMID)
	default:
		if sb.State != agentlab.SandboxRequested {
			m.awaited = ""
		}
		if !sb.State.HasVM() {
			m.mounted = ""
		}
	}
}

// wakeWaiting runs the steps of the sandboxes that wait for a workspace.
func (s *Service) wakeWaiting(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for vmid, m := range s.attached {
		if m.awaited == id {
			s.core.Wake(vmid)
		}
	}
}

// AttachVolume implements sandbox.Workspaces.
func (s *Service) AttachVolume(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.Workspace == "" {
		return nil
	}
	v, _, wait, err := s.workspace(ctx, sb)
	if err == nil && wait != "" {
		err = agentlab.Errorf(agentlab.CodeUnavailable, "%s", wait)
	}
	if err != nil {
		return err
	}
	return s.attachVolume(ctx, sb, v)
}

func (s *Service) attachVolume(ctx context.Context, sb agentlab.Sandbox, v agentlab.Workspace) error {
	d, err := s.core.On(sb).NeedVolumes()
	if err != nil {
		return err
	}
	if err := d.AttachVolume(ctx, backend.RefOf(sb), backend.VolumeRefOf(v)); err != nil {
		return agentlab.Errorf(agentlab.CodeOf(err), "workspace %s cannot be attached: %w", v.Name, err)
	}
	return nil
}

// Mount makes the guest mount the volume, with a new file system until a
// guest has mounted it once.
func (s *Service) Mount(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.Workspace == "" || sb.Profile == agentlab.ProfileDisk {
		return nil
	}
	v, err := s.cfg.Store.Workspace(ctx, sb.Workspace)
	if err != nil {
		return err
	}
	answered := s.core.Asking(sb.VMID)
	_, err = s.core.Control(sb).Mount(ctx, guestapi.WorkspaceRequest{Format: !v.Formatted, Bytes: int64(v.SizeGB) << 30})
	answered()
	switch agentlab.CodeOf(err) {
	case "":
	case agentlab.CodeConflict, agentlab.CodeNotFound, agentlab.CodeInternal, agentlab.CodeInvalid, agentlab.CodeUnsupported, agentlab.CodeDenied:
		return sandbox.Permanent{Err: agentlab.Errorf(agentlab.CodeOf(err), "workspace %s cannot be mounted: %w", v.Name, err)}
	default:
		return err
	}
	if !v.Formatted {
		_, err = s.cfg.Store.UpdateWorkspace(ctx, v.ID, agentlab.WorkspaceQuota{}, func(now *agentlab.Workspace) ([]agentlab.Event, error) {
			now.Formatted = true
			return nil, nil
		})
	}
	if err == nil {
		s.withState(sb.VMID, func(m *attachState) { m.mounted = v.ID })
	}
	return err
}

// Supervise attaches the workspace that a running sandbox got, if it has
// it not yet. A workspace that cannot be attached is given back, but not while the
// guest uses it.
func (s *Service) Supervise(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, err error) {
	if sb.Workspace == s.stateOf(sb.VMID).mounted || sb.Profile == agentlab.ProfileDisk {
		return 0, nil
	}
	v, l, wait, err := s.workspace(ctx, sb)
	if err == nil && wait != "" {
		if !l.Acquired() {
			return max(min(l.WaitUntil.Sub(s.clock()), sandbox.MaxIdle), time.Millisecond), nil
		}
		return workspaceLook, nil
	}
	if err == nil {
		err = s.attachVolume(ctx, sb, v)
	}
	if err == nil {
		err = s.Mount(ctx, sb)
	}
	if err == nil {
		return 0, s.cfg.Store.AppendEvents(ctx, s.mountedEvent(sb, v))
	}
	if _, refused := errors.AsType[sandbox.Permanent](err); !refused && backend.IsTransient(err) || ctx.Err() != nil {
		return 0, err
	}
	cause := err
	if l.Acquired() { // an earlier process may have attached it
		if err := s.unmount(ctx, sb, lastTimeout); err != nil {
			s.log.Warn("a workspace cannot be attached, and its guest has not unmounted it", "vmid", sb.VMID, "workspace", v.ID, "cause", cause, "err", err)
			return silencePause, ctx.Err()
		}
	}
	if ended, err := s.endJobWithout(ctx, sb, v, l, cause); ended || err != nil {
		return 0, err
	}
	if err := s.detachVolume(ctx, sb, v); err != nil {
		return 0, errors.Join(cause, err)
	}
	if err := s.cfg.Leases.ReleaseWorkspace(ctx, l.Nonce); err != nil {
		return 0, err
	}
	return 0, s.cfg.Store.AppendEvents(ctx, s.workspaceEvent(sb, v, cause, "was not attached to sandbox %s", sb.Name))
}

// mountedEvent is the event of a workspace that a running guest has mounted. Clients
// wait for it.
func (s *Service) mountedEvent(sb agentlab.Sandbox, v agentlab.Workspace) agentlab.Event {
	return sandbox.NewEvent(agentlab.EventWorkspaceLease, sb, map[string]any{"workspace": v.ID, "name": v.Name, "mounted": true}, "workspace %s is mounted in sandbox %s", v.Name, sb.Name)
}

// workspaceEvent is an event about the workspace of a sandbox. cause is why a request
// was given up; nil if it was not.
func (s *Service) workspaceEvent(sb agentlab.Sandbox, v agentlab.Workspace, cause error, format string, args ...any) agentlab.Event {
	data := map[string]any{"workspace": v.ID, "name": v.Name}
	text := fmt.Sprintf("workspace %s ", v.Name) + fmt.Sprintf(format, args...)
	if cause != nil {
		why := agentlab.Reason(cause.Error())
		sandbox.Refused(data, why, cause, agentlab.HintOf(cause))
		text += ": " + why
	}
	return sandbox.NewEvent(agentlab.EventWorkspaceLease, sb, data, "%s", text)
}

func (s *Service) detachVolume(ctx context.Context, sb agentlab.Sandbox, v agentlab.Workspace) error {
	d, err := s.core.On(sb).NeedVolumes()
	if err != nil {
		return err
	}
	return d.DetachVolume(ctx, backend.RefOf(sb), backend.VolumeRefOf(v))
}

// unmount makes the guest write and unmount the workspace.
func (s *Service) unmount(ctx context.Context, sb agentlab.Sandbox, limit time.Duration) error {
	if sb.State == agentlab.SandboxSuspended {
		return s.core.OfSession(ctx, sb, sandbox.Conflict(sb, "and its guest cannot unmount the workspace", "resume it first: agentlab sandbox resume %s", sb.Name))
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	defer s.core.Asking(sb.VMID)()
	return s.core.Control(sb).Unmount(ctx)
}

// freeze makes the guest of the sandbox with that lease write its workspace, and change
// nothing on it until thaw is called, for at most limit. thaw returns an error unless the
// guest has changed nothing until then, as it says; it is called once.
func (s *Service) freeze(ctx context.Context, l agentlab.WorkspaceLease, limit time.Duration) (thaw func(context.Context) error, err error) {
	sb, err := s.cfg.Leases.Sandbox(ctx, l.VMID)
	switch {
	case err != nil:
		return nil, err
	case sb.UID != l.UID:
		return nil, agentlab.Errorf(agentlab.CodeConflict, "its sandbox no longer exists")
	case !sb.State.HasVM() || sb.State == agentlab.SandboxSuspended:
		return nil, sandbox.Conflict(sb, "and its guest cannot freeze the workspace", "a running one can")
	}
	guest := s.core.Control(sb)
	if err := guest.Freeze(ctx, limit); err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		held, err := guest.Thaw(ctx)
		if err == nil && !held {
			err = agentlab.Errorf(agentlab.CodeConflict, "it was thawed before it was saved")
		}
		return err
	}, nil
}

// UnmountLast makes the guest of a sandbox that is destroyed write its workspace. If
// its processes still use it, the guest is shut down, which ends them.
func (s *Service) UnmountLast(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.Workspace == "" || !s.mayRun(sb) || sb.State == agentlab.SandboxSuspended || s.stateOf(sb.VMID).off {
		return nil
	}
	err := s.unmount(ctx, sb, lastTimeout)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	if agentlab.CodeOf(err) != agentlab.CodeBusy { // the guest does not answer, or never had it
		s.log.Warn("the guest of a sandbox that is destroyed has not unmounted its workspace", "vmid", sb.VMID, "err", err)
	}
	if err := s.core.PowerOff(ctx, sb, powerOffGrace); err != nil {
		return err
	}
	s.withState(sb.VMID, func(m *attachState) { m.off = true })
	return nil
}

// mayRun reports whether the guest of a sandbox may run. That of a job that has failed
// or reached its time limit does until this process has powered it off.
func (s *Service) mayRun(sb agentlab.Sandbox) bool {
	ended := sb.State == agentlab.SandboxFailed || sb.State == agentlab.SandboxTimeout
	return sb.State.HasVM() || ended && !s.core.Inspected(sb.VMID)
}

// Return ends the lease of a sandbox whose VM is off and that has FAILED or
// reached the end of its lease: others may use the workspace.
func (s *Service) Return(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.Workspace == "" {
		return nil
	}
	l, ok, err := s.cfg.Leases.WorkspaceLease(ctx, sb.UID)
	if err != nil || !ok {
		return err
	}
	now, err := s.cfg.Leases.Sandbox(ctx, sb.VMID) // after the lease: Continue gives that another nonce
	if err != nil || now.State != sb.State {
		return err
	}
	v, err := s.cfg.Store.Workspace(ctx, l.WorkspaceID)
	if err != nil {
		return err
	}
	if err := s.detachVolume(ctx, sb, v); err != nil {
		return err
	}
	return s.cfg.Leases.ReleaseWorkspace(ctx, l.Nonce)
}

// AcquiredAt implements sandbox.Workspaces.
func (s *Service) AcquiredAt(ctx context.Context, sb agentlab.Sandbox) (time.Time, error) {
	l, _, err := s.cfg.Leases.WorkspaceLease(ctx, sb.UID)
	return l.AcquiredAt, err
}
