package runner

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// api calls the guest plane of the controller.
type api struct {
	base   string // of the controller, without a slash at the end
	token  string // of the runner
	http   *http.Client
	timing Timing
}

func newAPI(base string, t Timing) *api {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	return &api{
		base: strings.TrimSuffix(base, "/"), timing: t,
		http: &http.Client{
			Transport: &http.Transport{DialContext: dialer.DialContext, MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Minute, DisableCompression: true},
			CheckRedirect: func(*http.Request, []*http.Request) error {
				return http.ErrUseLastResponse // the controller never redirects
			},
		},
	}
}

// callError is an answer with an error.
type callError struct {
	status  int
	message string
	who     string // the server; "" means the controller
}

func (e *callError) Error() string {
	return fmt.Sprintf("%s answers %d: %s", cmp.Or(e.who, "the controller"), e.status, e.message)
}

// denied reports whether the controller does not accept the token, so that no
// further call makes sense.
func denied(err error) bool {
	var e *callError
	return errors.As(err, &e) && (e.status == http.StatusUnauthorized || e.status == http.StatusForbidden)
}

// transient reports whether a call may succeed later: the controller was not
// reached, is busy, or has an internal error.
func transient(err error) bool {
	var e *callError
	if errors.As(err, &e) {
		return e.status >= 500 && e.status != http.StatusNotImplemented || e.status == http.StatusTooManyRequests || e.status == http.StatusRequestTimeout
	}
	var local *localError
	return err != nil && !errors.As(err, &local)
}

// localError is a fault of the runner in a call; repeating the call does not help.
type localError struct{ error }

func (e *localError) Unwrap() error { return e.error }

const (
	callTimeout  = 30 * time.Second
	maxAnswer    = 8 << 20 // bytes of a JSON answer; enough for a task and a secrets bundle
	maxErrorBody = 4 << 10
)

// do makes one call. out may be nil, or an io.Writer for an answer that is
// not JSON.
func (a *api) do(ctx context.Context, method, url, token string, body io.Reader, size int64, out any) error {
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return &localError{err}
	}
	if body != nil {
		req.ContentLength = size
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := a.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusNoContent {
		return answerError(resp)
	}
	if e, ok := out.(interface{ expect(int64) }); ok {
		e.expect(resp.ContentLength)
	}
	switch out := out.(type) {
	case nil:
		return nil
	case io.Writer:
		_, err = io.Copy(out, resp.Body)
		return err
	}
	p, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err == nil && len(p) > maxAnswer {
		err = errors.New("the answer is too long")
	}
	if err == nil {
		err = json.Unmarshal(p, out)
	}
	return err
}

func answerError(resp *http.Response) error {
	p, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // as much as could be read
	e := &callError{status: resp.StatusCode, message: http.StatusText(resp.StatusCode)}
	var body guestapi.ErrorBody
	if json.Unmarshal(p, &body) == nil && body.Message != "" {
		e.message = body.Message
	}
	return e
}

// call sends in as JSON with the runner's token, within limit.
func (a *api) call(ctx context.Context, limit time.Duration, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var body io.Reader
	var size int64
	if in != nil {
		p, err := json.Marshal(in)
		if err != nil {
			return &localError{err}
		}
		body, size = bytes.NewReader(p), int64(len(p))
	}
	return a.do(ctx, method, a.base+path, a.token, body, size, out)
}

// retry repeats f while its error is transient, with growing pauses, until
// patience has passed (0 means no limit) or ctx ends.
func (a *api) retry(ctx context.Context, patience time.Duration, f func() error) error {
	began := time.Now()
	pause := a.timing.FirstRetry
	for {
		err := f()
		if err == nil || !transient(err) || ctx.Err() != nil {
			return err
		}
		if patience > 0 && time.Since(began) > patience {
			return err
		}
		jitter := time.Duration(time.Now().UnixNano()) % pause // not of math/rand: copies of a template have the same
		if !sleep(ctx, pause/2+jitter) {
			return err
		}
		pause = min(2*pause, a.timing.MaxRetry)
	}
}

// sleep returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
