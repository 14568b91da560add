package job

import (
	"cmp"
	"context"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Create stores a new job and returns it, in status QUEUED. Codes: invalid,
// not_found (profile, image, secrets or git bundle), unsupported; preflight; with
// r.Sandbox also exists and limit.
func (s *Service) Create(ctx context.Context, r agentlab.JobRequest) (agentlab.Job, error) {
	p, err := s.plan(ctx, r)
	if err != nil {
		return agentlab.Job{}, err
	}
	if p.job.Agent == agentlab.AgentNone && r.Sandbox == nil {
		return agentlab.Job{}, agentlab.Errorf(agentlab.CodeInvalid, "a job without an agent requires a sandbox").WithField("agent").
			WithHint("agentlab sandbox new --repo URL|PATH")
	}
	return s.write(ctx, r, p)
}

// CreateWithSandbox creates a sandbox and r.Job to run in it. A field that
// both requests have may be given in either. Codes are those of Create.
func (s *Service) CreateWithSandbox(ctx context.Context, r agentlab.SandboxRequest) (agentlab.Sandbox, error) {
	q := *r.Job
	for _, both := range []struct {
		field string
		clash bool
	}{
		{"profile", r.Profile != "" && q.Profile != "" && r.Profile != q.Profile},
		{"backend", r.Backend != "" && q.Backend != "" && r.Backend != q.Backend},
		{"image", r.Image != "" && q.Image != "" && r.Image != q.Image},
		{"ttl_minutes", r.TTL != 0 && q.TTL != 0 && r.TTL != q.TTL},
		{"keepalive", r.Keepalive != nil && q.Keepalive != nil && *r.Keepalive != *q.Keepalive},
	} {
		if both.clash {
			return agentlab.Sandbox{}, agentlab.Errorf(agentlab.CodeInvalid, "the sandbox and its job have different values").
				WithField("job." + both.field).WithHint("set it only once")
		}
	}
	q.Profile, q.Backend = cmp.Or(q.Profile, r.Profile), cmp.Or(q.Backend, r.Backend)
	q.Image, q.TTL, q.Keepalive = cmp.Or(q.Image, r.Image), cmp.Or(q.TTL, r.TTL), cmp.Or(q.Keepalive, r.Keepalive)
	q.Sandbox = &r
	j, err := s.Create(ctx, q)
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	return s.cfg.Store.Sandbox(ctx, j.SandboxVMID)
}

// Check returns the error that Create would return for a request, except
// errors about its git bundle, its sandbox, and the leases of its workspace. It changes
// nothing.
func (s *Service) Check(ctx context.Context, r agentlab.JobRequest) error {
	p, err := s.plan(ctx, r)
	if err != nil {
		return err
	}
	return s.cfg.Sandboxes.CheckWorkspace(ctx, p.sandbox)
}

// planned is a requested job.
type planned struct {
	job      agentlab.Job
	attempts []agentlab.Job // if the job has several
	profile  agentlab.Profile

	preparation *agentlab.Job   // of the sandbox that the attempts, or the job itself, continue; nil if there is none
	noFork      *agentlab.Event // has the reason why there is none; nil if there is one

	sandbox agentlab.SandboxRequest // of a job without attempts
}

// plan checks a request and returns the requested job and sandbox.
func (s *Service) plan(ctx context.Context, r agentlab.JobRequest) (p planned, err error) {
	if p.profile, err = s.cfg.Profiles.Use(cmp.Or(r.Profile, s.cfg.DefaultProfile)); err != nil {
		return p, err
	}
	if r.RepoURL != "" && r.BundleID != "" {
		return p, agentlab.Errorf(agentlab.CodeInvalid, "a job has a repo URL or a bundle, not both").WithField("repo_url")
	}
	if r.Attempts != nil && r.Workspace != nil {
		return p, agentlab.Errorf(agentlab.CodeUnsupported, "a job with attempts cannot use a workspace: each attempt has a sandbox of its own").WithField("workspace").
			WithHint("remove --workspace or --attempts")
	}
	if r.Attempts != nil {
		return s.planAttempts(ctx, r, p.profile)
	}
	p.job = s.newJob(r, p.profile)
	want, sb, prof, err := s.checkJob(ctx, p.job, r, p.profile)
	if err != nil {
		return p, err
	}
	p.sandbox = want
	return p, s.planSetup(ctx, &p, r, sb, prof)
}

// checkJob checks a requested job and returns the request for its sandbox, with the
// sandbox and the profile that are planned for it.
func (s *Service) checkJob(ctx context.Context, j agentlab.Job, r agentlab.JobRequest, prof agentlab.Profile) (want agentlab.SandboxRequest, sb agentlab.Sandbox, planned agentlab.Profile, err error) {
	if err = j.Validate(); err == nil {
		err = agentlab.ValidateTTL(j.TTL)
	}
	if err != nil {
		return want, sb, planned, err
	}
	want = s.sandboxRequest(j)
	if r.Sandbox != nil {
		want.Name, want.Cores, want.MemoryMB = r.Sandbox.Name, r.Sandbox.Cores, r.Sandbox.MemoryMB
		want.Workspace = r.Sandbox.Workspace
	}
	want.Workspace, want.Session = cmp.Or(r.Workspace, want.Workspace), r.Session
	if sb, planned, err = s.cfg.Sandboxes.Plan(ctx, want); err == nil {
		err = s.preflight(ctx, j, prof, r.NoPreflight)
	}
	return want, sb, planned, err
}

func (s *Service) newJob(r agentlab.JobRequest, prof agentlab.Profile) agentlab.Job {
	j := agentlab.Job{
		ID: agentlab.NewJobID(), RepoURL: r.RepoURL, Bundled: r.BundleID != "", Ref: r.Ref, Depth: r.Depth,
		Task: r.Task, Agent: cmp.Or(r.Agent, s.cfg.DefaultAgent), Profile: prof.Name, Backend: r.Backend, Image: r.Image,
		Mode: cmp.Or(r.Mode, prof.Mode, "dangerous"), TTL: cmp.Or(r.TTL, prof.TTL, s.lim.DefaultTTL), Keepalive: prof.Keepalive,
		NoSetup: r.NoSetup, Devcontainer: r.Devcontainer, Branch: r.Branch, Status: agentlab.JobQueued, CreatedAt: s.clock().UTC(),
	}
	if r.Keepalive != nil {
		j.Keepalive = *r.Keepalive
	}
	if j.Agent == agentlab.AgentNone {
		j.Keepalive = true // the user asked for its sandbox
	}
	return j
}

// LeaseSlack is how much longer the lease of a job's sandbox is than the job
// with its upload window, so that the job ends before the lease.
const LeaseSlack = 30 * time.Second

// sandboxRequest returns the request for the sandbox of a job. The sandbox has
// the name of the job, so that it can be found if its number was not stored
// yet.
func (s *Service) sandboxRequest(j agentlab.Job) agentlab.SandboxRequest {
	image := s.cfg.AgentsImage
	if j.Agent == "shell" || j.Agent == agentlab.AgentNone {
		image = s.cfg.ShellImage
	}
	r := agentlab.SandboxRequest{
		Name: j.ID, Profile: j.Profile, Backend: j.Backend, Image: j.Image, DefaultImage: image, Keepalive: &j.Keepalive,
		TTL: j.TTL, Extra: s.lim.UploadWindow + LeaseSlack, JobID: j.ID,
	}
	if j.Salvages != "" { // the image is that of the copied disk
		r.Backend, r.Image, r.Maintenance = "", "", agentlab.MaintenanceSalvage
	}
	return r
}

// write creates the resources of a job and then its row. After an error it
// undoes what it has done.
func (s *Service) write(ctx context.Context, r agentlab.JobRequest, p planned) (_ agentlab.Job, err error) {
	j := p.job
	s.setCreating(j.ID, true)
	defer s.setCreating(j.ID, false)
	var undo []func()
	defer func() {
		for i := len(undo) - 1; err != nil && i >= 0; i-- {
			undo[i]()
		}
	}()
	clean := context.WithoutCancel(ctx)
	sum, err := s.cfg.Store.PutProfile(ctx, p.profile.Name, p.profile.YAML)
	if err != nil {
		return agentlab.Job{}, err
	}
	if r.BundleID != "" {
		if err := s.cfg.Artifacts.ClaimBundle(ctx, r.BundleID, j.ID); err != nil {
			return agentlab.Job{}, err
		}
		undo = append(undo, func() { s.try("drop the bundle", j.ID, s.cfg.Artifacts.DropBundle(j.ID)) })
	}
	if r.Sandbox != nil || p.sandbox.Workspace != nil {
		sb, err := s.cfg.Sandboxes.Create(ctx, p.sandbox)
		if err != nil {
			return agentlab.Job{}, err
		}
		j.SandboxVMID = sb.VMID
		undo = append(undo, func() {
			_, err := s.cfg.Sandboxes.Destroy(clean, sb.VMID)
			s.try("destroy the sandbox", j.ID, err)
		})
	}
	e := jobEvent(agentlab.EventJobCreated, j, map[string]any{"agent": j.Agent, "profile": j.Profile, "profile_sha256": sum, "ttl_seconds": int64(j.TTL.Seconds())},
		"job %s is QUEUED: agent %s, profile %s", j.ID, j.Agent, j.Profile)
	j.UpdatedAt = j.CreatedAt
	parts, evs := p.parts()
	if err := s.cfg.Store.CreateJob(ctx, j, parts, append(evs, e)...); err != nil {
		return agentlab.Job{}, err
	}
	s.loop.Wake(j.ID)
	for _, a := range parts {
		s.loop.Wake(a.ID)
	}
	return j, nil
}

func (s *Service) try(what, id string, err error) {
	if err != nil {
		s.log.Error("could not "+what+" of a job that was not created", "job", id, "err", err)
	}
}

func (s *Service) setCreating(id string, creating bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if creating {
		s.creating[id] = true
	} else {
		delete(s.creating, id)
	}
}

// Known reports whether a job exists or is being created, so that files with
// its id have an owner.
func (s *Service) Known(ctx context.Context, id string) (bool, error) {
	s.mu.Lock()
	creating := s.creating[id]
	s.mu.Unlock()
	if creating {
		return true, nil
	}
	_, err := s.cfg.Store.Job(ctx, id)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return false, nil
	}
	return err == nil, err
}

