package guestplane

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Call is a call of a guest that has passed the checks of its route. Services read the
// sandbox and the job from it, never from the request.
type Call struct {
	VMID    int    // of the listener
	JobID   string // of the grant; "" if the route has none, or the grant has no job
	Log     *slog.Logger
	Request *http.Request

	g *guest
	e *entry
}

// Context returns the context of the call, which ends with the connection.
func (c *Call) Context() context.Context { return c.Request.Context() }

// Read reads the whole body. Code limit: it is larger than the route permits.
func (c *Call) Read() ([]byte, error) {
	p, err := io.ReadAll(c.Request.Body)
	if err != nil {
		return nil, BodyError(err)
	}
	return p, nil
}

// Decode reads the body, which must be one JSON document for v.
func (c *Call) Decode(v any) error {
	p, err := c.Read()
	if err != nil {
		return err
	}
	return guestcheck.Decode(p, v)
}

// QueryInt reads a parameter of the query, a number from 0 to most. A missing one is 0.
func (c *Call) QueryInt(name string, most int64) (int64, error) {
	s := c.Request.URL.Query().Get(name)
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > most {
		return 0, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a number from 0 to %d", name, most).WithField(name)
	}
	return n, nil
}

// Recheck checks the token of the call again: a body may take long, and the job may
// have ended in the meantime.
func (c *Call) Recheck() error {
	_, err := c.g.admit(c.Request, c.e.Token)
	return err
}

// JobRedactor returns the redactor of the secrets of the job. Its error is never
// caused by the guest and may contain data of the host, so the guest does not receive
// it.
func (c *Call) JobRedactor() (*redact.Redactor, error) {
	return c.redactor(c.g.p.cfg.Redactors.Redactor(c.Context(), c.JobID))
}

// SandboxRedactor is JobRedactor for the secrets of the sandbox, with or without a job.
func (c *Call) SandboxRedactor() (*redact.Redactor, error) {
	return c.redactor(c.g.p.cfg.Redactors.SandboxRedactor(c.Context(), c.VMID))
}

func (c *Call) redactor(red *redact.Redactor, err error) (*redact.Redactor, error) {
	if err != nil {
		c.Log.Error("cannot redact data of a guest", "job", c.JobID, "err", err)
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the controller cannot do this now")
	}
	return red, nil
}

// Stream is an answer of Size bytes that is not JSON. It is closed after it was sent.
type Stream struct {
	Body io.ReadCloser
	Size int64
}

// send sends the stream. A reader that makes no progress is disconnected.
func (s *Stream) send(c *Call, w http.ResponseWriter) {
	defer func() { _ = s.Body.Close() }()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(s.Size, 10))
	out := &deadlineWriter{w: w, rc: http.NewResponseController(w), stall: c.g.p.cfg.Limits.StallTimeout}
	defer out.end()
	if _, err := io.CopyN(out, s.Body, s.Size); err != nil {
		c.Log.Debug("a stream was not sent whole", "pattern", c.Request.Pattern, "err", err)
		panic(http.ErrAbortHandler) // the guest must not treat it as complete
	}
}

// Refused is an error with a status of its own. The guest receives all of it.
type Refused struct {
	Status     int
	Code       agentlab.Code
	Message    string
	RetryAfter int // seconds; 0: not sent
}

// Error implements error.
func (e *Refused) Error() string { return e.Message }
