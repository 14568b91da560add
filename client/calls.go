package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// Health asks whether the daemon answers.
func (c *Client) Health(ctx context.Context) (api.Health, error) {
	return get[api.Health](ctx, c, "/v1/health", nil)
}

// Status returns the state of the daemon.
func (c *Client) Status(ctx context.Context) (api.Status, error) {
	return get[api.Status](ctx, c, "/v1/status", nil)
}

// BackupDatabase makes a backup of the daemon's database.
func (c *Client) BackupDatabase(ctx context.Context) (out api.Backup, err error) {
	return out, c.call(ctx, http.MethodPost, "/v1/daemon/backup", nil, nil, &out)
}

// ConfirmClock confirms that the clock of the daemon's host is right, so that
// retention goes on after the clock jumped.
func (c *Client) ConfirmClock(ctx context.Context) (out api.Clock, err error) {
	return out, c.call(ctx, http.MethodPost, "/v1/daemon/clock/confirm", nil, nil, &out)
}

// StopDaemon asks the daemon to end. VMs go on. It returns when the daemon
// has agreed, which is before it has ended.
func (c *Client) StopDaemon(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, "/v1/daemon/stop", nil, nil, nil)
}

// JobQuery chooses jobs.
type JobQuery struct {
	Status  string // only this status; "" means all
	Sandbox int    // only jobs of this sandbox's VMID; 0 means all
	Limit   int    // at most this many, the newest first; 0 means all there are
	Cursor  string // Next of the page before
}

// CreateJob asks for a job. It returns when the job is recorded, which is
// before anything runs.
func (c *Client) CreateJob(ctx context.Context, j api.JobCreate) (api.Job, error) {
	return post[api.Job](ctx, c, "/v1/jobs", j)
}

// ValidateJob asks whether CreateJob would accept a job, apart from its
// BundleID. It creates nothing.
func (c *Client) ValidateJob(ctx context.Context, j api.JobCreate) error {
	return c.call(ctx, http.MethodPost, "/v1/jobs/validate", nil, j, nil)
}

// Jobs lists jobs, the newest first.
func (c *Client) Jobs(ctx context.Context, q JobQuery) (api.List[api.Job], error) {
	v := url.Values{}
	set(v, "status", q.Status)
	set(v, "sandbox", q.Sandbox)
	return pages[api.Job](ctx, c, "/v1/jobs", v, q.Limit, q.Cursor)
}

// Job returns one job with its last events and its artifacts.
func (c *Client) Job(ctx context.Context, id string) (api.Job, error) {
	p, err := join("jobs", id)
	if err != nil {
		return api.Job{}, err
	}
	return get[api.Job](ctx, c, p, nil)
}

// CancelJob asks a job to end. One that was cancelled before is left as it is;
// one that has ended otherwise is code conflict.
func (c *Client) CancelJob(ctx context.Context, id string) (api.Job, error) {
	p, err := join("jobs", id, "cancel")
	if err != nil {
		return api.Job{}, err
	}
	return post[api.Job](ctx, c, p, nil)
}

// JobLog reads the agent's log from the byte offset on. With follow it goes
// on until the job has ended.
func (c *Client) JobLog(ctx context.Context, id string, follow bool, offset int64) (Body, error) {
	p, err := join("jobs", id, "log")
	if err != nil {
		return nil, err
	}
	v := url.Values{}
	set(v, "follow", follow)
	set(v, "offset", offset)
	return c.stream(ctx, p, v)
}

// Artifacts lists what a job left.
func (c *Client) Artifacts(ctx context.Context, id string) (api.List[api.Artifact], error) {
	p, err := join("jobs", id, "artifacts")
	if err != nil {
		return api.List[api.Artifact]{}, err
	}
	return get[api.List[api.Artifact]](ctx, c, p, nil)
}

// Artifact reads one file that a job left.
func (c *Client) Artifact(ctx context.Context, id, file string) (Body, error) {
	p, err := join("jobs", id, "artifacts")
	if err != nil {
		return nil, err
	}
	if file == "" || path.Clean("/"+file) != "/"+file {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not the path of an artifact", file).WithField("path")
	}
	return c.stream(ctx, p+"/"+file, nil)
}

// JobBundle reads all artifacts of a job as one tar.gz.
func (c *Client) JobBundle(ctx context.Context, id string) (Body, error) {
	p, err := join("jobs", id, "bundle")
	if err != nil {
		return nil, err
	}
	return c.stream(ctx, p, nil)
}

// UploadBundle sends a git bundle, for JobCreate.BundleID.
func (c *Client) UploadBundle(ctx context.Context, r io.Reader) (api.Bundle, error) {
	resp, err := c.request(ctx, http.MethodPost, "/v1/bundles", nil, r, "application/octet-stream")
	return decode[api.Bundle](ctx, resp, err)
}

// DeleteBundle removes an uploaded git bundle that no job has.
func (c *Client) DeleteBundle(ctx context.Context, id string) error {
	p, err := join("bundles", id)
	if err != nil {
		return err
	}
	return c.call(ctx, http.MethodDelete, p, nil, nil, nil)
}

func decode[T any](ctx context.Context, resp *http.Response, err error) (T, error) {
	var out T
	if err != nil {
		return out, err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		return out, callError(ctx, err)
	}
	return out, nil
}

// Profiles lists the profiles.
func (c *Client) Profiles(ctx context.Context) (api.List[api.Profile], error) {
	return get[api.List[api.Profile]](ctx, c, "/v1/profiles", nil)
}

// Profile returns one profile with its text.
func (c *Client) Profile(ctx context.Context, name string) (api.Profile, error) {
	p, err := join("profiles", name)
	if err != nil {
		return api.Profile{}, err
	}
	return get[api.Profile](ctx, c, p, nil)
}

// PutProfile makes or replaces a profile. yaml is its text.
func (c *Client) PutProfile(ctx context.Context, name string, yaml string) (api.Profile, error) {
	p, err := join("profiles", name)
	if err != nil {
		return api.Profile{}, err
	}
	resp, err := c.request(ctx, http.MethodPut, p, nil, strings.NewReader(yaml), "application/yaml")
	return decode[api.Profile](ctx, resp, err)
}

// ValidateProfile checks the text of a profile and keeps nothing. What the
// configured backend does not honour is code unsupported.
func (c *Client) ValidateProfile(ctx context.Context, yaml string) (api.Profile, error) {
	resp, err := c.request(ctx, http.MethodPost, "/v1/profiles/validate", nil, strings.NewReader(yaml), "application/yaml")
	return decode[api.Profile](ctx, resp, err)
}

// Images lists the built images.
func (c *Client) Images(ctx context.Context) (api.List[api.Image], error) {
	return get[api.List[api.Image]](ctx, c, "/v1/images", nil)
}

// Image returns one image, by name or name@digest.
func (c *Client) Image(ctx context.Context, name string) (api.Image, error) {
	p, err := join("images", name)
	if err != nil {
		return api.Image{}, err
	}
	return get[api.Image](ctx, c, p, nil)
}

// RemoveImage removes an image, by name or name@digest. One that is in use is
// code conflict.
func (c *Client) RemoveImage(ctx context.Context, name string) error {
	p, err := join("images", name)
	if err != nil {
		return err
	}
	return c.call(ctx, http.MethodDelete, p, nil, nil, nil)
}
