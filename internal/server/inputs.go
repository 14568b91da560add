package server

import (
	"io"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// JobInput is the path parameter of calls about one job.
type JobInput struct {
	Job string `path:"job" doc:"ID of a job, or a unique prefix of it"`
}

type sandboxInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
}

type sandboxShowInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Memory  bool   `query:"memory" doc:"Measure the memory of the host that the sandbox occupies"`
}

type profileInput struct {
	Profile string `path:"profile" doc:"Name of a profile"`
}

type imageInput struct {
	Image string `path:"image" doc:"Name of an image, or name@digest"`
}

type setupInput struct {
	Setup string `path:"setup" doc:"ID of a snapshot after setup, or a unique prefix of it"`
}

type backendInput struct {
	Backend string `path:"backend" doc:"Name of a backend"`
}

type templateInput struct {
	Template string `path:"template" doc:"Key of a template, or a unique prefix of it"`
}

// payload is a raw request body. The handler reads it up to limit.
type payload struct {
	r io.Reader
}

// Resolve gets the body from the request. It is called by huma.
func (p *payload) Resolve(hc huma.Context) []error {
	req, _ := humago.Unwrap(hc)
	p.r = req.Body
	return nil
}

// text reads a body of at most limit bytes.
func (p *payload) text(limit int64) (string, error) {
	b, err := io.ReadAll(http.MaxBytesReader(nil, io.NopCloser(p.r), limit))
	if err != nil {
		return "", bodyError(err)
	}
	return string(b), nil
}

// minutes converts a number of minutes from a request to a duration. Numbers
// outside of the range of leases stay outside of it, without overflow.
func minutes(n int) time.Duration {
	const beyond = int(agentlab.MaxTTL/time.Minute) + 1
	return time.Duration(max(min(n, beyond), -1)) * time.Minute
}

// optionalFilter returns a filter for one value; for the zero value it returns nil, which
// means any.
func optionalFilter[T comparable](v T) []T {
	var zero T
	if v == zero {
		return nil
	}
	return []T{v}
}

// selection converts the workspace of a request; nil means none.
func selection(w api.WorkspaceSelection) (*agentlab.WorkspaceSelection, error) {
	if c := w.WorkspaceCreate; c != nil && c.Name != "" {
		if w.Workspace == "" {
			w.Workspace = c.Name
		}
		if w.Workspace != c.Name {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not the name in workspace", c.Name).WithField("workspace_create.name")
		}
	}
	if w.Workspace == "" {
		if w.WorkspaceCreate != nil || w.WorkspaceWaitSeconds != 0 {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "no workspace is named").WithField("workspace").WithHint("add --workspace NAME")
		}
		return nil, nil
	}
	out := &agentlab.WorkspaceSelection{Workspace: w.Workspace, Wait: time.Duration(w.WorkspaceWaitSeconds) * time.Second}
	if c := w.WorkspaceCreate; c != nil {
		out.Create, out.Ensure, out.SizeGB, out.Storage = !c.IfMissing, c.IfMissing, c.SizeGB, c.Storage
	}
	return out, nil
}

func jobRequest(j api.JobCreate) (agentlab.JobRequest, error) {
	workspace, err := selection(j.WorkspaceSelection)
	if err != nil {
		return agentlab.JobRequest{}, err
	}
	var attempts *agentlab.JobAttempts
	if a := j.Attempts; a != nil {
		attempts = &agentlab.JobAttempts{Count: a.Count, Pick: a.Pick, Agents: a.Agents, Tasks: a.Tasks}
	}
	var setup *agentlab.SetupSource
	if s := j.Setup; s != nil {
		setup = &agentlab.SetupSource{Repo: s.Repo, Ref: s.Ref, Default: s.Default, Sum: s.Sum}
	}
	return agentlab.JobRequest{
		RepoURL: j.RepoURL, BundleID: j.BundleID, Ref: j.Ref, Depth: j.Depth, Profile: j.Profile, Backend: j.Backend, Image: j.Image,
		Task: j.Task, Agent: j.Agent, Mode: j.Mode, TTL: minutes(j.TTLMinutes), Keepalive: j.Keepalive,
		NoPreflight: j.NoPreflight, NoSetup: j.NoSetup, Devcontainer: j.Devcontainer, Setup: setup, Attempts: attempts, Workspace: workspace,
	}, nil
}

func sandboxRequest(c api.SandboxCreate) (agentlab.SandboxRequest, error) {
	r := agentlab.SandboxRequest{
		Name: c.Name, Profile: c.Profile, Backend: c.Backend, Image: c.Image, Keepalive: c.Keepalive,
		TTL: minutes(c.TTLMinutes), Cores: c.Cores, MemoryMB: c.MemoryMB, Nested: agentlab.Nested(c.Nested), From: c.FromSnapshot, Maintenance: c.Maintenance,
	}
	var err error
	if r.Workspace, err = selection(c.WorkspaceSelection); err != nil {
		return r, err
	}
	if c.Job != nil && c.Maintenance != "" {
		return r, agentlab.Errorf(agentlab.CodeInvalid, "a maintenance sandbox runs no job").WithField("maintenance")
	}
	if c.Job != nil && c.FromSnapshot != "" {
		return r, agentlab.Errorf(agentlab.CodeInvalid, "a sandbox from a snapshot cannot be created with a job").WithField("from_snapshot")
	}
	if c.Job != nil && c.Job.Session != "" {
		return r, agentlab.Errorf(agentlab.CodeUnsupported, "a sandbox cannot be created with a job of a session").WithField("job.session").
			WithHint("agentlab session resume, or agentlab job run --session")
	}
	if c.Job != nil {
		j, err := jobRequest(*c.Job)
		if err != nil {
			return r, err
		}
		r.Job = &j
	}
	return r, nil
}
