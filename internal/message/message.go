// Package message is the service of messages between people, programs and agents:
// it finds the scope of a caller, stores messages within the limits and wakes those
// who wait for them. All messages of a daemon pass through one Service.
package message

import (
	"cmp"
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"

	"github.com/agentlab-vm/agentlab"
)

// Store stores messages; *store.Store implements it.
type Store interface {
	AddMessage(ctx context.Context, m agentlab.Message, most agentlab.MessageLimits) (agentlab.Message, error)
	Messages(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error)
	Job(ctx context.Context, id string) (agentlab.Job, error)
	Sandbox(ctx context.Context, vmid int) (agentlab.Sandbox, error)
	Session(ctx context.Context, id string) (agentlab.Session, error)
	SessionOfWorkspace(ctx context.Context, workspaceID string) (v agentlab.Session, ok bool, err error)
	// Subscribe calls fn after each commit.
	Subscribe(fn func(agentlab.Commit))
}

// Service posts and reads messages.
type Service struct {
	store  Store
	limits agentlab.MessageLimits
	read   atomic.Int64 // messages that were read

	mu    sync.Mutex
	feeds map[agentlab.MessageScope]*feed // those that readers wait for
}

// feed is a scope with readers that wait for its next message.
type feed struct {
	posted  chan struct{} // closed after it
	readers int
}

// New returns a Service.
func New(store Store, limits agentlab.MessageLimits) *Service {
	s := &Service{store: store, limits: limits, feeds: map[agentlab.MessageScope]*feed{}}
	store.Subscribe(s.Committed)
	return s
}

// Post checks and appends a message; an empty kind becomes "note". Codes: invalid,
// limit.
func (s *Service) Post(ctx context.Context, m agentlab.Message) (agentlab.Message, error) {
	if m.Kind == "" {
		m.Kind = "note"
	}
	if err := m.Validate(); err != nil {
		return agentlab.Message{}, err
	}
	m, err := s.store.AddMessage(ctx, m, s.limits)
	if err != nil {
		return agentlab.Message{}, err
	}
	s.wake(m.Scope)
	return m, nil
}

// Committed ends the waits for messages of sessions that a commit deleted. The store
// calls it.
func (s *Service) Committed(c agentlab.Commit) {
	for _, e := range c.Events {
		var data struct {
			Session string                 `json:"session"`
			Action  agentlab.SessionAction `json:"action"`
		}
		if e.Kind == agentlab.EventSession && json.Unmarshal([]byte(e.Data), &data) == nil && data.Action == agentlab.SessionDeleted {
			s.wake(agentlab.MessageScope{Kind: agentlab.MessageScopeSession, ID: data.Session})
		}
	}
}

// wake makes the readers of a scope look again.
func (s *Service) wake(scope agentlab.MessageScope) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.feeds[scope]; f != nil {
		close(f.posted)
		delete(s.feeds, scope)
	}
}

// List returns messages in ascending order of ID.
func (s *Service) List(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error) {
	list, err := s.store.Messages(ctx, f)
	s.read.Add(int64(len(list)))
	return list, err
}

// AwaitMessages is List that returns when there is at least one message, or with none when
// ctx ends. Code not_found if the scope is a session that is deleted before a message.
func (s *Service) AwaitMessages(ctx context.Context, f agentlab.MessageFilter) ([]agentlab.Message, error) {
	for {
		posted, leave := s.enter(f.Scope) // before the read, so that no message is missed
		list, err := s.List(ctx, f)
		if err == nil && len(list) == 0 && f.Scope.Kind == agentlab.MessageScopeSession {
			_, err = s.store.Session(ctx, f.Scope.ID)
		}
		if err == nil && len(list) == 0 {
			select {
			case <-posted:
				leave()
				continue
			case <-ctx.Done():
			}
		}
		leave()
		if ctx.Err() != nil {
			return nil, nil //nolint:nilerr // the end of ctx is not an error
		}
		return list, err
	}
}

// enter returns a channel that is closed after the next message of a scope. leave
// must be called.
func (s *Service) enter(scope agentlab.MessageScope) (posted <-chan struct{}, leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.feeds[scope]
	if f == nil {
		f = &feed{posted: make(chan struct{})}
		s.feeds[scope] = f
	}
	f.readers++
	return f.posted, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if f.readers--; f.readers == 0 && s.feeds[scope] == f {
			delete(s.feeds, scope)
		}
	}
}

// Read returns the number of messages that were read since the start.
func (s *Service) Read() int64 { return s.read.Load() }

// Waiting returns the number of readers that wait for messages.
func (s *Service) Waiting() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.feeds {
		n += f.readers
	}
	return n
}

// OfSandbox returns the scope of that kind that a sandbox belongs to now, and the
// author of its messages: its job, or itself if it has none. The kind "" is the job,
// or the workspace of a sandbox without one. Code not_found if it belongs to none of
// that kind, invalid if the kind is unknown.
func (s *Service) OfSandbox(ctx context.Context, vmid int, kind agentlab.MessageScopeKind) (scope agentlab.MessageScope, author string, err error) {
	sb, err := s.store.Sandbox(ctx, vmid)
	if err != nil {
		return scope, "", err
	}
	author, own := "sandbox:"+sb.Name, agentlab.MessageScopeWorkspace
	if sb.JobID != "" {
		author, own = "job:"+sb.JobID, agentlab.MessageScopeJob
	}
	kind = cmp.Or(kind, own)
	scope.Kind = kind
	switch kind {
	case agentlab.MessageScopeJob:
		if sb.JobID == "" {
			break
		}
		j, err := s.store.Job(ctx, sb.JobID)
		return j.MessageScope(), author, err
	case agentlab.MessageScopeWorkspace:
		scope.ID = sb.Workspace
	case agentlab.MessageScopeSession:
		if sb.Workspace == "" {
			break
		}
		v, ok, err := s.store.SessionOfWorkspace(ctx, sb.Workspace)
		if err != nil {
			return scope, author, err
		}
		if ok {
			scope.ID = v.ID
		}
	default:
		return scope, author, scope.Validate()
	}
	if scope.ID == "" {
		return scope, author, agentlab.Errorf(agentlab.CodeNotFound, "this sandbox has no %s", kind).WithField("scope")
	}
	return scope, author, nil
}
