package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// A sandbox gets the lease of its workspace, or a place in the queue for it, in the
// transaction that creates its row. The lease ends after the volume is detached, at
// the latest in the transaction that makes the sandbox DESTROYED, and the same
// transaction gives the workspace to the next one in the queue. So a volume is never
// attached to two sandboxes.

// Workspaces selects the workspaces of new sandboxes; *workspace.Service implements it.
type Workspaces interface {
	// Select returns the workspace that a request wants, and if it must be created
	// also its row, which is not stored yet. Codes: not_found, exists, invalid, limit,
	// conflict, unsupported.
	Select(ctx context.Context, sel agentlab.WorkspaceSelection) (agentlab.WorkspaceUse, error)
}

const (
	// workspaceLook is the interval in which a sandbox looks whether its workspace can
	// be attached.
	workspaceLook = time.Second
	// unmountTimeout limits how long a guest may take to write its workspace, and
	// lastTimeout how long one whose sandbox is destroyed.
	unmountTimeout = 5 * time.Minute
	lastTimeout    = 30 * time.Second
)

// CheckWorkspace returns the error of Create for the workspace of a request, except that
// another sandbox has it. It changes nothing.
func (s *Service) CheckWorkspace(ctx context.Context, r agentlab.SandboxRequest) error {
	_, err := s.selectWorkspace(ctx, r, r.Backend)
	return err
}

// selectWorkspace returns the workspace of a new sandbox on a backend, "" for any; nil if it
// wants none.
func (s *Service) selectWorkspace(ctx context.Context, r agentlab.SandboxRequest, on string) (*agentlab.WorkspaceUse, error) {
	if r.Workspace == nil {
		return nil, nil //nolint:nilnil // no workspace is not an error
	}
	if r.From != "" || r.Fork != "" {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "a sandbox from a snapshot cannot be created with a workspace").WithField("workspace").
			WithHint("attach it when the sandbox is ready: agentlab workspace attach")
	}
	sel := *r.Workspace
	sel.Backend = on
	use, err := s.cfg.Workspaces.Select(ctx, sel)
	return &use, err
}

// maintain makes sb a maintenance sandbox if the request wants one. It gets nothing
// that its guest could tell others, and no way to do so.
func (s *Service) maintain(sb *agentlab.Sandbox, r agentlab.SandboxRequest) error {
	switch {
	case r.Maintenance == "":
		return nil
	case r.Workspace == nil && r.Fork == "":
		return agentlab.Errorf(agentlab.CodeInvalid, "a maintenance sandbox needs a workspace").WithField("workspace")
	case !s.on(*sb).Can().NetworkOff:
		return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s has no sandboxes without a network, which maintenance needs", sb.Backend).WithField("maintenance")
	case r.Maintenance == agentlab.MaintenanceSalvage && r.Fork != "": // with a runner, which uploads the work
	case r.Maintenance == agentlab.MaintenanceFiles:
		sb.Profile = agentlab.ProfileFiles
	case r.Maintenance == agentlab.MaintenanceDisk:
		sb.Profile = agentlab.ProfileDisk
	default:
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not %s or %s", r.Maintenance, agentlab.MaintenanceFiles, agentlab.MaintenanceDisk).WithField("maintenance")
	}
	sb.Network, sb.Keepalive = agentlab.Network{Mode: agentlab.NetworkOff}, false
	sb.Resources.Nested = agentlab.NestedOff
	return nil
}

// AttachWorkspace gives an existing sandbox a workspace. Codes: not_found, conflict,
// invalid, unsupported.
func (s *Service) AttachWorkspace(ctx context.Context, vmid int, sel agentlab.WorkspaceSelection) (agentlab.Sandbox, error) {
	none := agentlab.Sandbox{}
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err == nil {
		err = s.reachable(sb)
	}
	if err == nil && sb.Salvage {
		err = onlyKept(sb)
	}
	if err != nil {
		return none, err
	}
	switch sb.State {
	case agentlab.SandboxStopped:
	case agentlab.SandboxReady, agentlab.SandboxRunning, agentlab.SandboxCompleted:
		if !s.on(sb).Can().VolumeHotplug {
			return none, conflict(sb, "and backend "+sb.Backend+" attaches workspaces to stopped sandboxes only", "stop it first: agentlab sandbox stop %s", sb.Name)
		}
	default:
		return none, conflict(sb, "and cannot get a workspace", "a READY, RUNNING, COMPLETED or STOPPED sandbox can")
	}
	sel.Create, sel.Ensure = false, false
	use, err := s.cfg.Workspaces.Select(ctx, sel)
	if err != nil {
		return none, err
	}
	if sb, err = s.cfg.Store.AttachWorkspace(ctx, vmid, use, "", nil); err == nil {
		s.withState(vmid, func(m *runtimeState) { m.mounted = "" }) // also if it has it: the guest mounts it once more
		s.loop.Wake(vmid)
	}
	return sb, err
}

