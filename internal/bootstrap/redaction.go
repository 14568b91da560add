package bootstrap

import (
	"cmp"
	"context"
	"sync"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// secretsKey returns the key under which the secrets of a sandbox are stored:
// the ID of its job, or its UID if it has no job.
func secretsKey(sb agentlab.Sandbox) string { return cmp.Or(sb.JobID, sb.UID) }

// RedactFunc returns a function that removes the secrets of a job, or of the
// sandbox with that UID that has no job, from text that its guest may have
// chosen. If the secrets cannot be read, it removes all text.
func (s *Service) RedactFunc(ctx context.Context, id string) func(text string) string {
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

// redactorFor is Redactor for a job that may not have started or has no row, or for
// the UID of a sandbox without one.
func (s *Service) redactorFor(ctx context.Context, id string) (*redact.Redactor, error) {
	if agentlab.ValidateJobID(id) == nil {
		if _, err := s.cfg.Store.Job(ctx, id); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return s.Redactor(ctx, id)
		}
	}
	return s.cachedRedactor(id, func() (*redact.Redactor, error) {
		values, _, err := s.cfg.Secrets.Delivered(id)
		return redact.New(values...), err
	})
}

// redaction is a redactor that is built once, because building it is expensive;
// nil until then.
type redaction struct {
	mu sync.Mutex
	r  *redact.Redactor
}

// Redactor returns the redactor of the secrets that a job got. After an error
// nothing that its guest sends may be stored.
func (s *Service) Redactor(ctx context.Context, jobID string) (*redact.Redactor, error) {
	return s.cachedRedactor(jobID, func() (*redact.Redactor, error) {
		j, err := s.cfg.Store.Job(ctx, jobID)
		if err != nil {
			return nil, err
		}
		return s.buildRedactor(ctx, j)
	})
}

// SandboxRedactor returns the redactor of the secrets that a sandbox got, with or
// without a job. After an error nothing that its guest sends may be stored.
func (s *Service) SandboxRedactor(ctx context.Context, vmid int) (*redact.Redactor, error) {
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return nil, err
	}
	return s.redactorFor(ctx, secretsKey(sb))
}

// cachedRedactor caches what build returns, until the next exchange or Forget.
// A redactor that is being built at that time is not cached.
func (s *Service) cachedRedactor(id string, build func() (*redact.Redactor, error)) (*redact.Redactor, error) {
	s.mu.Lock()
	e := s.redactors[id]
	if e == nil {
		e = &redaction{}
		s.redactors[id] = e
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

// buildRedactor returns a redactor of the secrets that a job got, regardless of
// what its bundle has now.
func (s *Service) buildRedactor(ctx context.Context, j agentlab.Job) (*redact.Redactor, error) {
	values, ok, err := s.cfg.Secrets.Delivered(j.ID)
	if err != nil {
		return nil, err
	}
	if !ok && j.Status == agentlab.JobRunning { // there was nothing to store, or an older daemon stored nothing
		_, b, err := s.secretsFor(ctx, j.Profile, &j)
		if err != nil {
			return nil, err
		}
		values = secretValues(guestapi.BootstrapResponse{}, b)
	}
	return redact.New(values...), nil
}

// Secrets returns every secret that this process can read: the values of bundles,
// what guests got, and tokens that are not exchanged yet.
func (s *Service) Secrets(ctx context.Context) ([]string, error) {
	all, err := s.cfg.Secrets.Known(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.deliveries {
		all = append(all, d.token)
	}
	return all, nil
}
