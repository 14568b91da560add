package sandbox

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// Plan checks a request and returns the sandbox that Create would store,
// without a number, and its profile. It stores nothing.
func (s *Service) Plan(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, agentlab.Profile, error) {
	sb, prof, err := s.plan(ctx, r, nil)
	if err == nil {
		err = s.CheckPlan(ctx, r, sb, prof)
	}
	return sb, prof, err
}

// CheckPlan returns an error if the host or the vault does not have what a planned
// sandbox needs. The secrets of a job are checked when it gets them, and a copy has those
// of its source.
func (s *Core) CheckPlan(ctx context.Context, r agentlab.SandboxRequest, sb agentlab.Sandbox, prof agentlab.Profile) error {
	if err := s.checkNested(ctx, sb); err != nil {
		return err
	}
	if s.cfg.Secrets == nil || prof.SecretsBundle == "" || r.JobID != "" || r.From+r.Fork+r.Maintenance != "" {
		return nil
	}
	return s.cfg.Secrets.Exists(ctx, prof.SecretsBundle)
}

// plan is Plan for a sandbox from a snapshot; nil means from its image.
func (s *Service) plan(ctx context.Context, r agentlab.SandboxRequest, from *agentlab.Snapshot) (agentlab.Sandbox, agentlab.Profile, error) {
	if r.Name != "" {
		if err := agentlab.ValidateName(r.Name); err != nil {
			return agentlab.Sandbox{}, agentlab.Profile{}, err
		}
	}
	prof, err := s.profileFor(r, from)
	if err != nil {
		return agentlab.Sandbox{}, prof, err
	}
	on, err := s.backendFor(ctx, r, prof, from)
	if err != nil {
		return agentlab.Sandbox{}, prof, err
	}
	return s.planOn(on, r, prof, from)
}

// PlanImage is Plan for a request without a name, a snapshot and a workspace.
func (s *Core) PlanImage(r agentlab.SandboxRequest) (agentlab.Sandbox, agentlab.Profile, error) {
	prof, err := s.profileFor(r, nil)
	if err != nil {
		return agentlab.Sandbox{}, prof, err
	}
	b, err := s.cfg.Fleet.Choose(cmp.Or(r.Backend, prof.Backend))
	if err != nil {
		return agentlab.Sandbox{}, prof, err
	}
	return s.planOn(b.Name(), r, prof, nil)
}

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
		return nil, nil
	}
	if r.From != "" || r.Fork != "" {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "a sandbox from a snapshot cannot be created with a workspace").WithField("workspace").
			WithHint("attach it when the sandbox is ready: agentlab workspace attach")
	}
	sel := *r.Workspace
	sel.Backend = on
	use, err := s.workspaces.Select(ctx, sel)
	return &use, err
}

// backendFor returns the name of the backend of a new sandbox: of its snapshot or its
// workspace, else of the request, the profile or the default. The error has code conflict
// if the request names another one than its snapshot or workspace has.
func (s *Service) backendFor(ctx context.Context, r agentlab.SandboxRequest, prof agentlab.Profile, from *agentlab.Snapshot) (string, error) {
	b, err := s.cfg.Fleet.Choose(cmp.Or(r.Backend, prof.Backend))
	switch {
	case err != nil:
		return "", err
	case from != nil && r.Backend != "" && r.Backend != from.Backend:
		return "", agentlab.Errorf(agentlab.CodeConflict, "the snapshot is on backend %s, and the request names %s", from.Backend, r.Backend).WithField("backend").
			WithHint("remove --backend")
	case from != nil:
		return from.Backend, s.cfg.Fleet.Of(from.Backend).Missing()
	case r.Workspace != nil:
		sel := *r.Workspace
		sel.Backend = r.Backend
		use, err := s.workspaces.Select(ctx, sel)
		if err == nil && use.New == nil {
			return use.Backend, nil
		} // its error is reported when the rest of the request has been checked
	}
	return b.Name(), nil
}