// Get returns the job with that ID, or the only job whose ID begins with it.
// Codes: not_found; invalid if several IDs begin with it.
func (s *Service) Get(ctx context.Context, id string) (agentlab.Job, error) {
	if agentlab.ValidateJobID(id) == nil {
		return s.cfg.Store.Job(ctx, id)
	}
	const shown = 5
	list, err := s.cfg.Store.JobsByPrefix(ctx, id, shown+1)
	switch {
	case err != nil:
		return agentlab.Job{}, err
	case len(list) == 0 || len(list) == 1 && id == "job-": // the prefix of every ID identifies no job
		return s.cfg.Store.Job(ctx, id) // for its error
	case len(list) == 1:
		return list[0], nil
	}
	var ids []string
	for _, j := range list[:min(shown, len(list))] {
		ids = append(ids, j.ID)
	}
	if len(list) > shown {
		ids = append(ids, "more")
	}
	return agentlab.Job{}, agentlab.Errorf(agentlab.CodeInvalid, "%s matches several jobs: %s", id, strings.Join(ids, ", ")).
		WithField("job").WithHint("use more characters of the ID; see 'agentlab job list'")
}

// List lists jobs, the newest first.
func (s *Service) List(ctx context.Context, f agentlab.JobFilter) ([]agentlab.Job, error) {
	return s.cfg.Store.Jobs(ctx, f)
}