// errWorkspace is an error of a workspace that does not end by itself.
type errWorkspace struct{ error }

func (e errWorkspace) Unwrap() error { return e.error }

// workspace returns the workspace and the lease of a sandbox when it can be attached.
// wait is why not yet.
func (s *Service) workspace(ctx context.Context, sb agentlab.Sandbox) (v agentlab.Workspace, l agentlab.WorkspaceLease, wait string, err error) {
	l, ok, err := s.cfg.Store.WorkspaceLease(ctx, sb.UID)
	if err == nil && !ok {
		err = errWorkspace{agentlab.Errorf(agentlab.CodeConflict, "its lease of the workspace has ended")}
	}
	if err != nil {
		return v, l, "", err
	}
	if v, err = s.cfg.Store.Workspace(ctx, l.WorkspaceID); err != nil {
		return v, l, "", err
	}
	switch {
	case !l.Acquired() && !s.clock().Before(l.WaitUntil):
		err = errWorkspace{s.notFree(ctx, v, l)}
	case !l.Acquired():
		wait = fmt.Sprintf("workspace %s is used by %s", v.Name, s.holder(ctx, v))
	case v.State == agentlab.WorkspaceFailed || !v.State.Live():
		err = errWorkspace{agentlab.Errorf(agentlab.CodeConflict, "workspace %s is %s: %s", v.Name, v.State, v.Reason)}
	case v.State != agentlab.WorkspaceReady:
		wait = fmt.Sprintf("workspace %s is %s", v.Name, v.State)
	default:
		wait, err = s.cfg.Store.WorkspaceBusy(ctx, v)
	}
	return v, l, wait, err
}

// notFree is the error for a sandbox that has waited too long for a workspace.
func (s *Service) notFree(ctx context.Context, v agentlab.Workspace, l agentlab.WorkspaceLease) error {
	return agentlab.Errorf(agentlab.CodeTimeout, "workspace %s was not free within %s: it is used by %s", v.Name, agentlab.FormatTTL(l.WaitUntil.Sub(l.RequestedAt)), s.holder(ctx, v))
}

// holder describes the sandbox that has a workspace.
func (s *Service) holder(ctx context.Context, v agentlab.Workspace) string {
	leases, err := s.cfg.Store.WorkspaceLeases(ctx, v.ID)
	if err == nil && len(leases) > 0 && leases[0].Acquired() {
		if sb, err := s.cfg.Store.Sandbox(ctx, leases[0].VMID); err == nil && sb.UID == leases[0].UID {
			return "sandbox " + sb.Name
		}
	}
	return "another sandbox"
}

// awaitWorkspace ends the step of a REQUESTED sandbox until its workspace can be
// attached. The backend has nothing of the sandbox until then.
func (s *Service) awaitWorkspace(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, done bool, err error) {
	s.withState(sb.VMID, func(m *runtimeState) { m.awaited = sb.Workspace })
	_, l, wait, err := s.workspace(ctx, sb)
	if refused, ok := errors.AsType[errWorkspace](err); ok {
		return 0, false, s.markFailed(ctx, sb, "%w", refused.error)
	}
	if err != nil {
		return 0, true, err
	}
	if wait == "" {
		return 0, false, s.transition(ctx, sb, agentlab.SandboxProvisioning, "")
	}
	if text := "waits: " + wait; sb.Waiting != text {
		s.setWaiting(ctx, sb, text, nil)
	}
	again = workspaceLook
	if !l.Acquired() { // the end of the other lease runs the step
		again = max(min(l.WaitUntil.Sub(s.clock()), maxIdle), time.Millisecond)
	}
	return again, true, nil
}

// WorkspaceChanged runs the steps of the sandboxes that wait for a workspace.
func (s *Service) WorkspaceChanged(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for vmid, m := range s.states {
		if id != "" && m.awaited == id && m.state == agentlab.SandboxRequested {
			s.loop.Wake(vmid)
		}
	}
}

