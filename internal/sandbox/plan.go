package sandbox

import (
	"cmp"
	"context"
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
		err = s.checkPlan(ctx, r, sb, prof)
	}
	return sb, prof, err
}

// checkPlan returns an error if the host or the vault does not have what a planned
// sandbox needs. The secrets of a job are checked when it gets them, and a copy has those
// of its source.
func (s *Service) checkPlan(ctx context.Context, r agentlab.SandboxRequest, sb agentlab.Sandbox, prof agentlab.Profile) error {
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
	none := func(err error) (agentlab.Sandbox, agentlab.Profile, error) {
		return agentlab.Sandbox{}, agentlab.Profile{}, err
	}
	if r.Name != "" {
		if err := agentlab.ValidateName(r.Name); err != nil {
			return none(err)
		}
	}
	profile := s.cfg.DefaultProfile
	if from != nil {
		profile = from.Profile
	}
	prof, err := s.cfg.Profiles.Use(cmp.Or(r.Profile, profile))
	if err != nil {
		return none(err)
	}
	on, err := s.backendFor(ctx, r, prof, from)
	if err == nil {
		err = s.admission(on)
	}
	if err != nil {
		return none(err)
	}
	if prof.Workspace == agentlab.WorkspaceRequired && r.Workspace == nil && from == nil {
		return none(agentlab.Errorf(agentlab.CodeInvalid, "profile %s requires a workspace", prof.Name).WithField("workspace").
			WithHint("add --workspace NAME, --workspace new:NAME or --stateful, or choose another profile: agentlab profile list"))
	}
	ttl, err := s.ttl(r.TTL, prof.TTL)
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
	asked := spec(sb)
	asked.Name = cmp.Or(asked.Name, "sandbox") // generated from the number, later
	if err := s.on(sb).Validate(asked); err != nil {
		return none(s.cfg.Fleet.Supported(err, on, func(b *fleet.Backend) error { return b.Validate(asked) }))
	}
	return sb, prof, nil
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
		use, err := s.cfg.Workspaces.Select(ctx, sel)
		if err == nil && use.New == nil {
			return use.Backend, nil
		} // its error is reported when the rest of the request has been checked
	}
	return b.Name(), nil
}

// checkImage returns an error if a sandbox cannot have its image, or if its disk is
// smaller than the image. The driver checks that too, because an image may be built
// or replaced later.
func (s *Service) checkImage(sb agentlab.Sandbox) error {
	if err := s.on(sb).Images.Check(sb.Image); err != nil {
		return err
	}
	sizer, ok := s.on(sb).Images.(DiskSizer)
	if !ok {
		return nil
	}
	return backend.CheckDisk(sb.Resources.RootSizeGB, sizer.DiskBytes(sb.Image))
}

// admission returns an error if the host accepts no new sandbox now.
func (s *Service) admission(on string) error {
	if err := s.room(); err != nil || s.cfg.Host == nil {
		return err
	}
	return s.cfg.Host.Usable(on)
}

func (s *Service) room() error {
	if s.cfg.Host == nil {
		return nil
	}
	return s.cfg.Host.Room()
}

// ttl chooses the length of a lease and checks it.
func (s *Service) ttl(asked, profile time.Duration) (time.Duration, error) {
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
