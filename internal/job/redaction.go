package job

import (
	"cmp"
	"context"
	"sync"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// keptAs is the name under which is kept what a sandbox was given: the id of
// its job, or its own UID when it has none.
func keptAs(sb agentlab.Sandbox) string { return cmp.Or(sb.JobID, sb.UID) }

// Redact takes the secrets of a job, or of the sandbox with that UID that has
// none, out of text that may hold words of its guest.
func (s *Service) Redact(ctx context.Context, id, text string) string {
	return s.Redaction(ctx, id)(text)
}

// Redaction is Redact for many texts. When the secrets cannot be had, all text
// goes; a guest that was given none has none to tell.
func (s *Service) Redaction(ctx context.Context, id string) func(text string) string {
	r, err := s.redactorFor(ctx, id)
	if err == nil {
		return r.String
	}
	s.log.Error("text cannot be redacted", "of", id, "err", err)
	return func(text string) string {
		if text == "" {
			return ""
		}
		return "(withheld: it could not be redacted)"
	}
}

// redactorFor is Redactor for a job, or for the UID of a sandbox without one.
func (s *Service) redactorFor(ctx context.Context, id string) (*redact.Redactor, error) {
	if agentlab.ValidateJobID(id) != nil {
		return s.madeOnce(id, func() (*redact.Redactor, error) {
			values, _, err := s.cfg.Secrets.Kept(id)
			return redact.New(values...), err
		})
	}
	j, err := s.cfg.Store.Job(ctx, id)
	if err == nil && j.Status == agentlab.JobQueued || agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil, nil //nolint:nilnil // it was given nothing; a nil Redactor redacts nothing
	}
	return s.Redactor(ctx, id)
}

// redaction is a redactor that is made once, since that costs much more than
// to use it; nil until then.
type redaction struct {
	mu sync.Mutex
	r  *redact.Redactor
}

// Redactor returns the redactor that knows the secrets that a job was given.
// An error means that nothing may be kept of what its guest says.
func (s *Service) Redactor(ctx context.Context, jobID string) (*redact.Redactor, error) {
	return s.madeOnce(jobID, func() (*redact.Redactor, error) {
		j, err := s.cfg.Store.Job(ctx, jobID)
		if err != nil {
			return nil, err
		}
		return s.redactorOf(ctx, j)
	})
}

// madeOnce remembers what build returns, until forgetRedactor. One that is
// being built then is remembered no more.
func (s *Service) madeOnce(id string, build func() (*redact.Redactor, error)) (*redact.Redactor, error) {
	s.mu.Lock()
	e := s.redactions[id]
	if e == nil {
		e = &redaction{}
		s.redactions[id] = e
	}
	s.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.r != nil {
		return e.r, nil
	}
	r, err := build()
	if err != nil {
		return nil, err
	}
	e.r = r
	return r, nil
}

func (s *Service) forgetRedactor(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.redactions, id)
}

// redactorOf knows what a job was given, whatever its bundle holds by now.
func (s *Service) redactorOf(ctx context.Context, j agentlab.Job) (*redact.Redactor, error) {
	values, ok, err := s.cfg.Secrets.Kept(j.ID)
	if err != nil {
		return nil, err
	}
	if !ok && j.Status == agentlab.JobRunning { // there was nothing to keep, or by a daemon that kept nothing
		_, b, err := s.secretsFor(ctx, j.Profile, &j)
		if err != nil {
			return nil, err
		}
		values = known(guestapi.BootstrapResponse{}, b)
	}
	return redact.New(values...), nil
}
