package server

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// jobEvents is how many of a job's latest events the API shows.
const jobEvents = 50

// jobTargets is how many of a job's refused targets the API shows.
const jobTargets = 20

type createJobInput struct{ Body api.JobCreate }

func (s *Server) createJob(ctx context.Context, in *createJobInput) (api.Job, error) {
	r, err := s.jobRequest(ctx, in.Body)
	if err != nil {
		return api.Job{}, err
	}
	j, err := s.cfg.Services.Jobs.Create(ctx, r)
	return toJob(j), err
}

func (s *Server) validateJob(ctx context.Context, in *createJobInput) (none, error) {
	r, err := s.jobRequest(ctx, in.Body)
	if err != nil {
		return none{}, err
	}
	return none{}, s.cfg.Services.Jobs.Check(ctx, r)
}

// jobRequest converts a request for a job, and completes it if the job is for a session.
// It rejects a token that may not use what the request names.
func (s *Server) jobRequest(ctx context.Context, j api.JobCreate) (agentlab.JobRequest, error) {
	var wait time.Duration
	if j.Session != "" && j.Workspace == "" { // its workspace is that of the session
		wait, j.WorkspaceWaitSeconds = time.Duration(j.WorkspaceWaitSeconds)*time.Second, 0
	}
	r, err := jobRequest(j)
	if err == nil && r.Setup != nil {
		r.Setup.Owner = callerOf(ctx).name()
	}
	if err != nil {
		return r, err
	}
	if j.Session == "" {
		return r, s.mayRunJob(ctx, r)
	}
	if err := requireVerb(ctx, verbUseSession, AccessWrite); err != nil {
		return r, err
	}
	if wait > 0 {
		r.Workspace = &agentlab.WorkspaceSelection{Wait: wait}
	}
	if r, err = s.cfg.Services.Sessions.ForJob(ctx, j.Session, r); err != nil {
		return r, err
	}
	return r, s.mayRunJob(ctx, r)
}

type listJobsInput struct {
	Status  string `query:"status" enum:"QUEUED,RUNNING,COMPLETED,FAILED,TIMEOUT,CANCELLED" doc:"Only jobs with this status"`
	Sandbox int    `query:"sandbox" minimum:"0" doc:"Only jobs of the sandbox with this VMID"`
	Parent  string `query:"parent" doc:"Only the attempts of the job with this ID, and the job that prepares their sandbox"`
	PageInput
}

func (s *Server) listJobs(ctx context.Context, in *listJobsInput) (api.List[api.Job], error) {
	f := agentlab.JobFilter{Statuses: optionalFilter(agentlab.JobStatus(in.Status)), SandboxVMID: in.Sandbox, ParentID: in.Parent, Limit: in.Limit + 1}
	before, err := in.after("jobs", 2)
	if err == nil && before != nil {
		f.Before.ID = before[1]
		f.Before.CreatedAt, err = parseTimeKey(before[0])
	}
	if err != nil {
		return api.List[api.Job]{}, err
	}
	jobs, err := s.cfg.Services.Jobs.List(ctx, f)
	if err != nil {
		return api.List[api.Job]{}, err
	}
	return pageOf("jobs", jobs, in.Limit, toJob, func(j agentlab.Job) []string { return []string{timeKey(j.CreatedAt), j.ID} }), nil
}

func (s *Server) getJob(ctx context.Context, in *JobInput) (api.Job, error) {
	j, err := s.cfg.Services.Jobs.Get(ctx, in.Job)
	if err != nil {
		return api.Job{}, err
	}
	out := toJob(j)
	events, err := s.cfg.Services.Events.Events(ctx, agentlab.EventFilter{JobIDs: []string{j.ID}, Limit: jobEvents, Tail: true})
	if err != nil {
		return api.Job{}, err
	}
	out.Events = mapSlice(events, toEvent)
	if j.Attempts > 0 {
		attempts, err := s.cfg.Services.Jobs.Attempts(ctx, j.ID)
		if err != nil {
			return api.Job{}, err
		}
		out.Attempts = mapSlice(attempts, toJob)
	}
	if out.Setup != nil && !out.Setup.Reused {
		if out.Setup.PreparationID, err = s.preparationOf(ctx, j); err != nil {
			return api.Job{}, err
		}
	}
	artifacts, err := s.cfg.Services.Artifacts.List(ctx, j.ID)
	out.Artifacts = mapSlice(artifacts, toArtifact)
	if err != nil {
		return api.Job{}, err
	}
	sum, err := s.cfg.Services.Egress.Summary(ctx, agentlab.EgressFilter{JobID: j.ID}, jobTargets)
	out.Egress = toEgressSummary(sum)
	return out, err
}

// preparationOf returns the ID of the job that prepares the sandbox of a job; "" if there
// is none.
func (s *Server) preparationOf(ctx context.Context, j agentlab.Job) (string, error) {
	parts, err := s.cfg.Services.Jobs.List(ctx, agentlab.JobFilter{ParentID: j.ID})
	if i := slices.IndexFunc(parts, func(p agentlab.Job) bool { return p.Prepares() }); i >= 0 {
		return parts[i].ID, err
	}
	return "", err
}