// Cancel requests the end of a job. A QUEUED job is CANCELLED at once; a
// running job gets Limits.CancelWindow to stop its agent and to upload. A job
// that was already stopped, because of its time limit or because its model is
// denied, is only uploading: it ends at once, with the status of that stop. A
// job that was cancelled before does not change. Codes: not_found, conflict if
// it has ended in another way.
func (s *Service) Cancel(ctx context.Context, id string) (agentlab.Job, error) {
	j, err := s.cfg.Store.UpdateJob(ctx, id, func(j *agentlab.Job) ([]agentlab.Event, error) {
		switch {
		case j.Status == agentlab.JobQueued:
			return []agentlab.Event{j.End(agentlab.JobCancelled, "cancelled before it started", s.clock())}, nil
		case j.Status.Final() && j.Status != agentlab.JobCancelled:
			return nil, agentlab.Errorf(agentlab.CodeConflict, "%s has already ended: it is %s", id, j.Status)
		case j.Status.Final() || j.StopRequested == string(agentlab.JobCancelled):
			return nil, nil
		case j.StopRequested != "":
			why := cmp.Or(j.Reason, "the time limit of "+j.TTL.String()+" was exceeded")
			return []agentlab.Event{j.End(agentlab.JobStatus(j.StopRequested), why+"; its upload was cancelled by request", s.clock())}, nil
		}
		j.StopRequested = string(agentlab.JobCancelled)
		return []agentlab.Event{jobEvent(agentlab.EventJobStatus, *j, map[string]any{"status": j.Status, "stop": j.StopRequested},
			"job %s is being cancelled; its runner may upload for %s", id, s.lim.CancelWindow)}, nil
	})
	if err != nil {
		return agentlab.Job{}, err
	}
	return j, nil
}
