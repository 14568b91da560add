package client

import (
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// JobQuery selects jobs.
type JobQuery struct {
	Status  string // only jobs with this status; "" means all
	Sandbox int    // only jobs of the sandbox with this VMID; 0 means all
	Limit   int    // at most this many, newest first; 0 means all
	Cursor  string // Next of the previous page
}

func (q JobQuery) values() url.Values {
	v := url.Values{}
	set(v, "status", q.Status)
	set(v, "sandbox", q.Sandbox)
	return v
}

// CreateJob creates a job. It returns when the job is recorded, before
// anything runs.
func (c *Client) CreateJob(ctx context.Context, j api.JobCreate) (api.Job, error) {
	return post[api.Job](ctx, c, j, "jobs")
}

// ValidateJob returns the error that CreateJob would return for j, BundleID
// aside. It creates nothing.
func (c *Client) ValidateJob(ctx context.Context, j api.JobCreate) error {
	_, err := post[none](ctx, c, j, "jobs", "validate")
	return err
}

// Jobs lists jobs, newest first.
func (c *Client) Jobs(ctx context.Context, q JobQuery) (api.List[api.Job], error) {
	return list[api.Job](ctx, c, q.values(), q.Limit, q.Cursor, "jobs")
}

// EachJob yields the jobs that Jobs lists, as EachSandbox does sandboxes.
func (c *Client) EachJob(ctx context.Context, q JobQuery) iter.Seq2[api.Job, error] {
	return items[api.Job](ctx, c, q.values(), q.Limit, q.Cursor, "jobs")
}

// Job returns a job with its last events and its artifacts.
func (c *Client) Job(ctx context.Context, id string) (api.Job, error) {
	return get[api.Job](ctx, c, nil, "jobs", id)
}

// CancelJob requests the end of a job. A job that is being cancelled does not
// change. The error has code conflict if the job has ended in another way.
func (c *Client) CancelJob(ctx context.Context, id string) (api.Job, error) {
	return post[api.Job](ctx, c, nil, "jobs", id, "cancel")
}

// SalvageJob creates a job that extracts the work of an ended job from the kept disk of
// its sandbox, or returns the one that does. The error has code conflict if the disk is
// not kept.
func (c *Client) SalvageJob(ctx context.Context, id string) (api.Job, error) {
	return post[api.Job](ctx, c, nil, "jobs", id, "salvage")
}

// JobLog reads the agent's log from a byte offset on. With follow, the stream
// ends when the job has ended.
func (c *Client) JobLog(ctx context.Context, id string, follow bool, offset int64) (Body, error) {
	v := url.Values{}
	set(v, "follow", follow)
	set(v, "offset", offset)
	return c.stream(ctx, v, "jobs", id, "log")
}

// Artifacts lists the artifacts of a job.
func (c *Client) Artifacts(ctx context.Context, id string) (api.List[api.Artifact], error) {
	return list[api.Artifact](ctx, c, nil, 0, "", "jobs", id, "artifacts")
}

// Artifact reads one artifact of a job.
func (c *Client) Artifact(ctx context.Context, id, file string) (Body, error) {
	if file == "" || path.Clean("/"+file) != "/"+file {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not the path of an artifact", file).WithField("path")
	}
	return c.stream(ctx, nil, append([]string{"jobs", id, "artifacts"}, strings.Split(file, "/")...)...)
}

// JobBundle reads all artifacts of a job as one tar.gz.
func (c *Client) JobBundle(ctx context.Context, id string) (Body, error) {
	return c.stream(ctx, nil, "jobs", id, "bundle")
}

// UploadBundle uploads a git bundle, for JobCreate.BundleID.
func (c *Client) UploadBundle(ctx context.Context, r io.Reader) (api.Bundle, error) {
	return send[api.Bundle](ctx, c, http.MethodPost, nil, r, "application/octet-stream", "bundles")
}

// DeleteBundle deletes an uploaded git bundle that no job uses.
func (c *Client) DeleteBundle(ctx context.Context, id string) error {
	_, err := del[none](ctx, c, "bundles", id)
	return err
}
