// Package auth manages the tokens of the control API: it creates, lists and
// revokes them, and checks the token of a caller.
//
// A token is 256 random bits with a prefix that scanners for leaked
// credentials can find. It is shown once; only its hash is stored. The caller
// does not learn whether a token is unknown, revoked or expired.
package auth

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Prefix is the prefix of every token, so that a leaked token can be
// recognised.
const Prefix = "agentlab_"

// tokenBytes is the length of a token: the prefix and 256 bits in base 32.
const tokenBytes = len(Prefix) + 52

// touchEvery is the accuracy of the last use of a token.
const touchEvery = time.Minute

// Store stores tokens. Its semantics are those of package store.
type Store interface {
	PutAPIToken(ctx context.Context, t agentlab.APIToken, evs ...agentlab.Event) error
	APITokens(ctx context.Context) ([]agentlab.APIToken, error)
	APITokenByHash(ctx context.Context, hash string) (agentlab.APIToken, error)
	DeleteAPIToken(ctx context.Context, idOrName string, events func(agentlab.APIToken) []agentlab.Event) (agentlab.APIToken, error)
	TouchAPIToken(ctx context.Context, id string, at time.Time) error
}

// Config is the configuration of a Service. Store is required.
type Config struct {
	Store  Store
	Clock  func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
	Limits Limits
}

// Service manages tokens. It is safe for concurrent use.
type Service struct {
	cfg   Config
	clock func() time.Time
	log   *slog.Logger
	guess *limiter

	mu    sync.Mutex
	calls map[string]map[*activeCall]bool // by hash of the token
}

// activeCall is one running call with a token.
type activeCall struct{ cut context.CancelCauseFunc }

// New returns a Service.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, clock: cfg.Clock, log: cfg.Logger, calls: map[string]map[*activeCall]bool{}}
	if s.clock == nil {
		s.clock = time.Now
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.guess = newLimiter(cfg.Limits, s.clock)
	return s
}

// Request is a request to create a token. Empty Verbs and Sandboxes mean any.
type Request struct {
	Name      string
	Role      agentlab.Role
	Verbs     []string // the caller validates them
	Sandboxes []agentlab.TokenSandbox
	TTL       time.Duration
}

// Create creates a token and returns it with its secret, which cannot be read
// again. Codes: invalid with the field, exists, limit.
func (s *Service) Create(ctx context.Context, r Request) (agentlab.APIToken, string, error) {
	now := s.clock().UTC()
	secret := Prefix + agentlab.NewToken()
	verbs := slices.Clone(r.Verbs)
	slices.Sort(verbs)
	verbs = slices.Compact(verbs)
	t := agentlab.APIToken{
		ID: agentlab.NewTokenID(), Name: r.Name, Hash: hash(secret), Role: r.Role,
		AnyVerb: len(verbs) == 0, Verbs: verbs,
		AnySandbox: len(r.Sandboxes) == 0, Sandboxes: slices.Clone(r.Sandboxes),
		CreatedAt: now, ExpiresAt: now.Add(r.TTL),
	}
	if err := t.Validate(); err != nil {
		return agentlab.APIToken{}, "", err
	}
	if err := s.cfg.Store.PutAPIToken(ctx, t, tokenEvent(agentlab.EventTokenCreated, "token %s created", t)...); err != nil {
		return agentlab.APIToken{}, "", err
	}
	return t, secret, nil
}

// List returns the tokens by name, including expired ones that were not
// deleted yet.
func (s *Service) List(ctx context.Context) ([]agentlab.APIToken, error) {
	return s.cfg.Store.APITokens(ctx)
}

// Revoke revokes a token, by ID or name, and aborts every running call with
// it. Code not_found.
func (s *Service) Revoke(ctx context.Context, idOrName string) (agentlab.APIToken, error) {
	t, err := s.cfg.Store.DeleteAPIToken(ctx, idOrName, func(t agentlab.APIToken) []agentlab.Event {
		return tokenEvent(agentlab.EventTokenRevoked, "token %s revoked", t)
	})
	if err != nil {
		return t, err
	}
	s.guess.forget(t.Hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.calls[t.Hash] {
		c.cut(errRevoked)
	}
	return t, nil
}

func tokenEvent(kind, format string, t agentlab.APIToken) []agentlab.Event {
	return []agentlab.Event{agentlab.NewEvent(kind, map[string]any{"id": t.ID, "name": t.Name, "role": t.Role}, format, t.Name)}
}

// The error for every invalid token, and the error of an aborted call.
var (
	errInvalid = agentlab.Errorf(agentlab.CodeDenied, "the token is not valid").
			WithHint("it may have expired or been revoked; ask for another: agentlab token create NAME")
	errRevoked = agentlab.Errorf(agentlab.CodeDenied, "the token was revoked")
	errExpired = agentlab.Errorf(agentlab.CodeDenied, "the token has expired")
)

// Authenticate begins a call with a token from an address. The returned context ends
// with ctx, when the token expires and when it is revoked; leave must be
// called after the call. Code denied, the same for every invalid token; limit
// if there were too many invalid tokens from that address.
func (s *Service) Authenticate(ctx context.Context, from netip.Addr, secret string) (_ agentlab.APIToken, _ context.Context, leave func(), err error) {
	h := hash(secret)
	if !s.guess.allow(from, h) {
		return agentlab.APIToken{}, nil, nil, agentlab.Errorf(agentlab.CodeLimit, "too many invalid tokens from %s", addressText(from)).
			WithHint("wait a minute")
	}
	ctx, cut := context.WithCancelCause(ctx)
	// It is added before the lookup, so that a revocation in between finds
	// it.
	forget := s.register(h, &activeCall{cut})
	defer func() {
		if err != nil {
			forget()
			cut(nil)
		}
	}()
	t, err := s.findToken(ctx, secret, h)
	if agentlab.CodeOf(err) == agentlab.CodeDenied {
		s.guess.forget(h)
		return agentlab.APIToken{}, nil, nil, errInvalid
	}
	if err != nil {
		return agentlab.APIToken{}, nil, nil, err
	}
	s.guess.markValid(from, h)
	now := s.clock()
	timer := time.AfterFunc(t.ExpiresAt.Sub(now), func() { cut(errExpired) })
	if now.Sub(t.LastUsedAt) >= touchEvery {
		if err := s.cfg.Store.TouchAPIToken(ctx, t.ID, now); err != nil {
			s.log.Warn("cannot store the last use of a token", "token", t.ID, "err", err)
		}
	}
	return t, ctx, func() {
		timer.Stop()
		forget()
		cut(nil)
	}, nil
}

func (s *Service) findToken(ctx context.Context, secret, h string) (agentlab.APIToken, error) {
	if len(secret) != tokenBytes || !strings.HasPrefix(secret, Prefix) {
		return agentlab.APIToken{}, errInvalid
	}
	t, err := s.cfg.Store.APITokenByHash(ctx, h)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return t, errInvalid
	case err != nil:
		return t, err
	case t.Hash != h || !s.clock().Before(t.ExpiresAt):
		return t, errInvalid
	}
	return t, nil
}

func (s *Service) register(h string, c *activeCall) (forget func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls[h] == nil {
		s.calls[h] = map[*activeCall]bool{}
	}
	s.calls[h][c] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.calls[h], c)
		if len(s.calls[h]) == 0 {
			delete(s.calls, h)
		}
	}
}

func hash(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

func addressText(from netip.Addr) string {
	if !from.IsValid() {
		return "the unix socket"
	}
	return from.String()
}
