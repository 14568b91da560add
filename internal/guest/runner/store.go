package runner

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// copyOut sends a copy of an artifact to the external store, if the secrets
// configure one. The controller already has the artifact, so a failure is only
// a warning; after the first failure nothing more is sent to the store.
func (r *Runner) copyOut(ctx context.Context, u *upload, c *collected) {
	if r.resp.ArtifactStore == nil || r.resp.ArtifactStore.Endpoint == "" || r.storeFailed {
		return
	}
	err := r.api.retry(ctx, r.cfg.Timing.StorePatience, func() error { return r.copyOnce(ctx, u) })
	if err != nil {
		r.storeFailed = true
		c.warn("%s could not be copied to the artifact store: %v", u.Path, err)
	}
}

func (r *Runner) copyOnce(ctx context.Context, u *upload) error {
	t := r.resp.ArtifactStore
	f, size, err := u.open()
	if err != nil {
		return &localError{err}
	}
	defer func() { _ = f.Close() }()
	ctx, cancel := context.WithTimeout(ctx, uploadTimeout)
	defer cancel()
	target := strings.TrimSuffix(t.Endpoint, "/") + "/" + escapePath(r.job.ID+"/"+u.Path)
	var body io.Reader = http.NoBody // with a known length of 0
	if size > 0 {
		body = io.LimitReader(f, size)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, target, body)
	if err != nil {
		return &localError{err}
	}
	req.ContentLength = size
	if t.Token != "" {
		req.Header.Set("Authorization", "Bearer "+t.Token)
	}
	resp, err := r.api.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return &callError{status: resp.StatusCode, message: fmt.Sprintf("%s for a PUT", http.StatusText(resp.StatusCode)), who: "the artifact store"}
	}
	return nil
}
