package daemon

import (
	"cmp"
	"context"
	"errors"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/guestserver"
	"github.com/agentlab-vm/agentlab/internal/job"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/server"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// The services know neither store nor server, and these know no service: here
// one's words are put into the other's.

type sandboxStore struct{ *store.Store }

func (s sandboxStore) Sandboxes(ctx context.Context, f sandbox.Filter) ([]agentlab.Sandbox, error) {
	return s.Store.Sandboxes(ctx, store.SandboxFilter(f))
}

type jobStore struct{ *store.Store }

func (s jobStore) Jobs(ctx context.Context, f job.Filter) ([]agentlab.Job, error) {
	return s.Store.Jobs(ctx, store.JobFilter(f))
}

func (s jobStore) ConsumeBootstrap(ctx context.Context, hash string, vmid int, grants []job.Grant,
	fn func(*agentlab.Sandbox, *agentlab.Job) ([]agentlab.Event, error)) error {
	rows := make([]store.Grant, len(grants))
	for i, g := range grants {
		rows[i] = store.Grant(g)
	}
	return s.Store.ConsumeBootstrap(ctx, hash, vmid, rows, fn)
}

// finalStatuses are those of jobs that have ended.
var finalStatuses = []agentlab.JobStatus{agentlab.JobCompleted, agentlab.JobFailed, agentlab.JobTimeout, agentlab.JobCancelled}

type gcStore struct{ *store.Store }

func (s gcStore) FinalJobs(ctx context.Context, before string, limit int) ([]agentlab.Job, error) {
	return s.Store.Jobs(ctx, store.JobFilter{Statuses: finalStatuses, Before: before, Limit: limit})
}

func (s gcStore) DestroyedSandboxes(ctx context.Context) ([]agentlab.Sandbox, error) {
	return s.Store.Sandboxes(ctx, store.SandboxFilter{States: []agentlab.SandboxState{agentlab.SandboxDestroyed}})
}

type auditStore struct{ *store.Store }

func (s auditStore) LiveSandboxes(ctx context.Context) ([]agentlab.Sandbox, error) {
	return s.Store.Sandboxes(ctx, store.SandboxFilter{})
}

type gcFiles struct {
	*artifact.Service
	jobs *job.Service
	s    *services
}

func (f gcFiles) Sweep(ctx context.Context, known func(context.Context, string) (bool, error)) (int, error) {
	if err := matches(ctx, f.s.cfg.Paths, f.s.store); err != nil {
		return 0, err
	}
	n, err := f.Service.Sweep(ctx, known)
	err = errors.Join(err, f.s.records.sweep(ctx, known, f.s.cfg.Clock(), f.Limits().Quarantine))
	forgotten, ferr := f.jobs.ForgetSecrets(ctx)
	return n.Temporary + n.Files + n.Jobs + n.Bundles + n.Expired + forgotten, errors.Join(err, ferr)
}

type guestTokens struct{ store *store.Store }

func (s guestTokens) GrantByHash(ctx context.Context, hash, kind string) (guestserver.Grant, error) {
	g, err := s.store.GrantByHash(ctx, hash, kind)
	if err != nil || g.JobID == "" {
		return guestserver.Grant{VMID: g.VMID, ExpiresAt: g.ExpiresAt}, err
	}
	j, err := s.store.Job(ctx, g.JobID)
	return guestserver.Grant{VMID: g.VMID, JobID: g.JobID, ExpiresAt: g.ExpiresAt, Ended: j.Status.Final()}, err
}

// jobView is the job service as the control API sees it.
type jobView struct{ *job.Service }

func (v jobView) Create(ctx context.Context, r server.JobRequest) (agentlab.Job, error) {
	return v.Service.Create(ctx, toJobRequest(r))
}

func (v jobView) Check(ctx context.Context, r server.JobRequest) error {
	return v.Service.Check(ctx, toJobRequest(r))
}

func toJobRequest(r server.JobRequest) job.Request {
	return job.Request{
		RepoURL: r.RepoURL, BundleID: r.BundleID, Ref: r.Ref, Depth: r.Depth, Profile: r.Profile, Image: r.Image,
		Task: r.Task, Agent: r.Agent, Mode: r.Mode, TTL: r.TTL, Keepalive: r.Keepalive, NoPreflight: r.NoPreflight,
	}
}

func (v jobView) List(ctx context.Context, f server.JobFilter) ([]agentlab.Job, error) {
	q := job.Filter{SandboxVMID: f.VMID, Limit: f.Limit, Before: f.Before}
	if f.Status != "" {
		q.Statuses = []agentlab.JobStatus{f.Status}
	}
	return v.Service.List(ctx, q)
}

// sandboxView is the sandbox service as the control API sees it.
type sandboxView struct {
	*sandbox.Service
	jobs jobView
}

// Orphans lists what the backend holds that belongs to no sandbox.
func (v sandboxView) Orphans(ctx context.Context) ([]api.Orphan, error) {
	list, err := v.Service.Orphans(ctx)
	out := make([]api.Orphan, len(list))
	for i, in := range list {
		out[i] = toOrphan(in)
	}
	return out, err
}

// DestroyOrphan destroys one of them.
func (v sandboxView) DestroyOrphan(ctx context.Context, id string) (api.Orphan, error) {
	in, err := v.Service.DestroyOrphan(ctx, id)
	return toOrphan(in), err
}

func toOrphan(in backend.Instance) api.Orphan {
	return api.Orphan{VMID: in.Ref.VMID, UID: in.Ref.UID, Name: in.Name, Power: string(in.Power), Reason: in.Reason}
}

// Create makes a sandbox, or a job with a sandbox as it is asked for.
func (v sandboxView) Create(ctx context.Context, r server.SandboxRequest) (agentlab.Sandbox, error) {
	if r.Job != nil {
		return v.createWithJob(ctx, r)
	}
	return v.Service.Create(ctx, sandbox.Request{
		Name: r.Name, Profile: r.Profile, Image: r.Image, Keepalive: r.Keepalive, TTL: r.TTL, Cores: r.Cores, MemoryMB: r.MemoryMB,
	})
}

func (v sandboxView) createWithJob(ctx context.Context, r server.SandboxRequest) (agentlab.Sandbox, error) {
	q := toJobRequest(*r.Job)
	for _, both := range []struct {
		field string
		clash bool
	}{
		{"profile", r.Profile != "" && q.Profile != "" && r.Profile != q.Profile},
		{"image", r.Image != "" && q.Image != "" && r.Image != q.Image},
		{"ttl_minutes", r.TTL != 0 && q.TTL != 0 && r.TTL != q.TTL},
		{"keepalive", r.Keepalive != nil && q.Keepalive != nil && *r.Keepalive != *q.Keepalive},
	} {
		if both.clash {
			return agentlab.Sandbox{}, agentlab.Errorf(agentlab.CodeInvalid, "the sandbox and its job ask for different things").
				WithField("job." + both.field).WithHint("give it once")
		}
	}
	q.Profile, q.Image, q.TTL, q.Keepalive = cmp.Or(q.Profile, r.Profile), cmp.Or(q.Image, r.Image), cmp.Or(q.TTL, r.TTL), cmp.Or(q.Keepalive, r.Keepalive)
	q.Sandbox = &job.SandboxRequest{Name: r.Name, Cores: r.Cores, MemoryMB: r.MemoryMB}
	j, err := v.jobs.Service.Create(ctx, q)
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	return v.Service.Get(ctx, strconv.Itoa(j.SandboxVMID))
}

func (v sandboxView) List(ctx context.Context, f server.SandboxFilter) ([]agentlab.Sandbox, error) {
	q := sandbox.Filter{Destroyed: f.Destroyed, Limit: f.Limit, AfterVMID: f.AfterVMID}
	if f.State != "" {
		q.States = []agentlab.SandboxState{f.State}
	}
	return v.Service.List(ctx, q)
}