// profileFor returns the profile of a new sandbox.
func (s *Core) profileFor(r agentlab.SandboxRequest, from *agentlab.Snapshot) (agentlab.Profile, error) {
	profile := s.cfg.DefaultProfile
	if from != nil {
		profile = from.Profile
	}
	return s.cfg.Profiles.Use(cmp.Or(r.Profile, profile))
}

// planOn is plan for a backend and a profile, without the check of the name.
func (s *Core) planOn(on string, r agentlab.SandboxRequest, prof agentlab.Profile, from *agentlab.Snapshot) (agentlab.Sandbox, agentlab.Profile, error) {
	none := func(err error) (agentlab.Sandbox, agentlab.Profile, error) {
		return agentlab.Sandbox{}, agentlab.Profile{}, err
	}
	// What is on a drained backend is still maintained, and moves away.
	if err := s.Admission(on); err != nil && (r.Maintenance == "" || agentlab.CodeOf(err) != agentlab.CodeBusy) {
		return none(err)
	}
	if prof.Workspace == agentlab.WorkspaceRequired && r.Workspace == nil && from == nil {
		return none(agentlab.Errorf(agentlab.CodeInvalid, "profile %s requires a workspace", prof.Name).WithField("workspace").
			WithHint("add --workspace NAME, --workspace new:NAME or --stateful, or choose another profile: agentlab profile list"))
	}
	ttl, err := s.TTL(r.TTL, prof.TTL)
	if err != nil {
		return none(err)
	}
	now := s.clock().UTC()
	sb := agentlab.Sandbox{
		UID: agentlab.NewUID(), Name: r.Name, Backend: on, Profile: prof.Name,
		Image: cmp.Or(r.Image, prof.Image, r.DefaultImage, s.cfg.DefaultImage),
		State: agentlab.SandboxRequested, Desired: agentlab.DesiredRunning,
		Resources: prof.Resources, Options: prof.Options, Network: prof.Network, Keepalive: prof.Keepalive, JobID: r.JobID,
		LeaseExpiresAt: now.Add(ttl + r.Extra), CreatedAt: now,
	}
	sb.Resources.Cores = cmp.Or(r.Cores, sb.Resources.Cores)
	sb.Resources.MemoryMB = cmp.Or(r.MemoryMB, sb.Resources.MemoryMB)
	if sb.Resources.Nested, err = sb.Resources.Nested.Narrow(r.Nested); err != nil {
		return none(err)
	}
	if r.Keepalive != nil {
		sb.Keepalive = *r.Keepalive
	}
	if err := cmp.Or(s.maintain(&sb, r), sb.Resources.Validate()); err != nil {
		return none(err)
	}
	if from != nil { // its image exists as long as it does
		err = planFrom(&sb, r, *from)
	} else {
		err = s.checkImage(sb)
	}
	if err != nil {
		return none(err)
	}
	asked := SpecOf(sb)
	asked.Name = cmp.Or(asked.Name, "sandbox") // generated from the number, later
	if err := s.On(sb).Validate(asked); err != nil {
		return none(s.cfg.Fleet.Supported(err, on, func(b *fleet.Backend) error { return b.Validate(asked) }))
	}
	return sb, prof, nil
}

// planFrom changes a planned sandbox to one from a snapshot. It has the image,
// cores and memory of the snapshot, and a disk that is not smaller.
func planFrom(sb *agentlab.Sandbox, r agentlab.SandboxRequest, snap agentlab.Snapshot) error {
	saved := backend.Spec{Image: snap.Image, Resources: snap.Resources, Options: snap.Options}
	if snap.Resources.Nested == "" { // it is older than the setting
		saved.Resources.Nested = agentlab.NestedAuto
	}
	disk, nested := max(sb.Resources.RootSizeGB, snap.Resources.RootSizeGB), sb.Resources.Nested
	sb.Image, sb.Resources = snap.Image, saved.Resources
	if snap.Resources.Nested != "" && r.Maintenance == "" && nested != agentlab.NestedAuto {
		sb.Resources.Nested = nested
	}
	sb.Resources.RootSizeGB = disk
	if r.Image != "" && r.Image != snap.Image {
		if name, _, _ := strings.Cut(snap.Image, "@"); r.Image != name {
			sb.Image = r.Image
		}
	}
	sb.Resources.Cores = cmp.Or(r.Cores, sb.Resources.Cores)
	sb.Resources.MemoryMB = cmp.Or(r.MemoryMB, sb.Resources.MemoryMB)
	if r.Maintenance != "" { // the profile may have changed
		sb.Options = snap.Options
	}
	sb.From = OriginOf(snap)
	return SpecOf(*sb).CheckFrom(saved)
}