// LeaseChanged runs the step of the sandbox of the event of a lease. When a sandbox has
// got a workspace, it also runs those of the sandboxes that wait for it: they name it.
func (s *Service) LeaseChanged(e agentlab.Event) {
	s.Wake(e.SandboxVMID)
	var data struct {
		Workspace string             `json:"workspace"`
		Step      agentlab.LeaseStep `json:"step"`
	}
	if json.Unmarshal([]byte(e.Data), &data) == nil && data.Step == agentlab.LeaseStepAcquired {
		s.WorkspaceChanged(data.Workspace)
	}
}

// attachWorkspace attaches the volume of a sandbox that is about to start.
func (s *Service) attachWorkspace(ctx context.Context, sb agentlab.Sandbox) error {
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
	d, err := s.on(sb).NeedVolumes()
	if err != nil {
		return err
	}
	if err := d.AttachVolume(ctx, backend.RefOf(sb), backend.VolumeRefOf(v)); err != nil {
		return agentlab.Errorf(agentlab.CodeOf(err), "workspace %s cannot be attached: %w", v.Name, err)
	}
	return nil
}

// mountWorkspace makes the guest mount the volume, with a new file system until a
// guest has mounted it once.
func (s *Service) mountWorkspace(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.Workspace == "" || sb.Profile == agentlab.ProfileDisk {
		return nil
	}
	v, err := s.cfg.Store.Workspace(ctx, sb.Workspace)
	if err != nil {
		return err
	}
	answered := s.asking(sb.VMID)
	_, err = s.control(sb).Mount(ctx, guestapi.WorkspaceRequest{Format: !v.Formatted, Bytes: int64(v.SizeGB) << 30})
	answered()
	switch agentlab.CodeOf(err) {
	case "":
	case agentlab.CodeConflict, agentlab.CodeNotFound, agentlab.CodeInternal, agentlab.CodeInvalid, agentlab.CodeUnsupported, agentlab.CodeDenied:
		return errWorkspace{agentlab.Errorf(agentlab.CodeOf(err), "workspace %s cannot be mounted: %w", v.Name, err)}
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
		s.withState(sb.VMID, func(m *runtimeState) { m.mounted = v.ID })
	}
	return err
}

// superviseWorkspace attaches the workspace that a running sandbox got, if it has
// it not yet. A workspace that cannot be attached is given back, but not while the
// guest uses it.
func (s *Service) superviseWorkspace(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, err error) {
	mounted := ""
	s.withState(sb.VMID, func(m *runtimeState) { mounted = m.mounted })
	if sb.Workspace == mounted || sb.Profile == agentlab.ProfileDisk {
		return 0, nil
	}
	v, l, wait, err := s.workspace(ctx, sb)
	if err == nil && wait != "" {
		if !l.Acquired() {
			return max(min(l.WaitUntil.Sub(s.clock()), maxIdle), time.Millisecond), nil
		}
		return workspaceLook, nil
	}
	if err == nil {
		err = s.attachVolume(ctx, sb, v)
	}
	if err == nil {
		err = s.mountWorkspace(ctx, sb)
	}
	if err == nil {
		return 0, s.cfg.Store.AppendEvents(ctx, s.mountedEvent(sb, v))
	}
	if _, refused := errors.AsType[errWorkspace](err); !refused && backend.IsTransient(err) || ctx.Err() != nil {
		return 0, err
	}
	cause := err
	if l.Acquired() { // an earlier process may have attached it
		if err := s.unmount(ctx, sb, lastTimeout); err != nil {
			s.log.Warn("a workspace cannot be attached, and its guest has not unmounted it", "vmid", sb.VMID, "workspace", v.ID, "cause", cause, "err", err)
			return maxSilencePause, ctx.Err()
		}
	}
	if ended, err := s.endJobWithout(ctx, sb, v, l, cause); ended || err != nil {
		return 0, err
	}
	if err := s.detachVolume(ctx, sb, v); err != nil {
		return 0, errors.Join(cause, err)
	}
	if err := s.cfg.Store.ReleaseWorkspace(ctx, l.Nonce); err != nil {
		return 0, err
	}
	return 0, s.cfg.Store.AppendEvents(ctx, s.workspaceEvent(sb, v, cause, "was not attached to sandbox %s", sb.Name))
}