func (s *Server) cancelJob(ctx context.Context, in *JobInput) (api.Job, error) {
	j, err := s.cfg.Services.Jobs.Cancel(ctx, in.Job)
	return toJob(j), err
}

func (s *Server) salvageJob(ctx context.Context, in *JobInput) (api.Job, error) {
	j, err := s.cfg.Services.Jobs.Salvage(ctx, in.Job)
	return toJob(j), err
}

type jobLogInput struct {
	Job    string `path:"job" doc:"ID of a job"`
	Follow bool   `query:"follow" doc:"Stream until the job has ended"`
	Offset int64  `query:"offset" minimum:"0" doc:"First byte to read"`
}

func (s *Server) jobLog(ctx context.Context, in *jobLogInput) (*huma.StreamResponse, error) {
	id, err := s.logOf(ctx, in.Job)
	if err != nil {
		return nil, err
	}
	return s.stream(ctx, func(ctx context.Context) (io.ReadCloser, map[string]string, error) {
		r, err := s.cfg.Services.Artifacts.Log(ctx, id, in.Offset, in.Follow)
		return r, textHeader, err
	})
}

// logOf returns the ID of the job with the log of a job. The log of a job with
// several attempts is that of the winner.
func (s *Server) logOf(ctx context.Context, id string) (string, error) {
	j, err := s.cfg.Services.Jobs.Get(ctx, id)
	if err != nil || j.Attempts == 0 {
		return id, err
	}
	attempts, err := s.cfg.Services.Jobs.Attempts(ctx, j.ID)
	if err != nil {
		return "", err
	}
	won := agentlab.FindAttempt(attempts, j.Winner)
	began := slices.ContainsFunc(attempts, func(a agentlab.Job) bool { return !a.StartedAt.IsZero() })
	switch {
	case won == nil && !began:
		return "", agentlab.Errorf(agentlab.CodeConflict, "no attempt of job %s has begun", id).WithHint("see 'agentlab job show %s'", id)
	case won == nil:
		return "", agentlab.Errorf(agentlab.CodeConflict, "job %s has several attempts, and none has won", id).
			WithHint("choose one: agentlab job logs %s --attempt 1", id)
	}
	return won.ID, nil
}

type listArtifactsInput struct {
	Job string `path:"job" doc:"ID of a job, or a unique prefix of it"`
	PageInput
}

func (s *Server) listArtifacts(ctx context.Context, in *listArtifactsInput) ([]api.Artifact, error) {
	if _, err := s.cfg.Services.Jobs.Get(ctx, in.Job); err != nil {
		return nil, err
	}
	list, err := s.cfg.Services.Artifacts.List(ctx, in.Job)
	return mapSlice(list, toArtifact), err
}

type artifactInput struct {
	Job  string `path:"job" doc:"ID of a job"`
	Path string `path:"path" doc:"Path of the artifact; may contain slashes"`
}

func (s *Server) getArtifact(ctx context.Context, in *artifactInput) (*huma.StreamResponse, error) {
	return s.stream(ctx, func(ctx context.Context) (io.ReadCloser, map[string]string, error) {
		a, r, err := s.cfg.Services.Artifacts.Open(ctx, in.Job, in.Path)
		return r, map[string]string{
			"Content-Type":           a.MIME,
			"Content-Length":         strconv.FormatInt(a.Size, 10),
			"Content-Disposition":    "attachment", // a guest wrote it: a browser must not render it
			"X-Content-Type-Options": "nosniff",
			"ETag":                   `"` + a.SHA256 + `"`,
		}, err
	})
}

func (s *Server) jobBundle(ctx context.Context, in *JobInput) (*huma.StreamResponse, error) {
	if _, err := s.cfg.Services.Jobs.Get(ctx, in.Job); err != nil {
		return nil, err
	}
	return s.stream(ctx, func(ctx context.Context) (io.ReadCloser, map[string]string, error) {
		r, err := s.cfg.Services.Artifacts.Bundle(ctx, in.Job)
		return r, map[string]string{"Content-Type": "application/gzip"}, err
	})
}

type uploadBundleInput struct{ Payload payload }

func (s *Server) uploadBundle(ctx context.Context, in *uploadBundleInput) (api.Bundle, error) {
	r := http.MaxBytesReader(nil, io.NopCloser(in.Payload.r), s.cfg.MaxBundleBytes)
	b, err := s.cfg.Services.Artifacts.PutBundle(ctx, r)
	if err != nil {
		return api.Bundle{}, bodyError(err)
	}
	return api.Bundle(b), nil
}

type uploadedInput struct {
	Bundle string `path:"bundle" doc:"ID of an uploaded git bundle"`
}

func (s *Server) deleteBundle(_ context.Context, in *uploadedInput) (none, error) {
	return none{}, s.cfg.Services.Artifacts.DeleteBundle(in.Bundle)
}