// OriginOf returns the origin of a sandbox that is created from a snapshot.
func OriginOf(snap agentlab.Snapshot) agentlab.Origin {
	o := agentlab.Origin{Snapshot: snap.UID, Sandbox: snap.SandboxUID, Handle: snap.Handle, Name: snap.SandboxName}
	if snap.Kind == agentlab.SnapshotSaved {
		o.Name += "/" + snap.Name
	}
	return o
}

// maintain makes sb a maintenance sandbox if the request wants one. It gets nothing
// that its guest could tell others, and no way to do so.
func (s *Core) maintain(sb *agentlab.Sandbox, r agentlab.SandboxRequest) error {
	switch {
	case r.Maintenance == "":
		return nil
	case r.Workspace == nil && r.Fork == "":
		return agentlab.Errorf(agentlab.CodeInvalid, "a maintenance sandbox needs a workspace").WithField("workspace")
	case !s.On(*sb).Can().NetworkOff:
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

// checkImage returns an error if a sandbox cannot have its image, or if its disk is
// smaller than the image. The driver checks that too, because an image may be built
// or replaced later.
func (s *Core) checkImage(sb agentlab.Sandbox) error {
	if err := s.On(sb).Images.Check(sb.Image); err != nil {
		return err
	}
	sizer, ok := s.On(sb).Images.(DiskSizer)
	if !ok {
		return nil
	}
	return backend.CheckDisk(sb.Resources.RootSizeGB, sizer.DiskBytes(sb.Image))
}

// Admission returns an error if the host accepts no new sandbox now.
func (s *Core) Admission(on string) error {
	if err := s.Room(); err != nil || s.cfg.Host == nil {
		return err
	}
	return s.cfg.Host.Usable(on)
}

// Room returns an error with code no_space while the host has no disk space for another
// sandbox.
func (s *Core) Room() error {
	if s.cfg.Host == nil {
		return nil
	}
	return s.cfg.Host.Room()
}

// TTL chooses the length of a lease and checks it.
func (s *Core) TTL(asked, profile time.Duration) (time.Duration, error) {
	d := cmp.Or(asked, profile, s.lim.DefaultTTL)
	if err := agentlab.ValidateTTL(d); err != nil {
		return 0, err
	}
	if d > s.lim.MaxTTL {
		return 0, agentlab.Errorf(agentlab.CodeInvalid, "%s is longer than the maximum of %s", agentlab.FormatTTL(d), agentlab.FormatTTL(s.lim.MaxTTL)).WithField("ttl").
			WithHint("use a shorter duration, or increase limits.max_ttl_minutes in config.yaml")
	}
	return d, nil
}

// checkNested returns an error with code unsupported if a sandbox requires nested
// virtualization and no host provides it.
func (s *Core) checkNested(ctx context.Context, sb agentlab.Sandbox) error {
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
func (s *Core) hostNested(ctx context.Context, sb agentlab.Sandbox) error {
	b := s.On(sb)
	if b.Host != nil {
		return b.Host.Nested(ctx)
	}
	return b.Without("provides no nested virtualization").
		WithField("resources.nested").WithHint("set resources.nested: auto in the profile")
}

// noteNested stores what the guest of a sandbox has reported about /dev/kvm. The guest
// may be wrong about it, which harms only itself. The event has the reason of the host, if
// there is one.
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