// mountedEvent is the event of a workspace that a running guest has mounted. Clients
// wait for it.
func (s *Service) mountedEvent(sb agentlab.Sandbox, v agentlab.Workspace) agentlab.Event {
	return event(agentlab.EventWorkspaceLease, sb, map[string]any{"workspace": v.ID, "name": v.Name, "mounted": true}, "workspace %s is mounted in sandbox %s", v.Name, sb.Name)
}

// workspaceEvent is an event about the workspace of a sandbox. cause is why a request
// was given up; nil if it was not.
func (s *Service) workspaceEvent(sb agentlab.Sandbox, v agentlab.Workspace, cause error, format string, args ...any) agentlab.Event {
	data := map[string]any{"workspace": v.ID, "name": v.Name}
	text := fmt.Sprintf("workspace %s ", v.Name) + fmt.Sprintf(format, args...)
	if cause != nil {
		why := agentlab.Reason(cause.Error())
		refused(data, why, cause, agentlab.HintOf(cause))
		text += ": " + why
	}
	return event(agentlab.EventWorkspaceLease, sb, data, "%s", text)
}

func (s *Service) detachVolume(ctx context.Context, sb agentlab.Sandbox, v agentlab.Workspace) error {
	d, err := s.on(sb).NeedVolumes()
	if err != nil {
		return err
	}
	return d.DetachVolume(ctx, backend.RefOf(sb), backend.VolumeRefOf(v))
}

// unmount makes the guest write and unmount the workspace.
func (s *Service) unmount(ctx context.Context, sb agentlab.Sandbox, limit time.Duration) error {
	if sb.State == agentlab.SandboxSuspended {
		return s.ofSession(ctx, sb, conflict(sb, "and its guest cannot unmount the workspace", "resume it first: agentlab sandbox resume %s", sb.Name))
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	defer s.asking(sb.VMID)()
	return s.control(sb).Unmount(ctx)
}

// FreezeWorkspace implements workspace.Guests.
func (s *Service) FreezeWorkspace(ctx context.Context, l agentlab.WorkspaceLease, limit time.Duration) (thaw func(context.Context) error, err error) {
	sb, err := s.cfg.Store.Sandbox(ctx, l.VMID)
	switch {
	case err != nil:
		return nil, err
	case sb.UID != l.UID:
		return nil, agentlab.Errorf(agentlab.CodeConflict, "its sandbox no longer exists")
	case !sb.State.HasVM() || sb.State == agentlab.SandboxSuspended:
		return nil, conflict(sb, "and its guest cannot freeze the workspace", "a running one can")
	}
	guest := s.control(sb)
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

// unmountLast makes the guest of a sandbox that is destroyed write its workspace. If
// its processes still use it, the guest is shut down, which ends them.
func (s *Service) unmountLast(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.Workspace == "" || !s.mayRun(sb) || sb.State == agentlab.SandboxSuspended || s.inspectedOff(sb.VMID) {
		return nil
	}
	err := s.unmount(ctx, sb, lastTimeout)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	if agentlab.CodeOf(err) != agentlab.CodeBusy { // the guest does not answer, or never had it
		s.log.Warn("the guest of a sandbox that is destroyed has not unmounted its workspace", "vmid", sb.VMID, "err", err)
	}
	if err := s.powerOff(ctx, sb, timeoutGrace); err != nil {
		return err
	}
	s.withState(sb.VMID, func(m *runtimeState) { m.off = true })
	return nil
}

// mayRun reports whether the guest of a sandbox may run. That of a job that has failed
// or reached its time limit does until this process has powered it off.
func (s *Service) mayRun(sb agentlab.Sandbox) bool {
	ended := sb.State == agentlab.SandboxFailed || sb.State == agentlab.SandboxTimeout
	return sb.State.HasVM() || ended && !s.inspected(sb.VMID)
}

// inspectedOff reports whether this process has powered off the VM of a sandbox to
// destroy it.
func (s *Service) inspectedOff(vmid int) (off bool) {
	s.withState(vmid, func(m *runtimeState) { off = m.off })
	return off
}

// returnWorkspace ends the lease of a sandbox whose VM is off and that has FAILED or
// reached the end of its lease: others may use the workspace.
func (s *Service) returnWorkspace(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.Workspace == "" {
		return nil
	}
	l, ok, err := s.cfg.Store.WorkspaceLease(ctx, sb.UID)
	if err != nil || !ok {
		return err
	}
	now, err := s.cfg.Store.Sandbox(ctx, sb.VMID) // after the lease: Continue gives that another nonce
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
	return s.cfg.Store.ReleaseWorkspace(ctx, l.Nonce)
}
