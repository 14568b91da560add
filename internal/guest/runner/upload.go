package runner

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// upload is a file that will become an artifact.
type upload struct {
	Path  string   // of the artifact
	root  *os.Root // file is below it; nil: file is a path of the runner
	file  string
	data  []byte // instead of a file
	vital bool   // it is the work itself
	Size  int64  // stored bytes
}

const uploadTimeout = 15 * time.Minute // of one try

func (u *upload) open() (io.ReadCloser, int64, error) {
	if u.file == "" {
		return io.NopCloser(bytes.NewReader(u.data)), int64(len(u.data)), nil
	}
	open := func() (*os.File, error) { return os.Open(u.file) }
	if u.root != nil {
		open = func() (*os.File, error) { return openOutput(u.root, u.file) }
	}
	f, err := open()
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, 0, err
	}
	return f, st.Size(), nil
}

// put uploads u to the controller and retries after transient errors until
// patience has passed.
func (r *Runner) put(ctx context.Context, u *upload, patience time.Duration) error {
	t := r.resp.Artifact
	target := strings.TrimSuffix(t.Endpoint, "/") + "/" + escapePath(u.Path)
	return r.api.retry(ctx, patience, func() error {
		f, size, err := u.open()
		if err != nil {
			return &localError{err}
		}
		defer func() { _ = f.Close() }()
		if t.MaxBytes > 0 && size > t.MaxBytes {
			return &localError{fmt.Errorf("%d bytes are more than the %d that the job may keep", size, t.MaxBytes)}
		}
		ctx, cancel := context.WithTimeout(ctx, uploadTimeout)
		defer cancel()
		var ack guestapi.UploadAck
		// A file that grows is truncated; if it shrinks, the call fails.
		err = r.api.do(ctx, "PUT", target, t.Token, io.LimitReader(f, size), size, &ack)
		if err == nil {
			u.Size = ack.Size
		}
		return err
	})
}

func escapePath(p string) string {
	parts := strings.Split(p, "/")
	for i, s := range parts {
		parts[i] = url.PathEscape(s)
	}
	return strings.Join(parts, "/")
}

// uploadAll uploads the results. It returns an error for the work itself;
// other failures become warnings.
func (r *Runner) uploadAll(ctx context.Context, c *collected) error {
	if !r.uploads() {
		return nil
	}
	var failed error
	for i := range c.Files {
		u := &c.Files[i]
		err := r.put(ctx, u, r.cfg.Timing.Patience)
		if err == nil {
			r.copyOut(ctx, u, c)
			continue
		}
		u.Size = -1
		c.warn("%s could not be uploaded: %v", u.Path, err)
		elsewhere := u.Path == artBundle && c.Result.Pushed
		if u.vital && !elsewhere && failed == nil {
			failed = fmt.Errorf("%s could not be uploaded: %w", u.Path, err)
		}
		if ctx.Err() != nil || denied(err) {
			return errors.Join(failed, ctx.Err())
		}
	}
	return failed
}

func (r *Runner) uploads() bool {
	return r.job.Upload && r.resp.Artifact != nil && r.resp.Artifact.Endpoint != ""
}

// jobReport is report.json.
type jobReport struct {
	JobID       string          `json:"job_id"`
	Agent       string          `json:"agent"`
	Status      string          `json:"status"`
	Phase       string          `json:"phase"` // in which it ended
	Message     string          `json:"message,omitempty"`
	ExitCode    *int            `json:"exit_code,omitempty"`
	StartedAt   time.Time       `json:"started_at"`
	AgentEnded  time.Time       `json:"agent_ended_at"`
	Result      guestapi.Result `json:"result"`
	Truncated   bool            `json:"changes_truncated,omitempty"`
	Artifacts   []reportFile    `json:"artifacts"`
	Warnings    []string        `json:"warnings,omitempty"`
	RepoURL     string          `json:"repo_url,omitempty"`
	Ref         string          `json:"ref,omitempty"`
	LogBytes    int64           `json:"log_bytes"`
	RunnerBuild string          `json:"agent_runner"`
}

type reportFile struct {
	Path   string `json:"path"`
	Source string `json:"source,omitempty"` // path in the work tree, if it differs
	Size   int64  `json:"size"`
}

func (r *Runner) uploadReport(ctx context.Context, rep jobReport, c *collected) {
	if !r.uploads() {
		return
	}
	for _, u := range c.Files {
		if u.Size < 0 {
			continue
		}
		f := reportFile{Path: u.Path, Size: u.Size}
		if u.root != nil {
			f.Source = u.file
		}
		rep.Artifacts = append(rep.Artifacts, f)
	}
	rep.Result, rep.Warnings, rep.Truncated = c.Result, c.Warnings, c.Truncated
	p, err := json.MarshalIndent(rep, "", "  ")
	u := &upload{Path: artReport, data: r.redactor().Bytes(append(p, '\n'))}
	if err == nil {
		err = r.put(ctx, u, r.cfg.Timing.Patience)
	}
	if err != nil {
		c.warn("%s could not be uploaded: %v", artReport, err)
		return
	}
	r.copyOut(ctx, u, c)
}
